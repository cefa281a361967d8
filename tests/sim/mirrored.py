"""An engine that decides itself, and its faults.

    Core (the allocator in the engine's process) -> MirrorLog -> Sender -> a service that applies the same steps

The engine is `EngineLife`, with an allocator of its own instead of a session: pages, ranks, loads and launches are the
same. What survives it is in the memory of rank 0: the published keys with their stamps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvplane.base.errors import InternalError, KvplaneError, LimitExceeded
from kvplane.base.session import CacheRequest, MirrorTerms, OpenRequest, Progress
from kvplane.base.stamps import newest_epoch
from kvplane.base.step import Part, Step, StepResult
from kvplane.session.mirror_log import Iteration, MirrorLog, Piece
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.mirror import (
    Mirrored,
    answer_digest,
    decode_cache_request,
    decode_progress,
    mirrored_message,
    slice_message,
)
from kvplane.wire.stream import heartbeat_message
from kvplane_core.face.state import digest as state_digest
from kvplane_core.face.state import slices
from kvplane_core.spec.replica import Replica
from kvplane_service.replicas.host import ReplicaHost
from tests.core.builders import new_replica
from tests.core.page_memory import WrongPage
from tests.core.specification import specification_of
from tests.sim import history
from tests.sim.chaos import KINDS, Chaos
from tests.sim.engine import EngineLife
from tests.sim.ranks import Claim
from tests.sim.service import ADDRESSES, LEASE_MS, Service
from tests.sim.transport import call

if TYPE_CHECKING:
    from tests.sim.world import Site, World

PIECE_BYTES = 700  # images of these pools are small
_BEAT_S = LEASE_MS / 3000
_PAUSE_S = 0.1
_EPOCH_S = 2.0
_CATCH_UP_S = 20.0
_PERCENT_REPEATED, _PERCENT_LATE, _PERCENT_JOINED = 5, 2, 15


class Core:
    """The allocator of an engine, in the place of its session."""

    next_seq = 1

    def __init__(self, replica: Replica, epoch: int) -> None:
        self.replica, self.epoch = replica, epoch

    @property
    def seq(self) -> int:
        return self.replica.seq

    @property
    def busy_blocks(self) -> Sequence[int]:
        return self.replica.busy_blocks

    def apply(self, parts: Sequence[Part], executed_through: int) -> tuple[Step, StepResult]:
        """Apply the next step."""
        step = Step(self.epoch, self.seq + 1, list(parts), executed_through=executed_through)
        return step, self.replica.apply(step)


class MirroredLife(EngineLife):
    """One engine life that decides itself; `session` is its allocator."""

    session: Core

    def __init__(self, world: World, site: Site) -> None:
        super().__init__(world, site)
        self.nonce = self.rng.getrandbits(64) | 1
        self.log = MirrorLog(self.rng.choice([4, 20, 200]), PIECE_BYTES)
        self._held_back: list[tuple[Step, StepResult]] = []  # steps of the iteration that is not sent yet
        self._asked: dict[int, CacheRequest] = {}  # that callers of a service wait for
        self._carried_out: dict[int, int] = {}  # by number of a step: the request that it carries out
        self._changed = asyncio.Event()
        self._is_ending = False

    @property
    def _service(self) -> int:
        """This process claims the ranks, no service does."""
        return self.process.pid

    @property
    def _life(self) -> int:
        return self.nonce

    def _host(self) -> Core:  # type: ignore[override]
        return self.session

    async def _live(self) -> None:
        for rank in self.ranks:
            await rank.has_attached()
        known = await self._epoch_of_service()
        tables = [rank.memory.table.read_all() for rank in self.ranks]
        self.epoch = max(known, self._owner_epoch(), *map(newest_epoch, tables)) + 1
        replica, memory = new_replica(self.spec), self.ranks[0].memory
        records = memory.records if memory.records_of == self.incarnation else None
        replica.recover(self.epoch, tables, [records] if records else [], self.site.busy_blocks())
        replica.take_events()
        self.session = Core(replica, self.epoch)
        stored = zip(records.block, records.stamp, strict=True) if records else ()
        due = {(block, stamp) for block, stamp in stored if {table[block] for table in tables} == {stamp}}
        pool = replica.coordinator.pool
        kept = tuple((block, pool.stamp[block]) for block, key in enumerate(pool.key) if key)
        shown = tuple(map(tuple, tables))
        place = self.process.pid, self.site.name, self.epoch, self.nonce, 0
        self.world.record(history.Began(*place, kept, tuple(sorted(due)), (), shown))
        self._decided(f"{self.incarnation}")
        self.world.record(history.Opened(self.site.name, self.epoch, self._owner_shown))
        self.log.begin_image(0, slices(replica))
        await self._claim(1, 0)
        self._launching = self.process.spawn(self._launch_all())
        self.process.spawn(self._load_all())
        self._sending = self.process.spawn(self._send_all())
        while not self.world.is_finishing:
            if not self.failed and len(self.pending) > self._busy and self._chance(4):
                self._fail()
            await self._step(self._with_asked(self.plan()))
            await asyncio.sleep(self.rng.random() * 0.04)
        await self._end_all()

    async def _epoch_of_service(self) -> int:
        request, owners = pb.DescribeReplicaRequest(replica=self.site.name), self.world.draw_owners()
        try:
            async with asyncio.timeout(_EPOCH_S):
                answer = await call(self.world.network, owners, self.site.name, "Allocation/DescribeReplica", request)
        except (KvplaneError, TimeoutError):
            return 0
        return int(answer.epoch)

    async def _claim(self, next_seq: int, ahead: int) -> None:
        self._newest_stamp = max(stamp for rank in self.ranks for stamp in rank.memory.table.read_all())
        for rank in self.ranks:
            await rank.ask(Claim(self.epoch, next_seq, ahead, self._service, self._life))

    def _with_asked(self, parts: list[Part]) -> list[Part]:
        """The step carries out the next request that the service sent."""
        for number, request in list(self._asked.items())[:1]:
            del self._asked[number]
            self._carried_out[self.session.seq + 1] = number
            cache = parts[0].cache
            cache.evicted, cache.reset = [*cache.evicted, *request.blocks], cache.reset or request.reset
        return parts

    async def _step(self, parts: list[Part]) -> StepResult:
        self._check_owner()
        step, result = self.session.apply(parts, self.executed_through)
        self._transport.sent_seq = result.seq
        self._decided(history.fingerprint(result.parts))
        self._submit(step, result)
        memory = self.ranks[0].memory
        memory.records, memory.records_of = self.session.replica.entries(), self.incarnation
        self._check_pages()
        await self._take_result(parts, result)
        return result

    def _decided(self, answer: str) -> None:
        replica = self.session.replica
        state = state_digest(replica)
        self.world.record(history.Decided(self.site.name, self.nonce, replica.seq, answer, state))

    def _check_pages(self) -> None:
        """Every published page of the engine's own allocator, unless the memory is another life's by now."""
        try:
            memories = [rank.memory.pages for rank in self.ranks]
            self.site.texts.check_keys(self.session.replica, memories, self.site.invalid_blocks())
        except WrongPage as error:
            self.world.record(history.Wrong(f"{self.site.name}, step {self.session.seq} of {self.epoch}: {error}"))

    async def _end_all(self) -> None:
        self._is_ending = True
        while self.site.busy_blocks():  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(_PAUSE_S)
        answer = await self._step(self.plan_end())
        for _ in range(2):
            while self.queue:
                self._lane.clear()
                await self._lane.wait()
            answer = await self._step(self.plan_end())
        self.world.record(history.Emptied(self.site.name, answer.parts[-1].free_blocks, self.site.usable))
        until_s = self.world.loop.time() + _CATCH_UP_S
        while self.world.loop.time() < until_s and not self._has_caught_up:  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(_PAUSE_S)
        applied = self.log.applied_through if self._has_caught_up else -1
        self.world.record(history.CaughtUp(self.site.name, self.log.newest, applied))
        self._sending.cancel()
        await self._transport.close()
        self.site.is_finished = True

    @property
    def _has_caught_up(self) -> bool:
        return not self.log.image_wanted and not self.log.has_message and self.log.applied_through == self.log.newest

    def move(self) -> None:
        """Stop sending, and attach to another service."""
        self._transport.move()

    # -- the mirror: as MirrorSender does on its thread ---------------------------------------------------------------

    def _submit(self, step: Step, result: StepResult) -> None:
        self._held_back.append((step, result))
        if self._chance(_PERCENT_JOINED) and not self._is_ending:
            return
        steps, self._held_back = tuple(self._held_back), []
        asked, self._carried_out = self._carried_out, {}
        self.log.add(Iteration(steps, self.world.loop.clock_ns(), asked))
        if self.log.image_wanted:
            self.log.begin_image(self.session.seq, slices(self.session.replica))
        self._changed.set()

    async def _send_all(self) -> None:
        terms = MirrorTerms(self.spec.commit)
        base = OpenRequest(
            self.site.name, 0, self.epoch, incarnation=self.incarnation, life_nonce=self.nonce, mirror=terms
        )
        while True:
            try:
                opened = await self._transport.open(replace(base, nonce=self.rng.getrandbits(64)))
                self.log.opened(opened.seq, opened.image_wanted, opened.mirror_window)
                await self._follow()
            except KvplaneError as error:
                self.world.note_end(self, error)
                if isinstance(error, InternalError | LimitExceeded):
                    raise
            await asyncio.sleep(self.rng.random() * _PAUSE_S)

    async def _follow(self) -> None:
        """Send until the stream ends, which raises."""
        awaited: deque[bool] = deque()  # by message without an answer: whether it is the log's, or a repeat
        ended: list[KvplaneError] = []
        reading = self.process.spawn(self._read_all(awaited, ended))
        before: pb.SessionRequest | None = None  # the last steps sent
        try:
            while not ended:
                self._changed.clear()
                message = self.log.next_message()
                if message is None:
                    try:
                        async with asyncio.timeout(_BEAT_S):
                            await self._changed.wait()
                    except TimeoutError:
                        self._transport.write(heartbeat_message())
                    continue
                if self._chance(_PERCENT_LATE):
                    await asyncio.sleep(self.rng.random())
                if isinstance(message, Piece):
                    self._transport.write(slice_message(message.data, message.first, message.last))
                    if message.last:
                        awaited.append(True)
                    continue
                before = self._send(message)
                awaited.append(True)
                if self._chance(_PERCENT_REPEATED):
                    self._transport.write(before)
                    awaited.append(False)
            raise ended[0]
        finally:
            reading.cancel()

    def _send(self, message: Iteration) -> pb.SessionRequest:
        age_ms = (self.world.loop.clock_ns() - message.at_ns) // 1_000_000
        asked, recorded = message.cache_requests, message.recorded()
        steps = [Mirrored(step, answer_digest(result), asked.get(step.seq, 0)) for step, result in recorded]
        sent = mirrored_message(steps, self.log.newest, age_ms)
        self._transport.write(sent)
        return sent

    async def _read_all(self, awaited: deque[bool], ended: list[KvplaneError]) -> None:
        try:
            while True:
                answer = await self._transport.read()
                if answer.WhichOneof("kind") == "progress":
                    progress: Progress = decode_progress(answer.progress)
                    if awaited.popleft():
                        self.log.answered(progress)
                elif answer.WhichOneof("kind") == "cache_request":
                    asked = decode_cache_request(answer.cache_request, 0)
                    self._asked[asked.number] = asked
                self._changed.set()
        except KvplaneError as error:
            ended.append(error)
            self._changed.set()


# -- faults ------------------------------------------------------------------------------------------------------------


class MirrorChaos(Chaos):
    """The faults of all runs, and those of mirrors."""

    def _kinds(self):
        return {**KINDS, **MIRROR_KINDS}

    def _draw_kinds(self) -> list[str]:
        kinds = list(MIRROR_KINDS) + self._rng.sample(sorted(KINDS), 3)
        return kinds + self._rng.choices(sorted(self._kinds()), k=4)

    def _mirrors(self) -> list[tuple[Service, ReplicaHost]]:
        """Services that follow an engine now."""
        found = []
        for address in ADDRESSES:
            service = self._world.services[address]
            for site in self._world.sites.values():
                if site.is_mirrored and service.process.alive and site.name in service.registry:
                    host = service.registry.get(site.name).host
                    if host.state.value == "live" and host.mirror.is_attached and not host.steps.is_aside:
                        found.append((service, host))
        return found

    def service_decides_otherwise(self) -> Iterator[float]:
        """The allocator of a service that follows an engine changes on its own; a later answer differs."""
        for service, host in self._mirrors():
            changed = specification_of(host.replica)
            pool = changed.coordinator.pool
            pool.restamp(self._rng.randrange(1, pool.num_blocks))
            pool.stamped.clear()
            host.replica.adopt(changed)
            self._world.record(history.Planted(service.number, host.name))
        yield 0.1

    def service_dies_during_an_image(self) -> Iterator[float]:
        return self._during_an_image(lambda service, _: self._crash(service.process))

    def stream_breaks_during_an_image(self) -> Iterator[float]:
        return self._during_an_image(lambda service, host: self._break_streams(service))

    def _break_streams(self, service: Service) -> None:
        for stream in [one for one in self._world.network.streams if one.server is service.server]:
            stream.cut(client_s=self._rng.random() * 0.1, server_s=self._rng.choice([0.0, 0.05, 1.0]))

    def _during_an_image(self, act) -> Iterator[float]:
        followed = self._mirrors()
        yield from self.service_decides_otherwise()
        for _ in range(100):
            yield 0.004
            for service, host in followed:
                if service.process.alive and host.mirror.wants_image:
                    yield self._rng.random() * 0.02
                    act(service, host)
                    return

    def engine_moves(self) -> Iterator[float]:
        """A mirrored engine stops sending, and attaches to the other service, which adopts the replica."""
        self._world.store.forget_leases()
        for site in self._world.sites.values():
            if isinstance(site.life, MirroredLife) and site.life.process.alive:
                site.life.move()
        yield 0.5


MIRROR_KINDS = {
    act.__name__.replace("_", " "): act
    for act in (
        MirrorChaos.service_decides_otherwise,
        MirrorChaos.service_dies_during_an_image,
        MirrorChaos.stream_breaks_during_an_image,
        MirrorChaos.engine_moves,
    )
}
