"""One engine life: a scheduler that makes random choices, and its ranks, each in a process of its own.

attach → read stamps → open the session → claim every rank → steps, several launches in flight → close, or die
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplane.aio.session import Session
from kvplane.base.errors import FailedPrecondition, NotFound, OtherWriter, StaleEpoch, Unavailable
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import Stamp
from kvplane.base.step import UNCHANGED, Facts, News, Part, PartResult, Resume, StepResult
from kvplane.rank import RankGroup
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.reopening import Revival
from kvplane.session.rows import ResumeRow, resume_of
from kvplane_service.replicas.host import ReplicaHost
from tests.core.builders import tokens
from tests.core.page_memory import Launch, Row, WrongPage
from tests.core.page_requests import PlannedRow, Request, Transfer
from tests.core.page_scheduler import MOST_IN_FLIGHT, RandomScheduler
from tests.core.specification import specification_of
from tests.sim import history
from tests.sim.network import Server
from tests.sim.ranks import Claim, RankProcess, Unanswered, Work
from tests.sim.retaining import retain_some
from tests.sim.transport import SentTransport
from tests.sim.unanswered import blocks_of, rows_of

if TYPE_CHECKING:
    from tests.sim.world import Site, World

_THINK_S = 0.04
_LOOK_S = 0.004
_PIECE_S = 0.05  # between the pieces of a transfer
_ATTEMPTS = 40
_PATIENCE_S = (None, None, 0.2, 1.0)  # for an unanswered step
# Ends of a life that faults explain: the service or a rank has died, a newer life has the replica.
EXPLAINED = (Unavailable, StaleEpoch, OtherWriter, NotFound, FailedPrecondition)


class EngineLife(RandomScheduler):
    """One engine life, from start to end. `steps` are the answered ones."""

    loads = 40  # so that some run when an engine dies

    def __init__(self, world: World, site: Site) -> None:
        self.world, self.site = world, site
        self.process = world.processes.start(f"{site.name} scheduler")
        self.ranks = [RankProcess(world, site, rank) for rank in range(history.RANKS)]
        self.process.on_death.append(self._end_ranks)
        self.process.on_death.append(self._leave_movers)
        self.epoch = self.steps = 0
        self.queue: list[Launch] = []  # answered steps whose ranks have not finished, in order
        self._busy = 0  # number of these that were sent to the ranks
        self._lane, self._work = asyncio.Event(), asyncio.Event()  # part of the queue is processed; more may follow
        self._claimed_for: Server | None = None  # service that began the life that claimed the ranks
        self._left: list[Launch] = []  # launches that ran when the next engine life began
        self._owner_shown = 0  # from the ranks' tables, before the session was opened
        self._brackets: dict[int, dict[int, int]] = {}
        self._has_lost = False
        self._last_part: dict[int, int] = {}  # of step results
        self._corrected = set[int]()  # slots moved back in the last step: windows may have freed those pages
        self._unloaded = set[tuple[int, int]]()  # stays whose load was abandoned
        self._emptied: dict[int, tuple[set[int], int]] = {}  # blocks evicted or reset, by step; see _spoil
        self._newest_stamp = 0  # of the results, and of the memory before
        super().__init__(site.texts, [rank.memory.pages for rank in self.ranks], world.rng, site.most_drafts)
        self._group = RankGroup([rank.memory.table for rank in self.ranks])
        self.incarnation = self._group.incarnation
        self._patience_s = world.rng.choice(_PATIENCE_S)
        self._stamps_ahead = world.rng.random() < 0.5  # ranks carry out a step while the launch before it runs
        self._transport = SentTransport(world.network, world.draw_owners(), site.name)
        self._transport.heeds_notices = world.rng.random() < 0.75
        self.process.spawn(self._main())

    @property
    def server(self) -> Server | None:
        """The service process of the current or last session."""
        return self._transport.server

    # -- from start to end -------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        try:
            await self._live()
        except EXPLAINED as error:
            self.world.note_end(self, error)
        self.process.kill()

    async def _live(self) -> None:
        for rank in self.ranks:
            await rank.has_attached()
        rng = self.rng
        request = OpenRequest(
            self.site.name,
            rng.getrandbits(64),
            stamp_table=self._group.agreed_stamps(),
            incarnation=self._group.incarnation,
            disk_incarnation=self._group.disk_incarnation,
            busy_blocks=self.site.busy_blocks(),
            owner_epoch=self._owner_epoch(),
        )
        retry = RetryPolicy(_ATTEMPTS, jitter=rng.random)
        nonces = lambda: rng.getrandbits(64)  # noqa: E731
        self.session = Session(self._transport, request, retry=retry, nonces=nonces, revive=self._revive)
        await self.session.open()
        await self._claim(self.session.next_seq, 0)
        self._launching = self.process.spawn(self._launch_all())
        self.process.spawn(self._load_all())
        if self.site.retains:
            self.process.spawn(retain_some(self))
        while not self.world.is_finishing:
            if not self.failed and len(self.pending) > self._busy and self._chance(4):
                self._fail()
            await self._step(self.plan())
            await asyncio.sleep(rng.random() * _THINK_S)
        await self._end_all()

    async def _step(self, parts: list[Part]) -> StepResult:
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await self.session.apply(*parts, executed_through=self.executed_through)
        except TimeoutError:
            await self._run_alone()
            raise Unavailable("a step was not answered") from None
        made = (self.session.epoch, self.server) != (self.epoch, self._claimed_for)
        if made:
            self._has_lost = False
            await self._claim(answer.seq, answer.seq - self._transport.sent_seq)
        else:
            seq = self._transport.sent_seq
            fingerprint = history.fingerprint(answer.parts)
            self.world.record(history.Answered(self.site.name, self.epoch, seq, answer.part, fingerprint))
        await self._take_result(parts, answer)
        return answer

    async def _take_result(self, parts: list[Part], answer: StepResult) -> None:
        """Give the launch of a step to the ranks; wait while too many are in flight."""
        self._last_part[answer.seq] = answer.part + len(answer.parts) - 1
        used = self._used()
        self.take_answer(parts, answer.parts)
        self._check_tables()
        self.queue.append(self.pending[-1])
        self._emptied[answer.seq] = self._evicted_by(parts, answer.parts) - used, self._note_stamps(answer.parts)
        self._work.set()
        self._note_progress()
        self.steps += 1
        self.world.note_step()
        while len(self.queue) >= MOST_IN_FLIGHT:
            self._lane.clear()
            await self._lane.wait()

    async def _end_all(self) -> None:
        """End every request and wait for all launches: then all blocks must be free."""
        while self.site.busy_blocks():  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(_THINK_S)
        answer = await self._step(self.plan_end())
        for _ in range(2):
            while self.queue:
                self._lane.clear()
                await self._lane.wait()
            answer = await self._step(self.plan_end())
        self.world.record(history.Emptied(self.site.name, answer.parts[-1].free_blocks, self.site.usable))
        await self.session.close()
        self.site.is_finished = True

    async def _claim(self, next_seq: int, ahead: int) -> None:
        self.epoch, self._claimed_for = self.session.epoch, self.server
        refused = self.session.resume_refused
        if refused is not None and "alone in its step" in refused.message:
            self.world.record(history.Broken(f"{self.site.name}: rows of callers joined an image: {refused}"))
        self.world.record(history.Opened(self.site.name, self.epoch, self._owner_shown))
        self._newest_stamp = max(stamp for rank in self.ranks for stamp in rank.memory.table.read_all())
        for rank in self.ranks:
            await rank.ask(Claim(self.epoch, next_seq, ahead, self._service, self._life))

    def _owner_epoch(self) -> int:
        """Owner epoch of the tables, read after the stamps."""
        self._owner_shown = self._group.owner_epoch
        return self._owner_shown

    @property
    def _service(self) -> int:
        """Number of the service process that began this engine life."""
        assert self._claimed_for is not None
        return self._claimed_for.process.pid

    @property
    def _decided_as(self) -> tuple[int, int, int]:
        """The service's name of the last answered step."""
        return self._service, self.epoch, self._transport.sent_seq

    @property
    def _life(self) -> int:
        """The nonce of the opening that began this engine life."""
        return self.session.life_nonce

    def _end_ranks(self) -> None:
        """Ranks notice the death of their scheduler, each after a random delay."""
        for rank in self.ranks:
            asyncio.get_running_loop().call_later(self.world.draw_linger_s(), rank.process.kill)

    # -- launches ----------------------------------------------------------------------------------------------------

    async def _launch_all(self) -> None:
        """Send steps to the ranks in order. Steps after a failed one wait until the failure is reported."""
        self._running = self.process.spawn(asyncio.sleep(0))
        while True:
            while len(self.queue) <= self._busy or self.failed:
                self._work.clear()
                await self._work.wait()
            launch = self.queue[self._busy]
            self._busy += 1
            self._running = self.process.spawn(self._launch(launch, self._running))
            step, look_s = (self.epoch, launch.seq), _LOOK_S if self._stamps_ahead else None
            while not (self._running.done() or (look_s and all(rank.obeyed == step for rank in self.ranks))):
                await asyncio.wait([self._running], timeout=look_s)

    async def _launch(self, launch: Launch, before: asyncio.Task[None]) -> None:
        try:
            work = self._work_of(launch)
            await asyncio.gather(before, *(rank.ask(work) for rank in self.ranks))
        except EXPLAINED as error:
            self.world.note_end(self, error)
            self.process.kill()
        else:
            self._busy -= 1
            self._spoil(*self._emptied.pop(launch.seq, (set(), 0)))
            self.queue.remove(launch)
            self._note_progress()

    def _evicted_by(self, parts: list[Part], answers: list[PartResult]) -> set[int]:
        given = zip(parts, answers, strict=True)
        gone = {b for part, of in given for b in (range(self.spec.num_blocks) if of.reset_done else part.cache.evicted)}
        gone |= self.site.evictions.blocks.get(self._decided_as, set())  # of operators too
        return gone - self._used() if gone else gone  # a request registers its blocks again

    def _note_stamps(self, answers: list[PartResult]) -> int:
        """Record the newest stamps of these results."""
        self._newest_stamp = max([self._newest_stamp, *(stamp for of in answers for stamp in of.orders.stamp)])
        return self._newest_stamp

    def _spoil(self, blocks: set[int], newest_stamp: int) -> None:
        """Overwrite pages that were evicted or reset: once every rank has their stamps, no look-up may find them.

        Excludes pages that a request, a launch or a transfer has, or had when they were evicted, because they may be
        registered again; and pages that were allocated since, which have a later stamp.
        """
        if blocks:
            tables = [rank.memory.table for rank in self.ranks]
            blocks = {block for block in blocks if max(table.read(block) for table in tables) <= newest_stamp}
            for rank in self.ranks:
                for block in blocks - self._used():
                    rank.memory.pages.pages.pop(block, None)

    def _used(self) -> set[int]:
        tables: list[Sequence[Sequence[int]]] = [self.tables[slot] for slot in self.requests if slot in self.tables]
        tables += [one.tables for one in self.requests.values() if one.tables is not None]
        tables += [row.tables for launch in [*self.queue, *self._left] for row in launch.rows]
        orders = [one for launch in self.queue for one in launch.orders]
        copied = {block for one in orders for block in (*one.copy_src, *one.copy_dst)}
        return copied.union(self.site.busy_blocks(), *(table for of in tables for table in of))

    def _work_of(self, launch: Launch) -> Work:
        runs = launch in self.pending
        orders = tuple(launch.orders)
        rows = Launch(launch.seq, [], launch.rows if runs else [])
        is_ready = partial(self._is_ready, rows)
        return Work(self.epoch, launch.seq, orders, rows, frozenset(self.lost_at(launch.seq)), is_ready, self._life)

    def _is_ready(self, launch: Launch) -> bool:
        """Whether a launch may start: one after a load waits for it, and the load for the orders of all ranks."""
        rows = [row for row in launch.rows if isinstance(row, PlannedRow) and row.count and not row.is_resolved]
        return all(row.load is None or row.load.given_up or self._may_start(row.load) for row in rows)

    async def _run_alone(self) -> None:
        """Launch without an answer once all earlier launches have run; this ends the engine life."""
        while self.queue and not (self.failed or self.lost):
            self._lane.clear()
            await self._lane.wait()
        can = {slot: one for slot, one in self.requests.items() if one.running and self._is_sound(one)}
        rows = rows_of(self.spec.groups, list(can.values()), [self._tables(slot) for slot in can], self.rng)
        if self.queue or not rows:
            return
        self.world.record(history.Fault("launch without an answer"))
        blocks = tuple(blocks_of(self.spec.groups, rows))
        work = Unanswered(self.epoch, blocks, Launch(self.seq, [], rows))
        await asyncio.gather(*(rank.ask(work) for rank in self.ranks))

    def _fail(self) -> None:
        self.fail(self._busy)

    def plan(self) -> list[Part]:
        self._corrected = set()
        return super().plan()

    def _row(self, facts: Facts, slot: int, *given: Any, **named: Any) -> None:
        super()._row(facts, slot, *given, **named)
        if facts.computed[-1] != UNCHANGED:
            self._corrected.add(slot)

    def plan_end(self) -> list[Part]:
        (part,) = super().plan_end()
        part.cache.loads_over = list(self.session.busy_blocks)
        return [part]

    def _note_progress(self) -> None:
        self.launched = self.queue[0].seq - 1 if self.queue else self.seq
        self.pending = [launch for launch in self.pending if launch in self.queue]
        self._lane.set()

    # -- after a restart of the service ------------------------------------------------------------------------------

    def _revive(self) -> Revival:
        """State to reopen the session with, with nothing waiting to be launched; a running launch may continue."""
        if self._busy == 1 and self._may_leave_launch():
            self._left.append(self.queue[0])
            self._launching.cancel()
            self._running.cancel()  # nothing waits for the launch any more; it runs to its end
            self._launching, self._busy = self.process.spawn(self._launch_all()), 0
        dropped = {row.life for launch in self.queue[self._busy :] for row in launch.rows}
        if dropped or self.failed or self.lost:
            self._has_lost = True  # until the service has preempted all requests
        del self.queue[self._busy :]
        for request in self.requests.values():
            request.checked *= request.life not in dropped  # what a transfer may read of it
        self.pending = [launch for launch in self.pending if launch in self.queue]
        if self._busy:
            raise Unavailable("a launch is running, or waits")
        self.failed, self.lost = [], {}
        for slot, request in self.requests.items():
            self._give_up(request, keeps_tables=request.is_held)
            if request.is_held:
                self._bracket(slot, request)
        live = {slot: one for slot, one in self.requests.items() if not one.is_held}
        news = News(
            slot=list(live),
            num_tokens=[one.known for one in live.values()],
            tokens=[token for one in live.values() for token in tokens(one.script[: one.known].lower())],
            domain=[one.domain for one in live.values()],
        )
        running = tuple(slot for slot, one in live.items() if one.running)
        held = tuple(slot for slot, one in self.requests.items() if one.is_held)
        resume = None if self._has_lost or self._chance(20) else self._resume(running)
        stamps, busy = self._group.agreed_stamps(), self.site.busy_blocks()
        return Revival(
            stamps,
            self._group.incarnation,
            news,
            running,
            held,
            resume,
            busy,
            self._owner_epoch(),
            self._group.disk_incarnation,
        )

    def _may_leave_launch(self) -> bool:
        """Whether the first launch runs on every rank: after it the requests could continue."""
        step = self.epoch, self.queue[0].seq
        return all(rank.launched == step for rank in self.ranks) and self._chance(80)

    def _resume(self, running: tuple[int, ...]) -> Resume:
        """The image: requests whose pages hold their computed tokens and no unverified drafts."""
        kept = [(slot, self.requests[slot]) for slot in running if self._is_sound(self.requests[slot])]
        return resume_of([self._resume_row(slot, one) for slot, one in kept])

    def _resume_row(self, slot: int, request: Request) -> ResumeRow:
        assert request.truth is not None
        end = max(request.computed, request.truth.left.planned)
        return ResumeRow(slot, request.computed, self._tables(slot), request.known, end)

    def _is_sound(self, request: Request) -> bool:
        """Whether, after all launches, the pages hold the request's computed tokens and no unverified drafts."""
        there = request.load is None and not request.is_held and not request.rows and request.life not in self.lost
        there = there and request.life[0] not in self._corrected and request.life not in self._unloaded
        return there and request.truth is not None and request.truth.end == request.computed > 0

    # -- transfers ---------------------------------------------------------------------------------------------------

    async def _load_all(self) -> None:
        """Transfers write in pieces, as early as permitted."""
        while True:
            await asyncio.sleep(self.rng.random() * _PIECE_S)
            for request in list(self.requests.values()):
                load = request.load
                if load is not None and not load.is_done and self._may_start(load):
                    self._check_previous_life()
                    load.write(self.rng.randint(1, 6))

    def _may_start(self, load: Transfer) -> bool:
        """Whether the workers and all ranks permit the transfer."""
        try:
            part = self._last_part.get(load.seq, 0)
            return load.seq in self._last_part and self._group.may_load(self.epoch, load.seq, part, load.after)
        except StaleEpoch:
            return False

    def _check_previous_life(self) -> None:
        """No launch of the previous life runs while a load writes, whichever blocks they use."""
        if any(rank.runs_launch_before(self.epoch) for rank in self.ranks):
            self.world.record(history.Wrong(f"{self.site.name}: a load starts during a launch of the previous life"))

    def _finish_load(self, request: Request) -> None:
        self._check_owner()
        if request.load is not None and not request.load.is_done:
            self._check_previous_life()
        super()._finish_load(request)

    def _give_up(self, request: Request, keeps_tables: bool = False) -> None:
        tables = request.tables
        if request.load is not None:
            self._unloaded.add(request.life)  # its pages hold fewer tokens than it counts
        super()._give_up(request)
        if keeps_tables:
            request.tables = tables

    def _leave_movers(self) -> None:
        """Transfers that have started continue without their engine."""
        loads = [request.load for request in self.requests.values() if request.load is not None]
        for load in loads:
            if load.at > load.first and not load.is_done:
                self.site.leave_mover(load, self.world)

    def _loads_over(self) -> list[int]:
        busy = set(self.site.busy_blocks())
        return [block for block in self.session.busy_blocks if block not in busy and self._chance(70)]

    def _check_owner(self) -> None:
        """Check the owner epoch, as the workers do for transfers."""
        for rank in self.ranks:
            rank.memory.table.check_owner(self.epoch)

    def _bracket(self, slot: int, request: Request) -> None:
        """The service that held these pages has died: a transfer may use only bytes read under these stamps."""
        assert request.tables is not None
        stamps = self._group.agreed_stamps()
        now = {block: stamps[block] for table in request.tables for block in table}
        self._brackets.setdefault(slot, now)  # of the first service that died: the pages may be reallocated since

    def _read_held(self, request: Request) -> None:
        self._check_owner()
        slot = request.life[0]
        bracket = self._brackets.pop(slot, None)
        try:
            if bracket is None:
                super()._read_held(request)
                return
            stamps = self._group.agreed_stamps()
            assert request.tables is not None
            same = [[block * (bracket[block] == stamps[block] != 0) for block in table] for table in request.tables]
            super()._read_held(replace(request, tables=same))
            self.world.record(history.Moved(self.site.name, True))
        except WrongPage:
            self.world.record(
                history.Lost(self.site.name, slot) if bracket is None else history.Moved(self.site.name, False)
            )

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _admitted(self, slot: int, hit: int, granted: int) -> Row:
        row = super()._admitted(slot, hit, granted)
        if hit:
            self.world.record(history.Hit(self.site.name, hit, self._is_across(slot, hit)))
        return row

    def _is_across(self, slot: int, hit: int) -> bool:
        """Whether pages of the hit were written during an earlier service life."""
        table, begun_by = self.ranks[0].memory.table, self.site.begun_by
        ends = [-(-hit // group.block_size) for group in self.spec.groups]
        adopted = {block for group, end in enumerate(ends) for block in self.tables[slot][group][:end]} - {0}
        epochs = {Stamp.unpack(table.read(block)).epoch for block in adopted}
        return any(begun_by.get(epoch) != begun_by[self.epoch] for epoch in epochs if epoch)

    def _host(self) -> ReplicaHost | None:
        """The host in the service that has the session, if it is alive."""
        service = self.world.service_behind(self._transport.server)
        known = service is not None and self.site.name in service.registry
        return service.registry.get(self.site.name).host if service is not None and known else None

    def _check_tables(self) -> None:
        """Compare the engine's tables with the service's, except for blocks that left a window."""
        host = self._host()
        if host is None or host.epoch != self.epoch or host.seq != self._transport.sent_seq:
            return
        for slot, request in self.requests.items():
            if not request.running:
                continue
            tables = specification_of(host.replica).coordinator.tables(slot)
            for mine, theirs in zip(self.tables[slot], tables, strict=True):
                pairs = zip(mine, theirs, strict=False)
                if len(mine) != len(theirs) or any(block not in (0, own) for own, block in pairs):
                    self.world.record(history.Broken(f"{self.site.name}, slot {slot}: {mine} here, {theirs} there"))
