"""Workers with pages in CPU memory, as a DaemonSet and as sidecars, and engine pods that attach to them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.cluster.cluster import Failed, Object, Space, merged, wait_until
from tests.cluster.load import QUICK, addresses
from tests.cluster.programs import Program, add_programs, script
from tests.cluster.runs import Run

WORKER = "app.kubernetes.io/component=worker"
CPU: Object = {"gpuWorker": {"device": "cpu", "graceSeconds": 5}}
NO_GPU = "device cpu instead of cuda: no node is known to have a GPU"
RUN_DIR = "/run/kvplane-cluster-test"  # of this test alone: a node may have workers of another release


def run_workers(run: Run) -> None:
    """A DaemonSet with two ranks, and two lives of an engine pod on one node."""
    with run.space("workers", "privileged") as space:
        worker = run.cluster.images.worker
        with run.row("workers: DaemonSet, device cpu, engine pod", space) as seen:
            seen.left_out.append(NO_GPU)
            if worker is None:
                seen.left_out.append("all of it: WORKER_IMAGE is not stated")
                return
            values: Object = {"gpuWorker": {"mode": "daemonset", "ranks": 2, "runDir": RUN_DIR}}
            space.install(merged(merged(QUICK, CPU), values))
            add_programs(space)
            nodes = [pod["spec"]["nodeName"] for pod in worker_pods(space)]
            first = engine_life(space, Life("first", nodes[0]))
            seen.text = f"{len(nodes)} nodes; {text_of(first)}"
            if not first["hit"] or first["kept"]:
                raise Failed(f"the first engine hit {first['hit']} tokens and kept {first['kept']} keys")
        with run.row("  a second engine pod on the same pages", space) as seen:
            second = engine_life(space, Life("second", nodes[0]))
            seen.text = text_of(second)
            if second["outputs"] != first["outputs"]:
                raise Failed("its tokens differ from those of the first one")
            if not second["kept"] or not second["first_hit"]:
                raise Failed(f"it kept {second['kept']} keys and hit {second['first_hit']} tokens at first")
            if second["differ"]:
                raise Failed(f"{second['differ']} tokens differ")


def worker_pods(space: Space) -> list[Object]:
    """The DaemonSet's pods, once there is one on a node: they are ready only when an engine has registered."""
    wait_until(lambda: any("nodeName" in pod["spec"] for pod in space.pods(WORKER)), "a worker's pod has a node", 60)
    return [pod for pod in space.pods(WORKER) if "nodeName" in pod["spec"]]


@dataclass(frozen=True)
class Life:
    """An engine pod on a node.

    Attributes:
        prefix: of the replica's name, before that of the node.
        service: of another namespace, with TLS and the secrets of the workers; "" = that of the release.
    """

    name: str
    node: str
    prefix: str = ""
    service: str = ""


def engine_life(space: Space, life: Life) -> Object:
    """Run an engine pod to its end; returns what it says."""
    image = space.cluster.images.worker
    assert image is not None
    folders = [f"{RUN_DIR}/rank-{rank}" for rank in (0, 1)]
    command = script("paged", life.service or addresses(space), f"{life.prefix}{life.node}", *folders)
    secrets = ("kvplane-ca", "kvplane-access") if life.service else ()
    pod = Program(life.name, image, command, shares=RUN_DIR, secrets=secrets).pod
    pod["spec"]["nodeName"] = life.node
    space.apply(pod)
    return counts_in(space.ended(life.name, 240))


def counts_in(log: str) -> Object:
    return dict(json.loads(next(line for line in log.splitlines() if line.startswith("{"))))


def text_of(counts: Object) -> str:
    return (
        f"{counts['kept']} keys kept, first hits {counts['first_hit']} and then {counts['hit']} of "
        f"{counts['prompt_tokens']} prompt tokens, {counts['differ']} tokens differ"
    )
