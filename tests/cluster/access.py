"""What is checked before anything is made: the context, the server, and what the account may do.

Each refusal names the field that is wrong, and a remedy.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError, Unavailable

TIMEOUT_S = 20
TRIED = "kvplane-cluster-test"  # a namespace that need not exist: a role there counts, as one of the cluster does

# Group and resource: verbs. The first part is of the cluster, the second of the namespaces that are made.
OF_CLUSTER = {("", "namespaces"): "get create delete", ("", "nodes"): "list"}
OF_NAMESPACES = {
    ("", "pods"): "get list create delete",
    ("", "pods/log"): "get",
    ("", "pods/exec"): "create",
    **{("", name): "get list create delete patch" for name in ("services", "configmaps", "secrets", "serviceaccounts")},
    ("", "events"): "list",
    ("", "persistentvolumeclaims"): "list create delete",
    ("", "resourcequotas"): "create",
    ("apps", "statefulsets"): "get list create delete patch",
    ("apps", "deployments"): "get list create delete patch",
    ("apps", "daemonsets"): "get list create delete patch",
    ("policy", "poddisruptionbudgets"): "get create delete",
    ("networking.k8s.io", "networkpolicies"): "get create delete",
    ("rbac.authorization.k8s.io", "roles"): "get create delete",
    ("rbac.authorization.k8s.io", "rolebindings"): "get create delete",
    # The chart's role grants these, and one may grant only what one has.
    ("coordination.k8s.io", "leases"): "get create update",
}

Call = Callable[[Sequence[str], str], "subprocess.CompletedProcess[str]"]


def call(command: Sequence[str], given: str) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises FailedPrecondition if it is not installed."""
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S + 10, check=False)
    except OSError as error:
        what = f"{command[0]} cannot be run: {error.strerror}"
        raise FailedPrecondition(what, field=command[0], remedy=f"install {command[0]}") from error
    except subprocess.TimeoutExpired as late:
        remedy = "see `kubectl cluster-info`"
        raise Unavailable(
            f"{command[0]} has no answer within {late.timeout:.0f} s", field="CONTEXT", remedy=remedy
        ) from late


@dataclass(frozen=True)
class Found:
    """A cluster that may be used.

    Attributes:
        version: of its API server, such as v1.36.2.
        nodes: number of its nodes.
        groups: groups of its API.
    """

    version: str
    nodes: int
    groups: frozenset[str]


def check_context(context: str, call: Call = call) -> None:
    """Check that a context is stated, and that KUBECONFIG has it. Raises InvalidArgument."""
    known = call(["kubectl", "config", "get-contexts", "--output=name"], "").stdout.split()
    shown = ", ".join(known[:8]) or "none"
    where = os.environ.get("KUBECONFIG") or "kubectl's own file"
    if not context:
        remedy = f"name it: make cluster-test CONTEXT=NAME IMAGE=...; {where} has {shown}"
        raise InvalidArgument("no context is stated, and the current one is never used", field="CONTEXT", remedy=remedy)
    if context not in known:
        remedy = f"use one of its contexts: {shown}"
        raise InvalidArgument(f"{where} has no context {context[:100]!r}", field="CONTEXT", remedy=remedy)


def check(context: str, call: Call = call) -> Found:
    """Check that the cluster of a context may be used. Nothing is made.

    Raises:
        Unavailable: its server does not answer.
        FailedPrecondition: a permission is missing, or kubectl is.
    """
    kubectl = ["kubectl", f"--context={context}", f"--request-timeout={TIMEOUT_S}s"]
    version = _answer(kubectl, "get", "--raw=/version", call=call)
    missing = list(_missing(kubectl, call))
    if missing:
        remedy = f"grant it to the account of context {context}, by a ClusterRole and a ClusterRoleBinding"
        raise FailedPrecondition(f"missing permissions: {', '.join(missing)}", field="CONTEXT", remedy=remedy)
    nodes = json.loads(_answer(kubectl, "get", "nodes", "--output=json", call=call))["items"]
    groups = json.loads(_answer(kubectl, "get", "--raw=/apis", call=call))["groups"]
    return Found(json.loads(version)["gitVersion"], len(nodes), frozenset(one["name"] for one in groups))


def _answer(kubectl: Sequence[str], *arguments: str, call: Call) -> str:
    done = call([*kubectl, *arguments], "")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        remedy = f"try `{' '.join([*kubectl, *arguments])}`"
        raise Unavailable(f"the cluster does not answer: {said[:300]}", field="CONTEXT", remedy=remedy)
    return done.stdout


def wanted() -> Iterator[dict[str, str]]:
    """The permissions that a run needs, as attributes of a review."""
    for namespace, rules in (("", OF_CLUSTER), (TRIED, OF_NAMESPACES)):
        for (group, resource), verbs in rules.items():
            name, _, part = resource.partition("/")
            for verb in verbs.split():
                yield {"namespace": namespace, "group": group, "resource": name, "subresource": part, "verb": verb}


def _missing(kubectl: Sequence[str], call: Call) -> Iterator[str]:
    """Permissions that the server says are missing, all asked at once."""
    asked = list(wanted())
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    items = [{**review, "spec": {"resourceAttributes": one}} for one in asked]
    text = "\n---\n".join(map(json.dumps, items))
    done = call([*kubectl, "create", "--validate=false", "--filename=-", "--output=json"], text)
    answers = list(_documents(done.stdout))
    if done.returncode != 0 or len(answers) != len(asked):
        said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        what = f"the server does not say what the account may do: {said[:300]}"
        raise Unavailable(what, field="CONTEXT", remedy="see `kubectl auth can-i --list`")
    for one, answer in zip(asked, answers, strict=True):
        if not answer.get("status", {}).get("allowed"):
            name = "/".join(part for part in (one["resource"], one["subresource"]) if part)
            group = f".{one['group']}" * bool(one["group"])
            yield f"{one['verb']} {name}{group}" + " in namespaces" * bool(one["namespace"])


def _documents(text: str) -> Iterator[dict[str, dict[str, object]]]:
    """JSON documents, one after another, and those of lists among them."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        at += len(text[at:]) - len(text[at:].lstrip())
        found, at = decoder.raw_decode(text, at)
        yield from found.get("items", [found])


def line_of(error: KvplaneError) -> str:
    """An error as a line with field and remedy."""
    return f"cluster-test: {error.field}: {error.message}: {error.remedy}"
