"""Replays inside the test's own process: a registry, a session straight onto its host, an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvplane.base.groups import AlignSpec, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Part, StepResult
from kvplane.blocking.session import Session
from kvplane_core.face.inspect import check
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig, Routing
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.service.inprocess import InProcessTransport

BUDGET = 256
COST = CostModel(prefill_tokens_per_second=10_000, decode_step_us=10_000, step_overhead_us=1_000)


def spec_of(*groups: GroupSpec, **settings) -> ReplicaSpec:
    """A replica of these groups with blocks of 16 tokens and room for everything."""
    spec = ReplicaSpec(
        groups=groups,
        num_blocks=4096,
        max_model_len=2048,
        hash_block_size=16,
        scheduler_block_size=16,
        max_in_flight_tokens=BUDGET,
    )
    return replace(spec, **settings)


FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
SPECS = {
    "full": spec_of(FULL),
    "sliding": spec_of(GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=64), replace(FULL, lookup_class=1)),
    "seven groups": spec_of(*[GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=128)] * 6, replace(FULL, lookup_class=1)),
    "mamba": spec_of(
        *[GroupSpec(GroupKind.MAMBA, 32, mamba_mode=MambaMode.ALIGN)] * 3,
        GroupSpec(GroupKind.FULL_ATTENTION, 32, lookup_class=1),
        hash_block_size=32,
        scheduler_block_size=32,
        align=AlignSpec(block_size=32, chunk_limit=BUDGET),
    ),
}


def text(stream: int, num_tokens: int, start: int = 0) -> TokenSource:
    """A piece of text, identified by its stream."""
    return TokenSource((Span(stream, start, start + num_tokens),))


def answer(stream: int, num_tokens: int) -> TokenSource:
    """A generated text."""
    return TokenSource((Span(stream, 0, num_tokens, generated=True),))


def request(name: str, prompt: TokenSource, output: TokenSource, arrival_s: float = 0.0) -> TraceRequest:
    """One request of a made trace, of no session."""
    return TraceRequest(name, arrival_s, "", prompt, output)


class Recorder:
    """A session that remembers what went through it."""

    waiting_requests: int | None = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self.parts: list[Part] = []
        self.answers: list[StepResult] = []

    @property
    def spec(self) -> ReplicaSpec:
        return self._session.spec

    def submit(self, *parts: Part) -> int:
        self.parts.extend(parts)
        return self._session.submit(*parts)

    def receive(self) -> StepResult:
        self.answers.append(self._session.receive())
        return self.answers[-1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished replay and all that it was made of."""

    fleet: Fleet
    sessions: list[Recorder]
    replicas: list[ReplicaCore]

    @property
    def engine(self) -> Engine:
        """The only one."""
        (engine,) = self.fleet.engines
        return engine

    @property
    def replica(self) -> ReplicaCore:
        """The only one."""
        (replica,) = self.replicas
        return replica

    def digests(self) -> list[str]:
        """Of the replicas' states."""
        return [digest(replica) for replica in self.replicas]


def begin(
    trace: Iterable[TraceRequest],
    spec: ReplicaSpec,
    config: EngineConfig | None = None,
    replicas: int = 1,
    routing: Routing = Routing.STICKY,
) -> Outcome:
    """Everything set up and nothing run."""
    registry = Registry(Config(), lambda: 0)
    names = [f"replica-{number}" for number in range(replicas)]
    for name in names:
        registry.register(name, Registration(spec))
    transports = [InProcessTransport(lambda name: registry.get(name).host) for _ in names]
    sessions = [
        Recorder(Session(transport, OpenRequest(name, nonce=1, with_events=True), heartbeats=False))
        for name, transport in zip(names, transports, strict=True)
    ]
    engines = [Engine(session, config or EngineConfig(token_budget=BUDGET), COST) for session in sessions]
    cores = [registry.get(name).host.replica for name in names]
    return Outcome(Fleet(engines, trace, routing), sessions, cores)


def run(
    trace: Iterable[TraceRequest],
    spec: ReplicaSpec,
    config: EngineConfig | None = None,
    replicas: int = 1,
    routing: Routing = Routing.STICKY,
) -> Outcome:
    """A whole replay; the allocator's invariants hold at the end and every block is free again."""
    outcome = begin(trace, spec, config, replicas, routing)
    while outcome.fleet.run_step():
        pass
    for replica in outcome.replicas:
        check(replica)
        assert replica.num_running == 0
        assert replica.free_blocks == spec.num_blocks - 1
    progress = outcome.fleet.progress
    assert progress.completed + progress.refused == progress.read
    return outcome
