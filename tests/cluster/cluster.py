"""One cluster: kubectl and Helm on a context that is stated by name, and images that its nodes have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvplane"
HELM = str(ROOT / "scripts" / "helm.sh")
CALL_S, LOOK_S = 60.0, 0.5
USER = 10001
REGISTRY = r"(?:([^/]*[.:][^/]*|localhost)/)?"
REFERENCE = re.compile(REGISTRY + r"([a-z0-9][a-z0-9._/-]*)(?::([\w][\w.-]*))?(?:@(sha256:[0-9a-f]{64}))?")

Object = dict[str, Any]


class Failed(Exception):
    """A case fails: what was seen."""


@dataclass(frozen=True)
class Image:
    """A reference to an image, in the parts that the chart's values have."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def of(cls, reference: str) -> Image | None:
        """The parts of REGISTRY/REPOSITORY:TAG or @sha256:..., None for any other text."""
        found = REFERENCE.fullmatch(reference)
        if found is None or not (found[3] or found[4]):
            return None
        return cls(found[1] or "docker.io", found[2], found[3] or "", found[4] or "")

    @property
    def reference(self) -> str:
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.registry}/{self.repository}{end}"

    @property
    def values(self) -> Object:
        return {"registry": self.registry, "repository": self.repository, "tag": self.tag, "digest": self.digest}


@dataclass(frozen=True)
class Images:
    """The images of the service, of the worker, and of the built-in store; None = not stated."""

    service: Image
    worker: Image | None = None
    store: Image | None = None


@dataclass(frozen=True)
class Cluster:
    """A context of kubectl. Every call states it."""

    context: str
    images: Images

    def kubectl(self, *arguments: str, given: str = "", limit_s: float = CALL_S) -> str:
        """Run kubectl; returns its output. Raises Failed with its error."""
        return run(["kubectl", f"--context={self.context}", *arguments], given, limit_s)

    def get(self, namespace: str, *what: str) -> Any:
        """Objects as JSON."""
        return json.loads(self.kubectl(f"--namespace={namespace}", "get", *what, "--output=json"))

    def items(self, namespace: str, *what: str) -> list[Object]:
        return list(self.get(namespace, *what)["items"])

    def apply(self, namespace: str, *objects: Object) -> None:
        """Create or change objects, checked strictly by the server."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl(f"--namespace={namespace}", "apply", "--validate=strict", "--filename=-", given=text)

    def helm(self, *arguments: str, values: Mapping[str, Any] | None = None, limit_s: float = 400) -> str:
        """Run Helm; returns its output. Raises Failed with its error."""
        extra = ["--values=-"] if values is not None else []
        return run([HELM, f"--kube-context={self.context}", *arguments, *extra], json.dumps(values), limit_s)


def run(command: Sequence[str], given: str, limit_s: float) -> str:
    """Run a command to its end; returns its output. Raises Failed."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(command[:6])} ... takes over {limit_s:.0f} s") from late
    if done.returncode != 0:
        said = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line[:5] != "WARNI"]
        raise Failed(" / ".join(said[-4:])[:900] or f"{command[0]} ended with {done.returncode}")
    return done.stdout


class Space:
    """A namespace of one case, with releases of the chart in it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    # ---- the namespace

    def make(self, enforce: str = "restricted") -> None:
        """Create it. `enforce` is the Pod Security Standard that it enforces."""
        labels = {"app.kubernetes.io/managed-by": "kvplane-cluster-test", "pod-security.kubernetes.io/enforce": enforce}
        self.cluster.apply(self.name, named("Namespace", self.name, labels=labels))

    def remove(self, waits: bool = True) -> None:
        """Delete it with all that is in it."""
        wait = f"--wait={'true' if waits else 'false'}"
        self.cluster.kubectl("delete", "namespace", self.name, "--ignore-not-found", wait, limit_s=240)

    def keep(self, folder: Path) -> None:
        """Write what explains a failure: events, objects, descriptions and logs."""
        folder.mkdir(parents=True, exist_ok=True)
        for file, what in {
            "events.txt": ("get", "events", "--sort-by=.lastTimestamp"),
            "objects.txt": ("get", "all,configmaps,secrets,pvc,networkpolicies", "--output=wide"),
            "describe.txt": ("describe", "pods,statefulsets,daemonsets,deployments"),
        }.items():
            (folder / file).write_text(self._tried(*what))
        for pod in self._tried("get", "pods", "--output=name").split():
            kept = ("--all-containers", "--prefix", "--tail=2000")
            for previous in (False, True):
                text = self._tried("logs", pod, *kept, f"--previous={str(previous).lower()}")
                (folder / f"{pod.replace('/', '-')}{'-previous' * previous}.log").write_text(text)

    def _tried(self, *what: str) -> str:
        try:
            return self.kubectl(*what)
        except Failed as failure:
            return str(failure)

    def kubectl(self, *arguments: str, given: str = "", limit_s: float = CALL_S) -> str:
        return self.cluster.kubectl(f"--namespace={self.name}", *arguments, given=given, limit_s=limit_s)

    def apply(self, *objects: Object) -> None:
        self.cluster.apply(self.name, *objects)

    # ---- releases

    def install(self, values: Mapping[str, Any], *more: str, release: str = "kvplane") -> str:
        """Install the chart with these values and the run's images."""
        return self._helm("install", release, values, "--wait", "--timeout=4m", *more)

    def begin(self, values: Mapping[str, Any], release: str = "kvplane") -> str:
        """Install it, and wait for nothing."""
        return self._helm("install", release, values)

    def upgrade(self, values: Mapping[str, Any], *more: str, release: str = "kvplane") -> str:
        return self._helm("upgrade", release, values, "--wait", "--timeout=5m", *more)

    def _helm(self, verb: str, release: str, values: Mapping[str, Any], *more: str) -> str:
        whole = merged(self.base_values(), values)
        return self.cluster.helm(verb, release, str(CHART), f"--namespace={self.name}", *more, values=whole)

    def test(self, release: str = "kvplane") -> None:
        """Run `helm test`. Raises Failed with the log of its pod, which stays if it fails."""
        try:
            said = self.cluster.helm("test", release, f"--namespace={self.name}", "--timeout=3m")
        except Failed as failure:
            raise Failed(f"{failure}: {self._tried('logs', f'{release}-test', '--tail=3').strip()}") from failure
        if not re.search(r"Phase:\s+Succeeded", said):
            raise Failed(f"helm test ran nothing: {said[-300:]}")

    def base_values(self) -> Object:
        """The run's images, and requests that a small cluster has room for."""
        images, small = self.cluster.images, {"cpu": "50m", "memory": "128Mi"}
        values: Object = {
            "image": images.service.values,
            "resources": {"requests": small},
            "router": {"resources": {"requests": small}},
        }
        if images.worker is not None:
            requests = {"requests": {"cpu": "50m", "memory": "256Mi"}}
            values["gpuWorker"] = {"image": images.worker.values, "resources": requests}
        if images.store is not None:
            values["store"] = {"builtin": {"image": images.store.values}}
        return values

    # ---- pods

    def pods(self, selector: str) -> list[Object]:
        """Pods that are not being deleted."""
        found = self.cluster.items(self.name, "pods", f"--selector={selector}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, selector: str, count: int, limit_s: float = 240) -> None:
        """Wait until this number of pods is ready, and no other pod has the labels."""
        wait_until(lambda: self._are_ready(selector, count), f"{count} pods of {selector} are ready", limit_s)

    def _are_ready(self, selector: str, count: int) -> bool:
        found = self.cluster.items(self.name, "pods", f"--selector={selector}")
        ready = [pod for pod in found if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
        return len(ready) == len(found) == count

    def logs(self, pod: str, *more: str) -> str:
        return self.kubectl("logs", pod, *more)

    def execute(self, pod: str, *command: str, limit_s: float = CALL_S) -> str:
        return self.kubectl("exec", pod, "--", *command, limit_s=limit_s)

    def ended(self, pod: str, limit_s: float = 180) -> str:
        """Wait until a pod has ended well; returns its log."""
        wait_until(lambda: self._phase(pod) in ("Succeeded", "Failed"), f"pod {pod} ends", limit_s)
        if self._phase(pod) != "Succeeded":
            raise Failed(f"pod {pod} failed: {self.logs(pod, '--tail=5').strip()[-500:]}")
        return self.logs(pod)

    def _phase(self, pod: str) -> str:
        return str(self.cluster.get(self.name, "pod", pod)["status"].get("phase"))


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def wait_until(happened: Callable[[], bool], what: str, limit_s: float) -> None:
    """Look until the condition holds: a cluster has no event that stands for all of them. Raises Failed."""
    deadline = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > deadline:
            raise Failed(f"after {limit_s:.0f} s not: {what}")
        time.sleep(LOOK_S)


# ---- objects


def named(kind: str, name: str, labels: Mapping[str, str] | None = None, **content: Any) -> Object:
    """An object of the API's first group."""
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "labels": dict(labels or {})},
        **content,
    }


def secret(name: str, **files: str) -> Object:
    """A Secret; `_` in a name stands for a dot."""
    return named("Secret", name, stringData={key.replace("_", "."): text for key, text in files.items()})


def values_of(name: str) -> Object:
    """A set of values of the chart."""
    return dict(yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text()) or {})


def merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> Object:
    """Values, with others over them; maps are merged and lists replaced, as Helm does it."""
    found = dict(first)
    for key, value in then.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def has_tools() -> str:
    """The first tool that is missing; "" if none is."""
    return next((tool for tool in ("kubectl", "npm") if shutil.which(tool) is None), "")


def fresh_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvplane-cluster-test-"))
