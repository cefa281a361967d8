"""NetworkPolicies: those who may call are answered, and others are not where the cluster enforces policies."""

from __future__ import annotations

from tests.cluster.cluster import Failed, Object, Space, merged
from tests.cluster.load import QUICK, addresses
from tests.cluster.programs import LABEL, Program, add_programs
from tests.cluster.runs import Run

NOT_ENFORCED = "enforcement: the cluster's network lets a pod through that no policy permits"
ALLOWED = {"allowed": "true"}


def run_policies(run: Run) -> None:
    """A release that two pods call, of which its policies permit one."""
    with run.space("policy") as space, run.row("network policies", space) as seen:
        clients: Object = {"podSelector": {"matchLabels": ALLOWED}}
        policy: Object = {"networkPolicy": {"enabled": True, "clients": [clients], "metricsClients": [clients]}}
        space.install(merged(merged(QUICK, policy), {"replicas": 2, "store": {"type": "builtin"}}))
        space.test()
        add_programs(space)
        image = run.cluster.images.service
        space.apply(Program("caller", image, ("sleep", "3600"), tuple(ALLOWED.items())).pod)
        space.apply(Program("other", image, ("sleep", "3600")).pod)
        space.ready(f"app={LABEL}", 2)
        if not is_answered(space, "caller"):
            raise Failed("a pod that the policies permit is not answered")
        seen.text = "the permitted pod, the processes, the store and helm test get through"
        if is_answered(space, "other"):
            seen.left_out.append(NOT_ENFORCED)
        else:
            seen.text += ", another pod does not"


def is_answered(space: Space, pod: str) -> bool:
    """Whether the service answers a pod."""
    command = ("kvplane", "--request-timeout=5s", "status", "--service", addresses(space))
    try:
        space.execute(pod, *command, limit_s=40)
    except Failed:
        return False
    return True
