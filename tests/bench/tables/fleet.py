"""The published fleet: its load, the routing that was published, and stages that are run one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean, quantiles
from typing import Protocol

from kvplane.base.groups import (
    DENSE_RETENTION,
    EvictionPolicy,
    GroupKind,
    GroupSpec,
    ReplicaSpec,
    SavePolicy,
    TierKind,
    TierSpec,
)
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane_fleet.domains import keys_of
from kvplane_tools.replay.fleet import Arriving, Fleet
from kvplane_tools.replay.requests import LiveRequest
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench import routing
from tests.bench.routing import History, PublishingSession
from tests.bench.tables import published
from tests.bench.tables.engine import TimedEngine
from tests.bench.tables.model import BUDGET, MAX_MODEL_LEN, TOKEN_BYTES, WINDOW, Fitted, StepCost
from tests.bench.tables.published import BLOCK, ENGINES, GROUPS, HOST_BYTES, OUTPUT, PROMPTS, UNIT

PAGE_BYTES = TOKEN_BYTES * BLOCK
_SCALE = UNIT.prompt / (published.SYSTEM + published.QUESTION)  # tokens of the text, of those that it was made from
SYSTEM, QUESTION = round(published.SYSTEM * _SCALE), round(published.QUESTION * _SCALE)


def spec_of(pool_bytes: float, retention: int = DENSE_RETENTION, tier: TierSpec | None = None) -> ReplicaSpec:
    """Return the replica of each engine; with the defaults, one that keeps every window, as vLLM does."""
    cap = 1 + -(-(WINDOW + BUDGET) // BLOCK)
    window = GroupSpec(
        GroupKind.SLIDING_WINDOW, BLOCK, window=WINDOW, lookup_class=1, admission_cap_blocks=cap
    )  # fmt: skip
    return ReplicaSpec(
        groups=(GroupSpec(GroupKind.FULL_ATTENTION, BLOCK), window),
        num_blocks=int(pool_bytes / PAGE_BYTES) + 1,
        max_model_len=MAX_MODEL_LEN,
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
        max_in_flight_tokens=BUDGET,
        retention_interval=retention,
        events=False,
        eviction=EvictionPolicy.LRU,
        tiers=(tier,) if tier else (),
    )


def host_tier(save: SavePolicy = SavePolicy.THROUGH) -> TierSpec:
    """Return the published host memory; what is computed is copied at once, as vLLM's connector does."""
    return TierSpec(TierKind.HOST, HOST_BYTES // PAGE_BYTES, save)


class Load:
    """The requests of the published load: a shuffled round over all prompts, repeated, with Poisson arrivals."""

    def __init__(self, seed: int, groups: int = GROUPS) -> None:
        self._rng, self._sent = Random(seed), 0
        self._order = [(group, prompt) for group in range(groups) for prompt in range(PROMPTS)]
        self._rng.shuffle(self._order)

    def stage(self, rate: float, start_s: float, seconds: float) -> Iterator[TraceRequest]:
        """Yield the requests of a stage."""
        at_s = start_s + self._rng.expovariate(rate)
        while at_s < start_s + seconds:
            group, prompt = self._order[self._sent % len(self._order)]
            own = GROUPS + group * PROMPTS + prompt
            answer = TokenSource((Span(own, 0, OUTPUT, generated=True),))
            text = TokenSource((Span(group, 0, SYSTEM), Span(own, 0, QUESTION)))
            yield TraceRequest(str(self._sent), at_s, "", text, answer)
            self._sent += 1
            at_s += self._rng.expovariate(rate)


class TraceLoad:
    """The first requests of a public trace, their arrivals compressed to a rate. A prompt that no engine may hold is
    left out.
    """

    def __init__(self, name: str, limit: int) -> None:
        scene = next(one for one in routing.SCENES if one.name == name)
        self._scene, self.left_out = replace(scene, limit=limit), 0

    def stage(self, rate: float, start_s: float, seconds: float) -> Iterator[TraceRequest]:
        """Yield the requests, of `seconds` at most."""
        with ExitStack() as files:
            for one in routing.arrivals(self._scene, rate, 1, files):
                if one.arrival_s > seconds:
                    return
                if len(one.prompt) + one.output_tokens > MAX_MODEL_LEN:
                    self.left_out += 1
                elif one.output_tokens:
                    yield replace(one, name=f"{one.name} {start_s}", arrival_s=start_s + one.arrival_s)


class Router(Protocol):
    """Chooses the engine of a request, and learns what became of it."""

    def route(self, request: TraceRequest) -> int:
        """Return the number of the engine."""
        ...

    def first_token(self, engine: TimedEngine, request: LiveRequest) -> None:
        """The first token has come."""
        ...

    def ended(self, engine: TimedEngine, request: LiveRequest) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the published scorers: prompts that wait, memory, and what device and host have of the prompt."""

    queue: float
    memory: float
    device: float
    host: float = 0.0


class WeightedRouter:
    """The published routing: an approximate record of what was sent where, weighed with queue and memory."""

    def __init__(self, engines: Sequence[TimedEngine], weights: Weights, seed: int) -> None:
        self._engines, self._weights, self._rng = engines, weights, Random(seed)
        spec = engines[0].spec
        self._scheme = HashScheme.of(spec)
        self._device = History(spec.num_blocks)
        self._host = History(sum(tier.num_blocks for tier in spec.tiers) // len(spec.groups))
        self._keys: dict[TokenSource, Sequence[int]] = {}

    def route(self, request: TraceRequest) -> int:
        """See Router. Equal places are chosen at random."""
        keys = self._keys.get(request.prompt)
        if keys is None:
            raw = RequestHasher(self._scheme).append(request.prompt.packed())
            keys = self._keys[request.prompt] = keys_of(raw, self._scheme.digest.size)
        waiting = [engine.num_waiting for engine in self._engines]
        least, most = min(waiting), max(waiting)
        weights, scores = self._weights, list[tuple[float, float, int]]()
        for number, engine in enumerate(self._engines):
            queue = 1 - (waiting[number] - least) / (most - least) if most > least else 1.0
            score = weights.queue * queue + weights.memory * (1 - engine.used_share)
            score += weights.device * self._device.hit_tokens(str(number), keys) / len(request.prompt)
            if weights.host:
                score += weights.host * self._host.hit_tokens(str(number), keys) / len(request.prompt)
            scores.append((score, self._rng.random(), number))
        number = max(scores)[2]
        self._device.send(str(number), keys)
        self._host.send(str(number), keys)
        return number

    def first_token(self, engine: TimedEngine, request: LiveRequest) -> None:
        """See Router."""

    def ended(self, engine: TimedEngine, request: LiveRequest) -> None:
        """See Router."""


@dataclass(slots=True)
class Stage:
    """What became of the requests of a stage: seconds from arrival, and hits."""

    start_s: float
    first_token_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    prompt: int = 0
    hit: int = 0
    generated: int = 0

    @property
    def row(self) -> published.Row:
        """The figures that were published of a stage."""
        seconds = self.last_s - self.start_s
        counted = self.generated * UNIT.counted / UNIT.generated
        return published.Row(
            mean(self.first_token_s), percentile(self.first_token_s, 90),
            mean(self.latency_s), percentile(self.latency_s, 90), counted / seconds,
        )  # fmt: skip


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of two values or more."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


class StagedFleet:
    """Engines that keep their caches from stage to stage."""

    def __init__(self, engines: Sequence[TimedEngine], router: Router) -> None:
        self.engines, self._router, self.stages, self.steps = engines, router, list[Stage](), 0
        for engine in engines:
            engine.first_token, engine.ended = self._first_token, self._ended

    def run(self, load: Load | TraceLoad, rate: float, seconds: float) -> Stage:
        """Run a stage to its end; the next one begins after the published pause."""
        start_s = 0.0
        if self.stages:
            start_s = max(engine.now_s for engine in self.engines) + published.PAUSE_S
        self.stages.append(Stage(start_s))
        fleet = _Arrivals(self.engines, load.stage(rate, start_s, seconds), self._router)
        while fleet.run_step():
            self.steps += 1
        refused = [one for engine in self.engines for one in engine.refusals]
        assert not refused, refused[0]
        return self.stages[-1]

    def _first_token(self, engine: TimedEngine, request: LiveRequest) -> None:
        stage = self.stages[-1]
        stage.first_token_s.append(engine.now_s - request.arrival_s)
        stage.prompt, stage.hit = stage.prompt + request.num_prompt, stage.hit + request.hits[0]
        self._router.first_token(engine, request)

    def _ended(self, engine: TimedEngine, request: LiveRequest) -> None:
        stage = self.stages[-1]
        stage.latency_s.append(engine.now_s - request.arrival_s)
        stage.generated += request.num_tokens - request.num_prompt
        stage.last_s = max(stage.last_s, engine.now_s)
        self._router.ended(engine, request)


class _Arrivals(Fleet):
    def __init__(self, engines: Sequence[TimedEngine], trace: Iterator[TraceRequest], router: Router) -> None:
        super().__init__(engines, trace)
        self._router = router

    def _route(self, request: Arriving) -> int:
        assert isinstance(request, TraceRequest)
        return self._router.route(request)


GPU_ONLY, BOTH = Weights(2, 2, 3), Weights(1, 1, 1, 1)
COLUMNS = {"baseline": (None, GPU_ONLY), "offloaded": (host_tier(), GPU_ONLY), "both": (host_tier(), BOTH)}


def published_fleet(column: str, fitted: Fitted, seed: int = 1, engines: int = ENGINES) -> StagedFleet:
    """Return the fleet of a published column."""
    tier, weights = COLUMNS[column]
    spec = spec_of(fitted.pool_bytes, tier=tier)
    served = [TimedEngine(PublishingSession(spec), PAGE_BYTES, StepCost(fitted)) for _ in range(engines)]
    return StagedFleet(served, WeightedRouter(served, weights, seed))
