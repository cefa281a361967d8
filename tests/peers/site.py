"""Several reference engines of one namespace on one service or two in this process, which read each other's host tiers.

Each engine has pages, a host tier in a real memory file and movers of its own. Its peers map that file by its
descriptor, or read it over NIXL, as workers do (`kvplane_worker.rpc.arenas`); the service learns of the memory as
workers register.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from kvplane import wire
from kvplane.base.errors import NotFound, Unavailable
from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane.base.step import RowFlag
from kvplane.base.worker import PeerArena, WorkerInfo, WorkerState
from kvplane.v1 import plan_pb2 as pb
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.replicas.peer_watch import PeerWatch
from kvplane_service.replicas.peers import Namespace
from kvplane_worker.nixl.process import NixlProcess
from kvplane_worker.tiers import HostSlots, Peer, PeerSlots
from kvplane_worker.tiers.arena import Arena, PeerMemory
from kvplane_worker.tiers.seal import IDENTITY_BYTES
from tests.engine.faults import Fault
from tests.engine.reference.config import LayerConfig, ModelConfig
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.stress import FULL, tuned
from tests.engine.world import SOUND, Pool, World

HOST_SLOTS = 400
NAMESPACE = b"one namespace..."
assert len(NAMESPACE) == IDENTITY_BYTES


def pool_of(
    num_engines: int, layers: tuple[LayerConfig, ...] = (FULL, FULL), host_slots: int = HOST_SLOTS, **changes: Any
) -> Pool:
    """The pool of each engine: its device has room for a few prompts."""
    tiers = (
        TierSpec(TierKind.HOST, host_slots, save=SavePolicy.THROUGH),
        TierSpec(TierKind.PEERS, num_engines * host_slots),
    )
    sizes: dict[str, Any] = {"num_blocks": 70, "max_model_len": 300, "max_batched_tokens": 160, "batches": 4}
    return Pool(ModelConfig(layers, num_ranks=1), tiers=tiers, **{**sizes, **changes})


CONFIG = tuned(token_budget=160, admit_flags=RowFlag.LOAD)


@dataclass
class Site:
    """The engines, by name.

    Attributes:
        memory_of: makes what a peer reads of a memory that it has mapped; replaced by faults.
        nixl_s: how long a read over NIXL may take; 0 = peers map the memory.
        more: registries of other services; engines are on all in turns.
    """

    num_engines: int
    pool: Pool
    config: SchedulerConfig = CONFIG
    fault: Fault = SOUND
    memory_of: Callable[[PeerMemory, bytes], PeerMemory] = lambda arena, _: arena
    registry: Registry = field(default_factory=lambda: Registry(Config(), lambda: 0))
    nixl_s: float = 0.0
    more: Sequence[Registry] = ()

    def __post_init__(self) -> None:
        every = (self.registry, *self.more)
        self.links = [Link(one, other) for one in every for other in every if one is not other]
        self._turns = cycle(every)
        self.agents: dict[tuple[str, int], NixlProcess] = {}  # of each rank
        self.worlds = [self.make(f"engine/{number}") for number in range(self.num_engines)]
        self.connect()

    def make(self, name: str) -> World:
        """Make an engine with new memory, and register its workers."""
        registry = next(self._turns)
        world = World(self.pool, self.config, registry, name, fault=self.fault, namespace=NAMESPACE)
        for rank in range(self.pool.model.num_ranks):
            if self.nixl_s:
                host = tiers_of(world, rank)[0]
                self.agents[name, rank] = NixlProcess(host.arena, host.incarnation, self.nixl_s)
            registry.get(name).workers.register(self.info(world, rank))
        return world

    def info(self, world: World, rank: int) -> WorkerInfo:
        """What the worker of a rank registers."""
        host, peers = tiers_of(world, rank)
        return WorkerInfo(
            rank,
            1 + id(host) % (1 << 60),
            f"unix:/{world.name}/{rank}",
            os.getpid(),
            "cpu",
            state=WorkerState.READY,
            host_incarnation=host.identity[IDENTITY_BYTES:],
            mapped=tuple(peer.incarnation for peer in peers.peers),
            nixl_arena=self.agents[world.name, rank].nixl_arena if self.nixl_s else b"",
            nixl_peers=len(peers.peers) if self.nixl_s else 0,
        )

    def kill(self, world: World) -> None:
        """Kill the processes of an engine that have NIXL, as they end with their worker."""
        for rank in range(self.pool.model.num_ranks):
            if self.nixl_s:
                self.agents.pop((world.name, rank)).close()

    def connect(self) -> None:
        """Let services report to each other, workers renew their leases, map what they may read, and report it."""
        self.report()
        for world in self.worlds:
            entry = world.registry.get(world.name)
            for rank in range(self.pool.model.num_ranks):
                assert entry.namespace is not None
                peers = tiers_of(world, rank)[1]
                before = peers.peers
                arenas = entry.namespace.arenas(world.name, rank)
                peers.set_peers([made for one in arenas if (made := self.peer(world, one, rank)) is not None])
                for peer in before:
                    peer.memory.close()
                try:
                    entry.workers.renew(self.info(world, rank))
                except NotFound:  # its lease has expired: workers register again
                    entry.workers.register(self.info(world, rank))

    def report(self) -> None:
        """Let each service take what the others report."""
        for link in self.links:
            link.report()

    def peer(self, reader: World, arena: PeerArena, rank: int) -> Peer | None:
        """Map the memory of a peer, or open it over NIXL; None if it is gone."""
        if self.nixl_s:
            try:
                far = self.agents[reader.name, rank].open(arena)
            except Unavailable:
                return None
            return Peer(arena.first_slot, arena.incarnation, self.memory_of(far, arena.incarnation))
        name = arena.address.removeprefix("unix:/").rpartition("/")[0]
        hosts = [tiers_of(one, rank)[0] for one in self.worlds if one.name == name]
        if [one.incarnation for one in hosts] != [arena.incarnation]:
            return None  # what a service says of another one may be late
        (host,) = hosts
        mapped = Arena.open(os.dup(host.arena.descriptor), host.arena.num_slots, host.arena.slot_bytes)
        return Peer(arena.first_slot, arena.incarnation, self.memory_of(mapped, arena.incarnation))

    def close(self) -> None:
        """Check the invariants of all cores, and stop all movers."""
        for world in self.worlds:
            world.check()
        for agent in self.agents.values():
            agent.close()


class Link:
    """What one service says to another, in messages: `kvplane_service.process.peer_services` without gRPC."""

    def __init__(self, source: Registry, reader: Registry) -> None:
        self._source, self._reader = source, reader
        self._watches: dict[bytes, tuple[Namespace | None, Namespace, PeerWatch, ExitStack]] = {}
        self.messages = 0

    def report(self) -> None:
        """Send what is new, and apply it."""
        for digest, reader in self._reader.namespaces.items():
            source = self._source.namespaces.get(digest)
            given = self._watches.get(digest)
            if given is not None and given[:2] != (source, reader):
                self.cut()
                given = None
            if given is None:
                watch, until = PeerWatch(), ExitStack()
                if source is not None:
                    until.enter_context(source.watched(watch))
                given = self._watches[digest] = source, reader, watch, until
            for news in source.news(given[2]) if source is not None else ():
                sent = wire.encode_news(news).SerializeToString()
                self.messages += 1
                reader.apply(self.name, wire.decode_news(pb.WatchPeersResponse.FromString(sent), reader.digest_size))

    @property
    def name(self) -> str:
        """The address of the service, as its reader knows it."""
        return f"service-{id(self._source)}"

    def cut(self) -> None:
        """Break the connection: what was said is forgotten, and said again."""
        for _, reader, _, until in self._watches.values():
            reader.forget(self.name)
            until.close()
        self._watches.clear()


def tiers_of(world: World, rank: int) -> tuple[HostSlots, PeerSlots]:
    """The tiers of a rank."""
    host, peers = world.movers[rank].tiers
    assert isinstance(host, HostSlots)
    assert isinstance(peers, PeerSlots)
    return host, peers
