"""What kvplane adds to the published fleet, one thing after the other: scores, prices, eviction, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvplane.base.groups import DENSE_RETENTION, EvictionPolicy, ReplicaSpec, SavePolicy, TierKind, TierSpec
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane.base.sections import Retain
from kvplane.base.step import CacheEvent
from kvplane_fleet.policies import Policy
from kvplane_fleet.settings import RouterSettings
from kvplane_service.replicas.peers import Namespace
from kvplane_tools.replay.plan import NS_PER_SECOND
from kvplane_tools.replay.requests import LiveRequest
from kvplane_tools.replay.workloads import TokenSource, TraceRequest
from tests.bench import routing
from tests.bench.routing import PublishingSession
from tests.bench.tables.engine import TimedEngine
from tests.bench.tables.fleet import PAGE_BYTES, SYSTEM, StagedFleet, host_tier, spec_of
from tests.bench.tables.model import LINK_BYTES_PER_S, PEER_BYTES_PER_S, TOKEN_BYTES, Fitted, StepCost
from tests.bench.tables.peers import PeerSession
from tests.bench.tables.published import ENGINES

RETAINED_PERCENT, RETAINED_NS = 25, 600 * NS_PER_SECOND
PASSED_BY = 64
SPEEDS = (LINK_BYTES_PER_S, PEER_BYTES_PER_S)
MODEL_OUTPUT_ROWS = 8  # prompts in flight of an engine, in what its router assumes before anything is reported


@dataclass(frozen=True, slots=True)
class Added:
    """What of kvplane a column has.

    Attributes:
        policy: of the router, on exact claims of device and host.
        passed_by: see Limits; prompts that share what runs are admitted before one that lacks blocks.
        prices_displacement: see RouterSettings.
        eviction: of each engine.
        keeps_needed: windows are cached where a hit may end, not everywhere, and copied to the host before they are
            evicted, not at once.
        retains: each engine retains the shared beginnings of the prompts that it answers.
        peers: each engine may load from the host tiers of the others.
        prices_peers: the router knows it.
    """

    policy: Policy
    passed_by: int = 0
    prices_displacement: bool = False
    eviction: EvictionPolicy = EvictionPolicy.LRU
    keeps_needed: bool = False
    retains: bool = False
    peers: bool = False
    prices_peers: bool = False

    def spec(self, pool_bytes: float, engines: int) -> ReplicaSpec:
        """Return the replica of each of the engines."""
        tier = host_tier(SavePolicy.BEHIND if self.keeps_needed else SavePolicy.THROUGH)
        tier = replace(tier, retained_percent=RETAINED_PERCENT if self.retains else 0)
        spec = spec_of(pool_bytes, 0 if self.keeps_needed else DENSE_RETENTION, tier)
        tiers = (tier, TierSpec(TierKind.PEERS, engines * tier.num_blocks)) if self.peers else (tier,)
        return replace(spec, events=True, eviction=self.eviction, tiers=tiers)


COLUMNS = {
    "exact scores": Added(Policy.WEIGHTS),
    "priced": Added(Policy.COST),
    "+ passing": Added(Policy.COST, PASSED_BY),
    "with peers": Added(Policy.COST, PASSED_BY, peers=True),
    "priced peers": Added(Policy.COST, PASSED_BY, peers=True, prices_peers=True),
    "+ displacement": Added(Policy.COST, PASSED_BY, True),
    "+ hazard": Added(Policy.COST, PASSED_BY, True, EvictionPolicy.HAZARD),
    "+ needed windows": Added(Policy.COST, PASSED_BY, True, EvictionPolicy.HAZARD, True),
    "+ retained": Added(Policy.COST, PASSED_BY, True, EvictionPolicy.HAZARD, True, True),
}


class ProductRouter:
    """The router of `tests.bench.routing`, in seconds of the engines."""

    def __init__(self, engines: Sequence[TimedEngine], added: Added, cost: StepCost, seed: int) -> None:
        spec, self._added = engines[0].spec, added
        names = [str(number) for number in range(len(engines))]
        settings = RouterSettings(
            prefill_tokens_per_s=SYSTEM / cost.prefill_s(0, SYSTEM),
            decode_s=cost.weights_s(MODEL_OUTPUT_ROWS) + cost.contexts_s([SYSTEM] * MODEL_OUTPUT_ROWS),
            host_tokens_per_s=LINK_BYTES_PER_S / TOKEN_BYTES,
            peer_tokens_per_s=PEER_BYTES_PER_S / TOKEN_BYTES,
            price_displacement=added.prices_displacement,
        )
        namespace = b"engines" if added.prices_peers else b""
        self._router = routing.Router(spec, names, added.policy.value, seed, settings, namespace)
        self._names = {id(engine): name for engine, name in zip(engines, names, strict=True)}
        self._scheme = HashScheme.of(spec)
        self._digests: dict[int, bytes] = {}
        for engine in engines:
            engine.published = self._published

    def route(self, request: TraceRequest) -> int:
        """See fleet.Router."""
        return int(self._router.route(request))

    def first_token(self, engine: TimedEngine, request: LiveRequest) -> None:
        """See fleet.Router. What is retained is stated in the engine's next step."""
        self._router.first_token(engine.now_s, request)
        if self._added.retains:
            shared = request.trace.prompt.spans[0]
            if shared.stream not in self._digests:
                packed = TokenSource((shared,)).packed()
                self._digests[shared.stream] = RequestHasher(self._scheme).append(packed)
            digests = self._digests[shared.stream]
            engine.grouped.retain = Retain(
                [len(digests) // self._scheme.digest.size], digests, priority=[1], percent=[RETAINED_PERCENT],
                until_ns=[engine.clock_ns + RETAINED_NS], now_ns=[engine.clock_ns],
            )  # fmt: skip

    def ended(self, engine: TimedEngine, request: LiveRequest) -> None:
        """See fleet.Router."""
        self._router.ended(engine.now_s, request)

    def _published(self, engine: TimedEngine, events: Sequence[CacheEvent]) -> None:
        self._router.publish(engine.now_s, self._names[id(engine)], events)


def product_fleet(added: Added, fitted: Fitted, seed: int = 1, engines: int = ENGINES) -> StagedFleet:
    """Return the fleet of a column of kvplane's."""
    spec, cost, namespace = added.spec(fitted.pool_bytes, engines), StepCost(fitted), Namespace()
    sessions = [
        PeerSession(spec, namespace, number, engines) if added.peers else PublishingSession(spec)
        for number in range(engines)
    ]
    served = [TimedEngine(one, PAGE_BYTES, cost, added.passed_by, SPEEDS) for one in sessions]
    return StagedFleet(served, ProductRouter(served, added, cost, seed))
