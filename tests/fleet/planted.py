"""Faults that are planted into every process of a fleet, and the kind of fault and the seed that find each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.fleet import kinds
from tests.fleet.campaign import run
from tests.fleet.kinds import Fault
from tests.fleet.load import Report
from tests.fleet.processes import Shape

LOST_AFTER_S = 25.0
SERVICES = REPLICAS = 3


@dataclass(frozen=True)
class Planted:
    """A fault, and what finds it.

    Attributes:
        ownership: kind of ownership of the fleet.
        faults: what happens to the fleet, at most.
        says: part of what is found.
        of_routers: whether routers have the fault, and nothing else.
    """

    ownership: str
    faults: Sequence[Fault]
    says: str
    seed: int = 1
    of_routers: bool = False


# By name of the twin (tests/twins.py).
PLANTED = {
    "fencing removed": Planted("grants", [kinds.stop_engine_in_a_step] * 3, "wrote pages of"),
    "no compare-and-set": Planted("etcd", [kinds.ask_at_once] * 4, "was granted"),
    "a grant comes back as it was": Planted("etcd", [kinds.get_grant_back] * 2, "granted"),
    "grants without an end": Planted("etcd", [kinds.cut_table] * 2, "without the table of owners"),
    "leases by wall clocks": Planted("etcd", [kinds.jump_back_without_table, kinds.jump_clock], "was granted"),
    "epochs count from the table": Planted("lease", [kinds.lose_table_and_services] * 2, "were lost"),
    "a lost table is complete": Planted("lease", [kinds.lose_table] * 4, "was granted"),
    "preempted requests are forgotten": Planted("grants", [kinds.drain_service] * 4, "were lost"),
    "keys outlive their memory": Planted("grants", [kinds.kill_worker] * 4, "differ from the dense model"),
    "what is cleared stays claimed": Planted("grants", [kinds.kill_worker] * 3, "claims", of_routers=True),
}


def find(name: str, say: Callable[[str], None] = print) -> Report:
    """Run the campaign on processes with a planted fault."""
    one = PLANTED[name]
    twins = {"routers": True, "router_twin": name} if one.of_routers else {"twin": name}
    return run(Shape(one.ownership, SERVICES, REPLICAS, **twins), one.faults, one.seed, say, LOST_AFTER_S)
