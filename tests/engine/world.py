"""The reference engine on a service in this process, with parts that tests can break."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from kvplane.base.groups import CommitRule, Planner, TierKind, TierSpec
from kvplane.base.job_table import JobTable, job_table_bytes, rows_for
from kvplane.base.rank_plan import RankPlan
from kvplane.base.session import SessionTransport
from kvplane.base.sources import LayerSource
from kvplane.base.stamp_table import table_bytes
from kvplane.blocking.session import Session
from kvplane.session.options import draw_nonce
from kvplane.session.reopening import Revival
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.unary import encode_layer_source
from kvplane_core.face import inspect
from kvplane_kernels.interface import PagedOps
from kvplane_kernels.torch_ops import TorchOps
from kvplane_plan.planner import Layout, PlanOptions, Worker, plan_cache, to_rank_plan
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.rpc.sources import plan_source
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.buffers import allocation_bytes
from kvplane_worker.tiers import DiskSlots, MoverMemory, Movers, Slots
from kvplane_worker.tiers.seal import IDENTITY_BYTES
from tests.engine.backends import Place
from tests.engine.faults import Fault
from tests.engine.reference.batch import Launch
from tests.engine.reference.config import BOS, EIGHT_BIT, MIXED, ModelConfig
from tests.engine.reference.engine import Engine, LaunchFailed
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import RankMemory
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import Weights, draw_weights
from tests.engine.twin import Twin
from tests.service.inprocess import InProcessTransport


@dataclass(frozen=True)
class Pool:
    """Configuration of a replica.

    Attributes:
        num_blocks: blocks of the pool; small pools evict and preempt.
        batches: most steps in flight.
        retention_interval, watermark, block_outermost, commit, tiers, planner: as in `LayerSource`.
    """

    model: ModelConfig = MIXED
    num_blocks: int = 90
    max_model_len: int = 200
    max_batched_tokens: int = 64
    batches: int = 1
    retention_interval: int = 0
    watermark: float = 0.0
    block_outermost: bool = False
    commit: CommitRule = CommitRule.SAFE
    tiers: tuple[TierSpec, ...] = ()
    planner: Planner = Planner.REFERENCE

    @property
    def source(self) -> LayerSource:
        return LayerSource(
            layers=self.model.cache_layers(),
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_batched_tokens=self.max_batched_tokens,
            max_concurrent_batches=self.batches,
            retention_interval=self.retention_interval,
            watermark=self.watermark,
            block_outermost=self.block_outermost,
            commit=self.commit,
            tiers=self.tiers,
            planner=self.planner,
        )

    @property
    def rank_plan(self) -> RankPlan:
        options = PlanOptions(
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_batched_tokens=self.max_batched_tokens,
            max_concurrent_batches=self.batches,
            retention_interval=self.retention_interval,
            layout=Layout.BLOCK_OUTERMOST if self.block_outermost else Layout.LAYER_OUTERMOST,
            planner=self.planner,
        )
        return to_rank_plan(plan_cache([Worker(self.model.cache_layers())], options))


def slots_of(tier: TierSpec, width: int, world: World) -> Slots:
    if tier.kind is TierKind.HOST:
        return world.fault.slots(tier, width, world.place.device, world.namespace)
    if tier.kind is TierKind.PEERS:
        return world.fault.peers(tier, width, world.namespace)
    return DiskSlots(tier, width, Path(tempfile.mkdtemp()), f"kvplane-test-{draw_nonce():x}")


def poisoned_memory(plan: RankPlan, rank: int, world: World) -> RankMemory:
    """Allocate the pages of a rank, filled with NaN: reads before a write or a zero are detected."""
    pages, fault = PageBuffers(plan, world.place.allocate(allocation_bytes(plan))), world.fault
    num_stamps = plan.num_blocks + sum(tier.num_blocks for tier in world.pool.tiers)
    buffer = bytearray(table_bytes(num_stamps))
    stamps = fault.stamps.create(buffer, num_stamps, incarnation=draw_nonce() | 1)
    jobs = None
    if world.pool.tiers:
        num_rows = rows_for(plan.num_blocks)
        jobs = JobTable.create(bytearray(job_table_bytes(num_rows)), num_rows)
        width = max(pages.group(group).bytes_per_block for group in range(pages.num_groups))
        slots = [slots_of(tier, width, world) for tier in world.pool.tiers]
        place = MoverMemory(pages, stamps, slots)
        world.movers.append(world.fault.movers(place, world.ops, jobs))
    return RankMemory(pages, stamps, fault.mover(pages, world.ops, rank), jobs)


class LossyModel(Model):
    """A model whose launches fail periodically, after rank 0 has computed and before the other ranks do."""

    lose_every = 0
    _launches = 0

    def logits(self, launch: Launch) -> Tensor:
        self._launches += 1
        if self.lose_every and self._launches % self.lose_every == 0:
            sound, self._ranks = self._ranks, self._ranks[:1]
            super().logits(launch)
            self._ranks = sound
            raise LaunchFailed("a rank is out of memory")
        return super().logits(launch)


SOUND = Fault("none", "")
# Prompts from which the scales of 8-bit pages are found.
SAMPLES = [[BOS, *text] for text in (bytes(range(256)), b"the page of a block that was held", b"key value state")]


@dataclass
class World:
    """A registry with one replica, the memory of its ranks, and engine lives on it, one at a time.

    Attributes:
        registry: registry of the service; several worlds may share it.
        fault: fault that is planted in the engine; none by default.
        lose_every: launches after which one fails; 0 = never.
        place: device and allocating process of the pages.
        memory: memory by rank; outlives the engines.
        namespace: names what gives the bytes of slots their meaning.
        movers: of the tiers, by rank, if the pool has any; as long as the memory.
        engine: the engine of the current engine life.
    """

    pool: Pool = field(default_factory=Pool)
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    registry: Registry = field(default_factory=lambda: Registry(Config(), lambda: 0))
    name: str = "engine"
    ops: PagedOps = field(default_factory=TorchOps)
    fault: Fault = SOUND
    lose_every: int = 0
    place: Place = Place()  # noqa: RUF009 - frozen
    namespace: bytes = bytes(IDENTITY_BYTES)

    def __post_init__(self) -> None:
        request = pb.RegisterReplicaRequest(replica=self.name, layers=encode_layer_source(self.pool.source))
        spec = plan_source(request).spec
        plan = self.pool.rank_plan
        entry = Registration(spec, self.pool.model.num_ranks, namespace_digest=b"engine", plans=(plan,))
        self.registry.register(self.name, entry)
        self.movers: list[Movers] = []
        self.ops = self.fault.ops() if self.fault.ops else self.ops
        self.memory = [poisoned_memory(plan, rank, self) for rank in range(self.pool.model.num_ranks)]
        self.weights: Weights = draw_weights(self.pool.model)
        self.twin = Twin(self.pool.model, self.weights, [one.pages for one in self.memory])
        self.engine = self.begin()

    @property
    def host(self) -> ReplicaHost:
        return self.registry.get(self.name).host

    def begin(self) -> Engine:
        """Begin an engine life on the memory as it is, as after a crash: the last session was not closed."""
        buffers = [one.pages for one in self.memory]
        model = LossyModel(self.pool.model, self.weights, buffers, self.ops)
        model.lose_every = self.lose_every
        if self.pool.model.cache_dtype in EIGHT_BIT:
            model.calibrate(SAMPLES)
        return self.fault.engine(self.open_session, self.memory, model, self.config)

    def open_session(self, revive: Callable[[], Revival]) -> Session:
        request = revive().first_request(self.name, draw_nonce(), False, "")
        self.session = Session(self.transport(), request, heartbeats=False, revive=revive)
        return self.session

    def transport(self) -> SessionTransport:
        return InProcessTransport(lambda name: self.registry.get(name).host)

    def check(self) -> None:
        """Check the invariants of the core, and stop the movers."""
        for movers in self.movers:
            movers.close()
        inspect.check(self.host.replica)
