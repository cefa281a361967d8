"""A pod runner: starts the processes that rendered manifests describe, on this machine.

Each pod has its own address in 127.0.0.0/8, to which the names of Services and pods are translated; volumes are
directories. Names and paths are translated where a process reads them: in arguments, variables and mounted text. Probes
are the gRPC calls, connections and commands of the manifest. An image is the entry point of its Dockerfile. There are
no limits of memory or CPU, and no other user.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane_service.store.json_api import Endpoint
from tests.helm.charts import NAMESPACE, ROOT, Object
from tests.store import apiserver
from tests.store.servers import make_certificates, redis_command, wait_until

KVPLANE = [sys.executable, "-c", "from kvplane_tools.cli import main; main()"]
NODE_NAME = "node-1"
PATIENCE_S = 60.0
_LOOK_S = 0.02


def program(word: str) -> list[str]:
    """Translates the first word of a command to this machine."""
    if word == "kvplane":
        return KVPLANE
    if word == "python":
        return [sys.executable]
    if word == "valkey-server":
        return list(redis_command())
    found = shutil.which(word)
    assert found, f"there is no {word} here"
    return [found]


def entry_point(image: str) -> list[str]:
    """The entry point of one of our images, from its Dockerfile."""
    part = image.partition("@")[0].rpartition(":")[0].rpartition("/")[2]
    text = (ROOT / "docker" / f"{part}.Dockerfile").read_text()
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    return json.loads(found)


@dataclass
class Plan:
    """A pod that an object of the manifests creates."""

    name: str
    labels: Mapping[str, str]
    spec: Object
    claims: tuple[str, ...] = ()


def plans(objects: list[Object]) -> Iterator[Plan]:
    """Every pod of the objects in a cluster of one node."""
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Pod":
            yield Plan(name, one["metadata"]["labels"], spec)
        elif one["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            template = spec["template"]
            claims = tuple(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
            ordinals = range(spec.get("replicas", 1)) if one["kind"] == "StatefulSet" else [one["kind"].lower()]
            for ordinal in ordinals:
                yield Plan(f"{name}-{ordinal}", template["metadata"]["labels"], template["spec"], claims)


@dataclass
class Ending:
    """How a pod ended.

    Attributes:
        codes: exit code of each container.
        killed: containers that took longer than the grace period.
        took_s: seconds from the start of the termination to the last exit.
    """

    codes: dict[str, int] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    took_s: float = 0.0


class Machine:
    """One node. Pods of its manifests are started one by one, and killed at the end."""

    _numbers = itertools.count(1)

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self.folder = folder
        self.addresses: dict[str, str] = {}
        self.pods: list[Pod] = []
        self.api: Endpoint | None = None
        self.look_at(objects)

    def look_at(self, objects: list[Object]) -> None:
        """Use these manifests from now on. Running pods continue, and every name keeps its address."""
        self.objects = objects
        self.plans = {plan.name: plan for plan in plans(objects)}
        ours = os.getpid() % 60_000 + 256  # so that concurrent runs do not collide
        for name in self.plans.keys() - self.addresses.keys():
            self.addresses[name] = f"127.{ours >> 8}.{ours & 255}.{next(self._numbers) % 250 + 1}"
        self.names = dict(self._names())

    def start(self, name: str) -> Pod:
        """Start or restart a pod; returns after its init containers have succeeded."""
        pod = Pod(self, self.plans[name])
        self.pods.append(pod)
        pod.start()
        return pod

    def kill(self) -> None:
        for pod in self.pods:
            pod.kill()

    def data_of(self, kind: str, name: str) -> dict[str, bytes]:
        """Files of a ConfigMap or Secret of the manifests."""
        (one,) = (o for o in self.objects if o["kind"] == kind and o["metadata"]["name"] == name)
        plain = {key: text.encode() for key, text in one.get("stringData" if kind == "Secret" else "data", {}).items()}
        coded = one.get("data", {}) if kind == "Secret" else {}
        return plain | {key: base64.b64decode(text) for key, text in coded.items()}

    def _names(self) -> Iterator[tuple[str, str]]:
        """Names that DNS resolves: each Service, and each pod of a headless Service."""
        for one in self.objects:
            if one["kind"] != "Service":
                continue
            selector = one["spec"]["selector"].items()
            behind = [plan.name for plan in self.plans.values() if selector <= plan.labels.items()]
            host = f"{one['metadata']['name']}.{NAMESPACE}.svc.cluster.local"
            if behind:
                yield host, self.addresses[behind[0]]
            if one["spec"].get("clusterIP") == "None":
                yield from ((f"{name}.{host}", self.addresses[name]) for name in behind)


class Pod:
    """The containers of a pod, running or ended."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.machine = machine
        self.plan = plan
        self.spec = plan.spec
        self.ip = machine.addresses[plan.name]
        self.folder = Path(tempfile.mkdtemp(dir=machine.folder, prefix=""))
        self.containers = {one["name"]: one for one in self.spec["containers"]}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._volumes = {one["name"]: one for one in self.spec.get("volumes", ())}
        self._replaced = self._replacements()

    def start(self) -> None:
        for volume in [*self._volumes.values(), *({"name": claim, "claim": claim} for claim in self.plan.claims)]:
            self._fill(volume)
        for container in self.spec.get("initContainers", ()):
            done = subprocess.run(self.command(container), env=self.environment(container), timeout=PATIENCE_S)
            assert done.returncode == 0, container["name"]
        for name, container in self.containers.items():
            with self.log(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    self.command(container), env=self.environment(container), stdout=log, stderr=log
                )

    def log(self, container: str) -> Path:
        return self.folder / f"{container}.log"

    def said(self, container: str) -> str:
        return self.log(container).read_text()

    def command(self, container: Object, words: list[str] | None = None) -> list[str]:
        """The command of the container, or of a probe or hook in it."""
        if words is None:
            words = [*(container.get("command") or entry_point(container["image"])), *container.get("args", ())]
        variables = self._variables(container)
        first, *rest = (self.put_in(_expand(word, variables)) for word in words)
        return [*program(first), *rest]

    def environment(self, container: Object) -> dict[str, str]:
        """The variables of the manifest, and those that the interpreter needs to find modules."""
        found = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        if self.machine.api is not None:
            at = urlsplit(self.machine.api.url)
            found |= {"KUBERNETES_SERVICE_HOST": str(at.hostname), "KUBERNETES_SERVICE_PORT": str(at.port)}
        return found | {name: self.put_in(value) for name, value in self._variables(container).items()}

    def put_in(self, text: str) -> str:
        """The text with the cluster's addresses and paths replaced by this machine's."""
        pattern = "|".join(map(re.escape, sorted(self._replaced, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])(?:{pattern})(?![\w-])", lambda match: self._replaced[match[0]], text)

    def place(self, path: str) -> Path:
        """The path on this machine of a path in a container."""
        return Path(self.put_in(path))

    # ---- probes

    def is_well(self, container: str, probe: str) -> bool:
        """True if a probe succeeds, or if there is none."""
        asked = self.containers[container].get(probe)
        if asked is None:
            return True
        if "grpc" in asked:
            return self._is_serving(asked["grpc"]["port"], asked["grpc"].get("service", ""))
        if "tcpSocket" in asked:
            return self._is_listening(self._port(self.containers[container], asked["tcpSocket"]["port"]))
        return self.run(container, asked["exec"]["command"]).returncode == 0

    def wait_ready(self) -> None:
        """Wait until every startup and readiness probe succeeds."""
        for name in self.containers:
            for probe in ("startupProbe", "readinessProbe"):
                wait_until(lambda name=name, probe=probe: self._ready(name, probe), f"{self.plan.name}: {probe}")

    def run(self, container: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a container to its end."""
        spec = self.containers[container]
        command, environment = self.command(spec, words), self.environment(spec)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def _ready(self, container: str, probe: str) -> bool:
        code = self.processes[container].poll()
        assert code is None, f"{container} ended with {code}: {self.said(container)}"
        return self.is_well(container, probe)

    def _is_serving(self, port: int, service: str) -> bool:
        with grpc.insecure_channel(f"{self.ip}:{port}") as channel, suppress(grpc.RpcError):
            asked = health_pb2.HealthCheckRequest(service=service)
            status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5).status
            return status == health_pb2.HealthCheckResponse.SERVING
        return False

    def _is_listening(self, port: int) -> bool:
        with suppress(OSError), socket.create_connection((self.ip, port), 5):
            return True
        return False

    def _port(self, container: Object, port: int | str) -> int:
        named = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
        return port if isinstance(port, int) else named[port]

    # ---- the end

    def terminate(self) -> Ending:
        """Terminate as the kubelet does: preStop, SIGTERM, and SIGKILL after the grace period."""
        ending, begun = Ending(), time.monotonic()
        deadline = begun + self.spec.get("terminationGracePeriodSeconds", 30)
        for name, container in self.containers.items():
            hook = container.get("lifecycle", {}).get("preStop")
            if hook and self.processes[name].poll() is None:
                assert self.run(name, hook["exec"]["command"]).returncode == 0
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for name, process in self.processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                ending.killed.append(name)
            ending.codes[name] = process.wait(PATIENCE_S)
        ending.took_s = time.monotonic() - begun
        return ending

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE_S)

    def wait(self) -> dict[str, int]:
        """Wait until every container has ended; returns their exit codes."""
        return {name: process.wait(PATIENCE_S) for name, process in self.processes.items()}

    # ---- mounts and addresses

    def _replacements(self) -> dict[str, str]:
        """Map from addresses and paths of the cluster to those of this machine."""
        found = {**self.machine.names, "0.0.0.0": self.ip, "127.0.0.1": self.ip}
        for container in (*self.spec["containers"], *self.spec.get("initContainers", ())):
            for mount in container.get("volumeMounts", ()):
                if mount["mountPath"] != "/dev/shm":  # programs use the machine's own by this fixed name
                    found[mount["mountPath"]] = str(self._folder_of(mount["name"]))
        return found

    def _folder_of(self, volume: str) -> Path:
        if volume in self.plan.claims:  # outlives the pod
            return self.machine.folder / f"claim-{volume}-{self.plan.name}"
        host = self._volumes[volume].get("hostPath")
        return self.machine.folder / "host" / host["path"].strip("/") if host else self.folder / volume

    def _fill(self, volume: Object) -> None:
        folder = self._folder_of(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        for one in volume.get("projected", {}).get("sources", ()):
            assert self.machine.api is not None, "only a role needs a token"
            kind, path = ("token", one.get("serviceAccountToken")) if "serviceAccountToken" in one else ("ca", None)
            name = path["path"] if path else one["configMap"]["items"][0]["path"]
            shutil.copy(getattr(self.machine.api, kind), folder / name)
        for kind, source, key in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            if source not in volume:
                continue
            data = self.machine.data_of(kind, volume[source][key])
            items = volume[source].get("items") or [{"key": name, "path": name} for name in data]
            for item in items:
                content = data[item["key"]]
                with suppress(UnicodeDecodeError):
                    content = self.put_in(content.decode()).encode()
                (folder / item["path"]).write_bytes(content)
                (folder / item["path"]).chmod(volume[source].get("defaultMode", 0o644))

    def _variables(self, container: Object) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in container.get("env", ()):
            source = one.get("valueFrom")
            found[one["name"]] = self._referred(source, container) if source else _expand(one["value"], found)
        return found

    def _referred(self, source: Object, container: Object) -> str:
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            return self.machine.data_of("Secret", reference["name"])[reference["key"]].decode()
        if "resourceFieldRef" in source:
            section, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            return str(bytes_of(container["resources"][section][resource]))
        fields = {"metadata.name": self.plan.name, "metadata.namespace": NAMESPACE, "spec.nodeName": NODE_NAME}
        return fields[source["fieldRef"]["fieldPath"]]


_UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def bytes_of(quantity: str | int) -> int:
    """A quantity of memory in bytes, as a kubelet gives it to a container."""
    number, unit = re.fullmatch(r"([0-9.e]+)([A-Za-z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return round(float(number) * _UNITS[unit])


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does; an unknown name is unchanged."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


@contextmanager
def machine(objects: list[Object], *secrets: Object) -> Iterator[Machine]:
    """A node for these manifests and existing secrets. Its directory has a short path, because of sockets."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        node = Machine([*objects, *secrets], Path(folder))
        with ExitStack() as stack:
            for role in (one for one in objects if one["kind"] == "Role"):  # an API server that permits what it states
                certificates = make_certificates(Path(folder) / "api").parent
                state, node.api = stack.enter_context(apiserver.serving(Path(folder), certificates))
                (rule,) = role["rules"]
                state.verbs, (state.name,), state.namespace = set(rule["verbs"]), rule["resourceNames"], NAMESPACE
            stack.callback(node.kill)
            yield node


def secret(name: str, **data: bytes | str) -> Object:
    """A Secret; `_` in a key stands for a dot."""
    coded = {
        key.replace("_", "."): base64.b64encode(value if isinstance(value, bytes) else value.encode()).decode()
        for key, value in data.items()
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": coded}
