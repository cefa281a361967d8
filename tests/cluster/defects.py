"""What Kubernetes refuses or never starts.

A refusal changes nothing, and `kvplane doctor --kubernetes` names the reason of what does not start, with a remedy.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tests.cluster.cluster import Failed, Object, Space, named, wait_until
from tests.cluster.load import SERVICE
from tests.cluster.runs import Run
from tests.helm.pods import KVPLANE

# A value of null removes the chart's own selector, so that every node is one of a GPU.
EVERYWHERE: Object = {"mode": "daemonset", "nodeSelector": {"nvidia.com/gpu.present": None}}
NOWHERE: Object = {"mode": "daemonset", "nodeSelector": {"kvplane-cluster-test": "none"}}
CPU_WORKERS: Object = {"gpuWorker": {"mode": "daemonset", "device": "cpu"}}


def run_refused_upgrade(run: Run) -> None:
    """Upgrades that no StatefulSet takes: refused with a remedy, and nothing is changed."""
    with run.space("upgrade") as space, run.row("refused upgrade changes nothing", space) as seen:
        space.install({})
        before = versions(space)
        tried: Sequence[tuple[Object, str]] = (
            ({"store": {"type": "sqlite"}}, "store.type"),
            ({"nameOverride": "other", "fullnameOverride": "kvplane"}, "nameOverride"),
        )
        for values, field in tried:
            refused(space, values, field)
        if versions(space) != before:
            raise Failed(f"a refused upgrade changed {sorted(versions(space).items() ^ before.items())[:4]}")
        space.kubectl("delete", "pod", "kvplane-0", "--wait=true", limit_s=120)
        space.ready(SERVICE, 1)
        seen.text = f"{len(tried)} upgrades refused with a remedy, {len(before)} objects as before, the next pod starts"


def refused(space: Space, values: Object, field: str) -> None:
    try:
        space.upgrade(values)
    except Failed as refusal:
        if f"{field}:" not in str(refusal):
            raise Failed(f"refused, but not by the chart: {refusal}") from refusal
        return
    raise Failed(f"an upgrade with another {field} is accepted")


def versions(space: Space) -> dict[str, str]:
    """The content of every object of the release: what a controller writes is left out."""
    found = {}
    for one in space.cluster.items(space.name, "configmaps,secrets,services,statefulsets,serviceaccounts"):
        if one["metadata"]["name"].startswith("kvplane"):
            content = {key: value for key, value in one.items() if key in ("data", "spec")}
            found[f"{one['kind']}/{one['metadata']['name']}"] = repr(content)
    return found


@dataclass(frozen=True)
class Unstartable:
    """Values whose pods never start, and what the doctor has to name."""

    slug: str
    name: str
    values: Object
    seen: str
    remedy: str
    enforce: str = "restricted"
    quota: bool = False


UNSTARTABLE = (
    Unstartable(
        "runtime",
        "RuntimeClass is missing",
        {"gpuWorker": {**EVERYWHERE, "runtimeClassName": "kvplane-cluster-test-missing"}},
        "kvplane-cluster-test-missing",
        "gpuWorker.runtimeClassName",
        "privileged",
    ),
    Unstartable(
        "gpu", "no node has a GPU", {"gpuWorker": NOWHERE}, "no node matches", "gpuWorker.nodeSelector", "privileged"
    ),
    Unstartable("baseline", "workers where baseline is enforced", CPU_WORKERS, "PodSecurity", "enforce", "baseline"),
    Unstartable("quota", "exceeded quota", {}, "exceeded quota", "ResourceQuota", quota=True),
    Unstartable(
        "secret", "Secret is missing", {"tls": {"enabled": True, "existingSecret": "gone"}}, "gone", "create it"
    ),
    Unstartable("image", "image that does not exist", {}, "ImagePull", "image.repository"),
    Unstartable("node", "no node fits", {"nodeSelector": {"kvplane-cluster-test": "none"}}, "affinity", "nodeSelector"),
)


def run_unstartable(run: Run, one: Unstartable) -> None:
    """Install without waiting; the doctor names the reason and the remedy, and the install itself does not fail."""
    with run.space(one.slug, one.enforce) as space, run.row(f"doctor: {one.name}", space) as seen:
        if one.quota:
            space.apply(named("ResourceQuota", "small", spec={"hard": {"pods": "0"}}))
        values = dict(one.values)
        if one.slug == "image":
            image = run.cluster.images.service
            values = {"image": {"registry": image.registry, "repository": image.repository, "tag": "missing-tag"}}
            values["image"] |= {"digest": "", "pullPolicy": "IfNotPresent"}
        space.begin(values)
        seen.text = diagnosis(space, one)


def diagnosis(space: Space, one: Unstartable) -> str:
    """Wait until the doctor names reason and remedy; returns its line."""
    said = [""]

    def is_named() -> bool:
        said[0] = doctor(space)
        return one.seen in said[0] and one.remedy in said[0]

    try:
        wait_until(is_named, f"the doctor names {one.seen!r} with {one.remedy!r}", 90)
    except Failed as late:
        raise Failed(f"{late}; it says: {said[0][-600:]}") from late
    return " ".join(next(line for line in said[0].splitlines() if one.seen in line).split())[:160]


def doctor(space: Space) -> str:
    """What the command says. Raises Failed if it finds nothing wrong."""
    where = ("doctor", "--kubernetes", f"--namespace={space.name}", f"--kube-context={space.cluster.context}")
    done = subprocess.run([*KVPLANE, *where], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr if done.returncode else ""
