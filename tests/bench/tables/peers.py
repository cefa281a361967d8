"""Engines that load from each other's host tiers: the service's `Namespace` states in each step what peers have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import Step, StepResult
from kvplane.base.worker import INCARNATION_BYTES, WorkerInfo, WorkerState
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.replicas.lenders import Member
from kvplane_service.replicas.peers import Namespace
from tests.bench.routing import PublishingSession


@dataclass
class PeerHost:
    """A replica as its namespace sees it."""

    name: str
    replica: ReplicaCore
    epoch: int = 1
    memory_had_reset: bool = False
    is_live: bool = True
    is_readable: bool = True


class PeerWorkers:
    """The worker of one replica, which has mapped the host tiers of all."""

    def __init__(self, number: int, every: Sequence[int]) -> None:
        memory = [(1 + one).to_bytes(INCARNATION_BYTES, "big") for one in every]
        self._info = WorkerInfo(
            0, 1 + number, f"unix:/{number}", 1 + number, "cuda", state=WorkerState.READY,
            host_incarnation=memory[number], mapped=tuple(memory),
        )  # fmt: skip

    def alive(self) -> Sequence[WorkerInfo]:
        """See WorkerRoster."""
        return (self._info,)


class PeerSession(PublishingSession):
    """A session whose steps say what peers have, and report to peers what they changed."""

    def __init__(self, spec: ReplicaSpec, namespace: Namespace, number: int, engines: int) -> None:
        super().__init__(spec)
        self._namespace = namespace
        host: Any = PeerHost(str(number), self.replica)
        workers: Any = PeerWorkers(number, range(engines))
        self._member = Member(str(number), host, spec, 1, workers)
        namespace.join(self._member)

    def _apply(self, step: Step) -> StepResult:
        name = self._member.name
        self._namespace.arenas(name, 0)
        sent = self._namespace.with_news(name, step)
        result = self.replica.apply(sent)
        if sent is not step:
            self._namespace.was_sent(name, sent.parts[0].peers)
        self._namespace.note(self._member, [part.tier_events for part in result.parts])
        return result
