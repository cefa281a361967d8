"""Define the scopes (permissions), and the scope that each gRPC method requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from grpc_health.v1 import health_pb2


class Scope(Enum):
    """A permission to call a set of methods."""

    ALLOCATE = "allocate"  # an engine: register, open sessions, allocate
    READ = "read"  # look at replicas, ask for hits and explanations
    EVENTS = "events"  # follow what replicas publish
    REPORT = "report"  # report to a router how prompts went, which changes later decisions
    WORKER = "worker"  # hold the pages of a rank
    ADMIN = "admin"  # an operator: whole state, every decision, drain


@dataclass(frozen=True, slots=True)
class Rule:
    """What a method requires of its caller.

    Attributes:
        scope: the scope that the caller must have; None = any.
        is_audited: every call is written to the audit log, also a successful one.
        is_for_all: the method affects the replicas of all owners, so the caller also needs `every_replica`.
    """

    scope: Scope | None
    is_audited: bool = False
    is_for_all: bool = False


def service_rules(name: str, **rules: Rule) -> dict[str, Rule]:
    """Return the rules of one gRPC service by full name of the method."""
    return {f"kvplane.v1.{name}/{method}": rule for method, rule in rules.items()}


_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_ALLOCATE, _READ = Rule(Scope.ALLOCATE), Rule(Scope.READ)
_CHANGE = Rule(Scope.ALLOCATE, is_audited=True)

HEALTH: Mapping[str, Rule] = {f"{_HEALTH.full_name}/{method.name}": Rule(None) for method in _HEALTH.methods}
METHODS: Mapping[str, Rule] = {
    **HEALTH,
    **service_rules(
        "Allocation",
        RegisterReplica=_CHANGE,
        DeregisterReplica=_CHANGE,
        DescribeReplica=_READ,
        ListReplicas=_READ,
        FindCacheHit=_READ,
        AllocateSlots=_ALLOCATE,
        CommitBlocks=_ALLOCATE,
        Free=_ALLOCATE,
        EvictBlocks=_CHANGE,
        ResetPrefixCache=_CHANGE,
        Prefetch=_ALLOCATE,
        Retain=_ALLOCATE,
        Session=_ALLOCATE,
    ),
    **service_rules("Events", Subscribe=Rule(Scope.EVENTS)),
    **service_rules(
        "Workers",
        RegisterWorker=Rule(Scope.WORKER, is_audited=True),
        RenewWorker=Rule(Scope.WORKER),
        DeregisterWorker=Rule(Scope.WORKER, is_audited=True),
        WatchPeers=Rule(Scope.WORKER, is_audited=True, is_for_all=True),
    ),
    **service_rules(
        "Admin",
        Status=_READ,
        Drain=Rule(Scope.ADMIN, is_audited=True, is_for_all=True),
        Snapshot=Rule(Scope.ADMIN, is_audited=True),
        ListRequests=_READ,
        Explain=_READ,
        Record=Rule(Scope.ADMIN, is_audited=True),
    ),
}
