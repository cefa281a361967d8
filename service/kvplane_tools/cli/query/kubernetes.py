"""The checks of `kvplane doctor --kubernetes`: why workloads of the chart have no pods that are ready.

They read what `kubectl` shows, which has the operator's access to a cluster. Nothing is changed.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from kvplane.base.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvplane_tools.cli.query.checks import Finding

Object: TypeAlias = dict[str, Any]  # of Kubernetes, as JSON

TIMEOUT_S = 20.0  # of each call
MAX_BYTES = 64 << 20  # of an answer
_SELECTOR = "--selector=app.kubernetes.io/part-of=kvplane"
_WORKLOADS = {"StatefulSet": "replicas", "Deployment": "replicas", "DaemonSet": "desiredNumberScheduled"}
_STARTS = {"", "ContainerCreating", "PodInitializing"}  # reasons of containers without a problem
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

# What helps, by what Kubernetes reports. The first that matches counts.
_REMEDIES = [
    (re.compile(text, re.IGNORECASE), remedy)
    for text, remedy in (
        (
            "runtimeclass",
            "install the GPU operator, or set gpuWorker.runtimeClassName to one of `kubectl get runtimeclass`",
        ),
        (
            "violates podsecurity",
            "use a namespace whose label pod-security.kubernetes.io/enforce permits this, or leave out what is named",
        ),
        (
            "exceeded quota|must specify (limits|requests)",
            "raise the ResourceQuota, or lower `resources`",
        ),
        (
            "(secret|configmap) .*not found",
            "create it in this namespace, with the keys that values.yaml names",
        ),
        (
            "errimagepull|imagepullbackoff|invalidimagename|errimageneverpull",
            "check image.registry, image.repository, image.tag and imagePullSecrets",
        ),
        (
            "storageclass|unbound immediate|provisioningfailed",
            "set storageClassName: see `kubectl get storageclass`",
        ),
        ("insufficient [a-z.-]+/", "add a node that has this resource and its device plugin, or request less"),
        ("insufficient (cpu|memory)", "lower `resources` in the values, or add a node"),
        ("node affinity|node selector", "label a node, or change nodeSelector in the values"),
        ("untolerated taint", "set tolerations in the values"),
        ("oomkilled", "raise resources.limits.memory: the service derives its own limits from it"),
        ("serviceaccount .*not found", "create the service account, or set serviceAccount.create"),
    )
]


def look(namespace: str = "", context: str = "") -> list[Finding]:
    """Check all workloads of the chart in a namespace. "" = what the current context of kubectl states.

    Raises:
        InvalidArgument: the namespace is not a name.
        FailedPrecondition: there is no kubectl.
        Unavailable: the cluster does not answer, or does not permit it.
    """
    if namespace and not _NAME.fullmatch(namespace):
        raise InvalidArgument(f"{namespace[:100]!r} is not a name", field="--namespace", remedy="name a namespace")
    where = [f"--namespace={namespace}"] * bool(namespace) + [f"--context={context}"] * bool(context)
    kinds = "statefulsets,deployments,daemonsets,replicasets,pods"
    objects = _get([*where, "get", kinds, _SELECTOR])
    return list(findings(objects, _get([*where, "get", "events", "--field-selector=type=Warning"])))


def _get(arguments: Sequence[str]) -> list[Object]:
    command = ["kubectl", *arguments, "--output=json", f"--request-timeout={TIMEOUT_S:g}s"]
    shown = " ".join(command)
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            what = f"kubectl cannot be run: {error.strerror}"
            raise FailedPrecondition(what, field="--kubernetes", remedy="install kubectl") from error
        ends = threading.Timer(TIMEOUT_S + 5, child.kill)
        ends.start()
        try:
            assert child.stdout is not None
            raw = child.stdout.read(MAX_BYTES + 1)
        finally:
            ends.cancel()
            child.kill()  # has ended, unless its answer is too long
            child.communicate()
        errors.seek(0)
        said = errors.read(1 << 12).decode(errors="replace").strip().splitlines()
    try:
        items = json.loads(raw[:MAX_BYTES])["items"] if len(raw) <= MAX_BYTES else None
    except (ValueError, KeyError, TypeError):
        items = None
    if not isinstance(items, list):
        what = said[-1] if said else f"no list of objects within {TIMEOUT_S:g} s and {MAX_BYTES >> 20} MiB"
        remedy = f"try `{shown}`; it needs permission to list these objects"
        raise Unavailable(f"kubectl: {what[:500]}", field="--kubernetes", remedy=remedy)
    return [one for one in items if isinstance(one, dict)]


def findings(objects: Iterable[Object], events: Iterable[Object]) -> Iterator[Finding]:
    """Yield a finding for each workload, and for each of its pods that is not well."""
    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(str(one.get("kind")), []).append(one)
    warnings: dict[str, Object] = {}  # the latest of each object, by its uid
    for event in sorted(events, key=_time_of):
        warnings[str(_at(event, "involvedObject", "uid"))] = event
    workloads = [one for kind in _WORKLOADS for one in by_kind.get(kind, [])]
    if not workloads:
        remedy = "name the namespace of a release with --namespace"
        yield Finding("release", False, "no workload of the chart is in this namespace", remedy)
    sets = by_kind.get("ReplicaSet", [])
    for one in workloads:
        yield _of_workload(one, sets, warnings)
    claims = {_claim_of(event): event for event in warnings.values()}
    for pod in by_kind.get("Pod", []):
        if found := _problem_of(pod, warnings, claims):
            name = str(_at(pod, "metadata", "name"))
            yield Finding(f"pod/{name}", False, found, _remedy(found, name))


def _of_workload(one: Object, sets: Iterable[Object], warnings: dict[str, Object]) -> Finding:
    kind, uid = str(one["kind"]), _at(one, "metadata", "uid")
    check = f"{kind.lower()}/{_at(one, 'metadata', 'name')}"
    is_daemon = kind == "DaemonSet"
    wanted = _number(_at(one, "status" if is_daemon else "spec", _WORKLOADS[kind]))
    ready = _number(_at(one, "status", "numberReady" if is_daemon else "readyReplicas"))
    if is_daemon and not wanted:
        seen = "no node matches its node selector"
        return Finding(check, False, seen, "label a node, or change gpuWorker.nodeSelector")
    seen = f"{ready} of {wanted} pods ready"
    if ready >= wanted:
        return Finding(check, True, seen)
    owned = [_at(each, "metadata", "uid") for each in sets if uid in _owners_of(each)]
    refused = [warnings[str(owner)] for owner in (uid, *owned) if str(owner) in warnings]
    if not refused:
        return Finding(check, False, seen, "see its pods")
    why = _text_of(max(refused, key=_time_of))
    return Finding(check, False, f"{seen}: {why}", _remedy(why, ""))


def _problem_of(pod: Object, warnings: dict[str, Object], claims: dict[str, Object]) -> str:
    """Return why a pod is not ready, or was restarted for lack of memory; "" if it is well."""
    status = _at(pod, "status")
    kept = [one for kind in ("initContainerStatuses", "containerStatuses") for one in _list(_at(status, kind))]
    for container in kept:
        waiting, last = _at(container, "state", "waiting"), _at(container, "lastState", "terminated")
        reason = str(_at(waiting, "reason") or "")
        ended = f"; it ended with {_at(last, 'reason')} ({_at(last, 'exitCode')})" if last else ""
        if reason not in _STARTS:
            said = f": {_at(waiting, 'message')}" if _at(waiting, "message") and not ended else ""
            return f"{_at(container, 'name')}: {reason}{said}{ended}"
        if _at(last, "reason") == "OOMKilled":
            return f"{_at(container, 'name')} was restarted{ended}"
    conditions = {str(_at(one, "type")): one for one in _list(_at(status, "conditions"))}
    if _at(conditions, "Ready", "status") == "True" or _at(status, "phase") == "Succeeded":
        return ""
    if _at(conditions, "PodScheduled", "status") == "False":
        names = [str(_at(one, "persistentVolumeClaim", "claimName")) for one in _list(_at(pod, "spec", "volumes"))]
        refused = [_text_of(claims[name]) for name in names if name in claims]
        return "; ".join([f"not scheduled: {_at(conditions, 'PodScheduled', 'message')}", *refused])
    event = warnings.get(str(_at(pod, "metadata", "uid")))
    if event is not None:
        return _text_of(event)
    stated = _at(status, "message") or _at(status, "reason") or _at(conditions, "Ready", "message")
    return f"not ready: {stated or _at(status, 'phase')}"


def _remedy(seen: str, pod: str) -> str:
    found = next((remedy for text, remedy in _REMEDIES if text.search(seen)), "")
    return found or (f"see `kubectl logs --previous {pod}` and `kubectl describe pod {pod}`" if pod else "see its pods")


def _text_of(event: Object) -> str:
    return f"{_at(event, 'reason')}: {_at(event, 'message')}"


def _time_of(event: Object) -> str:
    """Return the time of an event in RFC 3339, which sorts; the formats of events have it in different fields."""
    times = _at(event, "series", "lastObservedTime"), _at(event, "lastTimestamp"), _at(event, "eventTime")
    return max(str(one or "") for one in times)


def _claim_of(event: Object) -> str:
    is_claim = _at(event, "involvedObject", "kind") == "PersistentVolumeClaim"
    return str(_at(event, "involvedObject", "name")) if is_claim else ""


def _owners_of(one: Object) -> list[object]:
    return [_at(owner, "uid") for owner in _list(_at(one, "metadata", "ownerReferences"))]


def _at(value: Any, *path: str) -> Any:  # noqa: ANN401 - JSON
    """Return what is at a path of names, None if nothing is."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
