"""An emulation of the part of Kubernetes' API that Helm uses: discovery, objects, watches, patches.

Each object is validated against the schema of the emulated version, and unknown fields are refused. Immutable fields
do not change. Workloads are ready at once; a pod is run by a function that the test sets. There is no scheduling,
admission or authorization, and there are few defaults. A server-side apply replaces what was applied before, which is
correct where one manager owns every field.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.helm.charts import NAMESPACE, Object
from tests.helm.patches import merge, strategic_merge
from tests.helm.schemas import complaints

# Group and version → plural → kind; all are namespaced except the last group's.
RESOURCES = {
    "v1": {
        "configmaps": "ConfigMap",
        "events": "Event",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
        "namespaces": "Namespace",
    },
    "apps/v1": {
        "daemonsets": "DaemonSet",
        "deployments": "Deployment",
        "replicasets": "ReplicaSet",
        "statefulsets": "StatefulSet",
    },
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "cert-manager.io/v1": {"certificates": "Certificate"},
    "monitoring.coreos.com/v1": {"prometheusrules": "PrometheusRule", "servicemonitors": "ServiceMonitor"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
}
# What an update may not change.
FIXED = {
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Deployment": ("selector",),
    "DaemonSet": ("selector",),
}
UNITS = ["Ki", "Mi", "Gi", "Ti"]
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
WATCH_S = 0.5  # seconds between checks of a watch for the end of the server


@dataclass(frozen=True, slots=True)
class Place:
    """The target of a path: a collection, or an object in it."""

    api: str
    plural: str
    namespace: str
    name: str

    @classmethod
    def of(cls, path: str) -> Place | None:
        """None for a path that names no object."""
        words = path.strip("/").split("/")
        if words[0] == "api" and len(words) > 2:
            api, rest = words[1], words[2:]
        elif words[0] == "apis" and len(words) > 3:
            api, rest = "/".join(words[1:3]), words[3:]
        else:
            return None
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        if not rest or rest[0] not in RESOURCES.get(api, {}):
            return None
        return cls(api, rest[0], namespace, rest[1] if len(rest) > 1 else "")


class Cluster:
    """The objects, and a log of their changes."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.run_pod: Callable[[Object], bool] = lambda _: True  # whether it succeeds
        self.log: list[str] = []  # such as "POST StatefulSet kvplane"
        self._objects: dict[Place, Object] = {}
        self._events: list[tuple[int, str, Place, Object]] = []
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self.ends = False

    def of_kind(self, kind: str) -> list[Object]:
        with self._changed:
            return [one for one in self._objects.values() if one["kind"] == kind]

    def installed(self) -> list[Object]:
        """All objects except Helm's records of releases."""
        with self._changed:
            return [one for one in self._objects.values() if not one.get("type", "").startswith("helm.sh/")]

    def get(self, place: Place) -> Object | None:
        with self._changed:
            return self._objects.get(place)

    def choose(self, place: Place, labels: str, fields: str) -> list[Object]:
        """Objects of a collection by equality selectors."""
        with self._changed:
            return [one for at, one in self._objects.items() if _is_in(at, place) and _fits(one, labels, fields)]

    def write(self, verb: str, place: Place, given: Object) -> tuple[int, Object]:
        """Store an object; returns status and response."""
        wrong = complaints(given, self.version)
        if wrong:
            return 422, refusal(422, "Invalid", "; ".join(wrong))
        with self._changed:
            before = self._objects.get(place)
            fixed = FIXED.get(given["kind"], ())
            if given["kind"] in FIXED:
                given["spec"] = canonical(given["spec"])
            if before and any(before["spec"].get(key) != given["spec"].get(key) for key in fixed):
                return 422, refusal(422, "Invalid", f"{given['kind']} {place.name}: {', '.join(fixed)} may not change")
            number = next(self._numbers)
            metadata = given.setdefault("metadata", {})
            metadata["namespace"] = place.namespace
            metadata.setdefault("uid", before["metadata"]["uid"] if before else f"uid-{number}")
            metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
            metadata["resourceVersion"] = str(number)
            is_changed = before is None or before.get("spec") != given.get("spec")
            metadata["generation"] = (before["metadata"]["generation"] if before else 0) + is_changed
            complete(given)
            if given["kind"] == "Pod":
                given["status"] = {"phase": "Succeeded" if self.run_pod(given) else "Failed"}
            self._objects[place] = given
            self._notify(number, "MODIFIED" if before else "ADDED", place, given)
            self.log.append(f"{verb} {given['kind']} {place.name}")
        return 200 if before else 201, given

    def remove(self, place: Place) -> tuple[int, Object]:
        with self._changed:
            gone = self._objects.pop(place, None)
            if gone is None:
                return 404, refusal(404, "NotFound", f"{place.plural} {place.name} not found")
            self._notify(next(self._numbers), "DELETED", place, gone)
            self.log.append(f"DELETE {gone['kind']} {place.name}")
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def changes(self, place: Place, labels: str, fields: str, after: int) -> Iterator[tuple[str, Object] | None]:
        """Endless events of a collection; None when none came within WATCH_S."""
        while not self.ends:
            with self._changed:
                if self._latest() <= after and not self.ends:
                    self._changed.wait(WATCH_S)
                new = [event for event in self._events if event[0] > after]
                after = self._latest()
            yield from ((k, one) for _, k, at, one in new if _is_in(at, place) and _fits(one, labels, fields))
            yield None

    def latest(self) -> int:
        with self._changed:
            return self._latest()

    def _latest(self) -> int:
        return self._events[-1][0] if self._events else 0

    def _notify(self, number: int, kind: str, place: Place, one: Object) -> None:
        self._events.append((number, kind, place, json.loads(json.dumps(one))))
        self._changed.notify_all()


def complete(one: Object) -> None:
    """Add the fields that the API adds, and the status of a healthy object."""
    spec, generation = one.get("spec", {}), one["metadata"]["generation"]
    count = spec.get("replicas", 1)
    alike = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas", "updatedReplicas"), count)
    seen = {"observedGeneration": generation}
    if one["kind"] == "Service":
        spec.setdefault("clusterIP", "10.0.0.10")
        if spec.get("type") == "LoadBalancer":
            one["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
    elif one["kind"] == "StatefulSet":
        spec.setdefault("updateStrategy", {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}})
        one["status"] = seen | alike | {"currentReplicas": count, "currentRevision": "r", "updateRevision": "r"}
    elif one["kind"] == "Deployment":
        conditions = [("Available", "MinimumReplicasAvailable"), ("Progressing", "NewReplicaSetAvailable")]
        well = [{"type": kind, "status": "True", "reason": reason} for kind, reason in conditions]
        one["status"] = seen | alike | {"conditions": well}
    elif one["kind"] == "DaemonSet":
        names = ("currentNumberScheduled", "desiredNumberScheduled", "numberReady", "numberAvailable")
        one["status"] = seen | dict.fromkeys((*names, "updatedNumberScheduled"), 1) | {"numberMisscheduled": 0}
    elif one["kind"] == "Secret":
        plain = {key: base64.b64encode(text.encode()).decode() for key, text in one.pop("stringData", {}).items()}
        one["data"] = one.get("data", {}) | plain
    elif one["kind"] == "PodDisruptionBudget":
        numbers = dict.fromkeys(("currentHealthy", "desiredHealthy", "disruptionsAllowed", "expectedPods"), 1)
        one["status"] = seen | numbers


def canonical(given: Any) -> Any:
    """Write sizes of storage as the API does: without a fraction, with the greatest unit, such as 1Gi for 1024Mi."""
    if isinstance(given, list):
        return [canonical(one) for one in given]
    if not isinstance(given, dict):
        return given
    return {key: size(value) if key == "storage" else canonical(value) for key, value in given.items()}


def size(given: str) -> str:
    """Write a size with a binary unit in canonical form."""
    number, unit = given[:-2], given[-2:]
    if unit not in UNITS:
        return given
    num_bytes = int(float(number) * 1024 ** (UNITS.index(unit) + 1))
    fits = [at for at in range(len(UNITS)) if num_bytes % 1024 ** (at + 1) == 0]
    return f"{num_bytes // 1024 ** (fits[-1] + 1)}{UNITS[fits[-1]]}" if fits else str(num_bytes)


def refusal(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code,
    }  # fmt: skip


def _is_in(at: Place, collection: Place) -> bool:
    return (at.api, at.plural) == (collection.api, collection.plural) and collection.namespace in ("", at.namespace)


def _fits(one: Object, labels: str, fields: str) -> bool:
    has = {**one["metadata"].get("labels", {}), "metadata.name": one["metadata"]["name"]}
    has["metadata.namespace"] = one["metadata"]["namespace"]
    for term in filter(None, (*labels.split(","), *fields.split(","))):
        key, _, value = term.replace("==", "=").partition("=")
        negated = key.endswith("!")
        if (has.get(key.rstrip("!"), "") == value) == negated:
            return False
    return True


class Handler(BaseHTTPRequestHandler):
    """HTTP server of the cluster."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        """Do not log: the cluster's own log has the changes."""

    def do_GET(self) -> None:
        path, asked = self._asked()
        place = Place.of(path)
        if place is None:
            return self._discover(path)
        labels, fields = asked.get("labelSelector", ""), asked.get("fieldSelector", "")
        if asked.get("watch") in ("true", "1"):
            return self._watch(place, labels, fields, asked)
        if place.name:
            found = self.cluster.get(place)
            missing = refusal(404, "NotFound", f'{place.plural} "{place.name}" not found')
            return self._answer(200 if found else 404, found or missing)
        kind = RESOURCES[place.api][place.plural]
        listed = {"kind": f"{kind}List", "apiVersion": place.api, "items": self.cluster.choose(place, labels, fields)}
        return self._answer(200, listed | {"metadata": {"resourceVersion": str(self.cluster.latest())}})

    def do_POST(self) -> None:
        place, given = self._place(), self._body()
        at = Place(place.api, place.plural, place.namespace, given["metadata"]["name"])
        if self.cluster.get(at):
            return self._answer(409, refusal(409, "AlreadyExists", f'{at.plural} "{at.name}" already exists'))
        return self._answer(*self.cluster.write("POST", at, given))

    def do_PUT(self) -> None:
        self._answer(*self.cluster.write("PUT", self._place(), self._body()))

    def do_PATCH(self) -> None:
        place, patch = self._place(), self._body()
        kind = self.headers["Content-Type"].partition(";")[0]
        before = self.cluster.get(place)
        if kind == "application/apply-patch+yaml":
            return self._answer(*self.cluster.write("APPLY", place, patch))
        if before is None:
            return self._answer(404, refusal(404, "NotFound", f'{place.plural} "{place.name}" not found'))
        patched: Callable[[Object, Object], Object] = strategic_merge if "strategic" in kind else merge
        return self._answer(*self.cluster.write("PATCH", place, patched(before, patch)))

    def do_DELETE(self) -> None:
        place = self._place()
        self._body()
        self._answer(*self.cluster.remove(place))

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()}

    def _place(self) -> Place:
        place = Place.of(self._asked()[0])
        assert place is not None, self.path
        return place

    def _body(self) -> Any:
        return yaml.safe_load(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, status: int, content: Object | None) -> None:
        body = json.dumps(content).encode() if content is not None else b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _discover(self, path: str) -> None:
        words = path.strip("/").split("/")
        groups = sorted(api for api in RESOURCES if "/" in api)
        if path == "/version":
            major, minor = self.cluster.version.split(".")
            version = {"major": major, "minor": minor, "gitVersion": f"v{self.cluster.version}.0"}
            return self._answer(200, version)
        if path == "/api":
            return self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        if path == "/apis":
            listed = [
                {"name": api.partition("/")[0], "versions": [_version(api)], "preferredVersion": _version(api)}
                for api in groups
            ]
            return self._answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        api = "/".join(words[1:])
        if words[0] in ("api", "apis") and api in RESOURCES:
            listed = [_resource(plural, kind) for plural, kind in RESOURCES[api].items()]
            return self._answer(200, {"kind": "APIResourceList", "groupVersion": api, "resources": listed})
        if path == "/openapi/v2":
            return self._answer(200, None)
        return self._answer(404, refusal(404, "NotFound", f"{path} not found"))

    def _watch(self, place: Place, labels: str, fields: str, asked: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        after = int(asked.get("resourceVersion") or 0)
        try:
            if asked.get("sendInitialEvents") == "true" or not after:
                after = self.cluster.latest()
                for one in self.cluster.choose(place, labels, fields):
                    self._chunk("ADDED", one)
                metadata = {"resourceVersion": str(after), "annotations": {"k8s.io/initial-events-end": "true"}}
                bookmark = {"kind": RESOURCES[place.api][place.plural], "apiVersion": place.api, "metadata": metadata}
                self._chunk("BOOKMARK", bookmark)
            for event in self.cluster.changes(place, labels, fields, after):
                if event is not None:
                    self._chunk(*event)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the watcher has disconnected

    def _chunk(self, kind: str, one: Object) -> None:
        line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()


def _version(api: str) -> Object:
    return {"groupVersion": api, "version": api.partition("/")[2]}


def _resource(plural: str, kind: str) -> Object:
    singular = kind.lower()
    return {"name": plural, "singularName": singular, "kind": kind, "namespaced": kind != "Namespace", "verbs": VERBS}


@contextmanager
def cluster(version: str) -> Iterator[tuple[Cluster, str]]:
    """A cluster of a version of Kubernetes, and the kubeconfig for it."""
    here = Cluster(version)
    handler = type("Here", (Handler,), {"cluster": here})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield here, json.dumps(_kubeconfig(f"http://127.0.0.1:{server.server_port}"))
    finally:
        here.ends = True
        server.shutdown()
        server.server_close()
        thread.join()


def _kubeconfig(url: str) -> Object:
    context = {"cluster": "here", "user": "me", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": context}],
        "current-context": "here",
    }
