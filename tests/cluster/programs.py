"""Pods that run the programs in `pods/`: their text, and that of the reference engine, is a ConfigMap; their Python and
all other packages are those of an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import USER, Failed, Image, Object, Space, named

PROGRAMS = Path(__file__).with_name("pods")
ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests/engine/reference"  # the engine that `paged.py` runs
LABEL = "kvplane-cluster-test"
RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def files() -> dict[str, Path]:
    """What a pod has below /programs: the programs, and the reference engine in its packages."""
    packages = [ROOT / "tests/__init__.py", ROOT / "tests/engine/__init__.py", *REFERENCE.glob("*.py")]
    packed = {path.relative_to(ROOT).as_posix(): path for path in packages}
    return {path.name: path for path in PROGRAMS.glob("*.py")} | packed


def key_of(name: str) -> str:
    """The key of a file in the ConfigMap, which has no folders."""
    return name.replace("/", ".")


def add_programs(space: Space) -> None:
    """Make the ConfigMap of all programs."""
    data = {key_of(name): path.read_text() for name, path in files().items()}
    space.apply(named("ConfigMap", "programs", data=data))


def volume() -> Object:
    """The volume of the programs."""
    items = [{"key": key_of(name), "path": name} for name in files()]
    return {"name": "programs", "configMap": {"name": "programs", "items": items}}


@dataclass(frozen=True)
class Program:
    """A pod that runs a program to its end.

    Attributes:
        shares: a folder of the node whose workers' pages it attaches to; "" = none.
        secrets: mounted below /access.
    """

    name: str
    image: Image
    command: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()
    shares: str = ""
    secrets: tuple[str, ...] = ()

    @property
    def pod(self) -> Object:
        mounts = [{"name": "programs", "mountPath": "/programs"}, {"name": "tmp", "mountPath": "/var/tmp"}]
        volumes: list[Object] = [volume(), {"name": "tmp", "emptyDir": {}}]
        host: Object = {}
        if self.shares:
            mounts.append({"name": "run", "mountPath": self.shares})
            volumes.append({"name": "run", "hostPath": {"path": self.shares}})
            host = {"hostIPC": True, "hostPID": True}
        for one in self.secrets:
            mounts.append({"name": one, "mountPath": f"/access/{one}"})
            volumes.append({"name": one, "secret": {"secretName": one}})
        container = container_of(self.name, self.image, self.command, mounts)
        identity = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
        return named(
            "Pod",
            self.name,
            labels={"app": LABEL, **dict(self.labels)},
            spec={
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": {**identity, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
                "volumes": volumes,
                **host,
            },
        )


def container_of(name: str, image: Image, command: Sequence[str], mounts: Sequence[Any] = ()) -> Object:
    return {
        "name": name,
        "image": image.reference,
        "command": list(command),
        "securityContext": RESTRICTED,
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "volumeMounts": list(mounts),
    }


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """The command of a program."""
    return ("python", "-u", f"/programs/{name}.py", *arguments)


def counts_of(space: Space, pod: str) -> Object:
    """The last line of JSON that a program has printed. Raises Failed if there is none."""
    lines = [line for line in space.logs(pod, "--tail=3").splitlines() if line.startswith("{")]
    if not lines:
        said = space.logs(pod, "--tail=4").strip()
        raise Failed(f"pod {pod} states no counts: {said[-400:]}")
    return dict(json.loads(lines[-1]))


def is_there(space: Space, pod: str) -> Callable[[], bool]:
    """Whether a program has printed its first counts; raises Failed if it has ended before."""

    def look() -> bool:
        status = space.cluster.get(space.name, "pod", pod)["status"]
        if status.get("phase") == "Failed":
            raise Failed(f"pod {pod} failed: {space.logs(pod, '--tail=5').strip()[-400:]}")
        return status.get("phase") in ("Running", "Succeeded") and "{" in space.logs(pod, "--tail=3")

    return look
