"""One life of an engine: a scheduler that does everything at random, and its ranks, each in a process of its own.

attach → read stamps → open the session → claim every rank → steps, several launches in flight → close, or die
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplane.aio.session import Session
from kvplane.base.errors import FailedPrecondition, NotFound, OtherWriter, StaleEpoch, Unavailable
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import Stamp
from kvplane.base.step import UNCHANGED, Facts, News, Part, Resume, StepResult
from kvplane.rank import RankGroup
from kvplane.retry import RetryPolicy
from kvplane.revival import Revival
from kvplane.rows import ResumeRow, resume_of
from tests.core.builders import tokens
from tests.core.page_engine import MOST_IN_FLIGHT, RandomScheduler, Request
from tests.core.page_memory import Launch, Row, WrongPage
from tests.sim import history
from tests.sim.ranks import Claim, RankProcess, Work
from tests.sim.service import ADDRESS
from tests.sim.transport import SimTransport

if TYPE_CHECKING:
    from tests.sim.world import Site, World

_THINK_S = 0.04
_ATTEMPTS = 40
# Ways for a life to end that faults explain: the service or a rank is gone, a newer life has the replica.
EXPLAINED = (Unavailable, StaleEpoch, OtherWriter, NotFound, FailedPrecondition)


class SentTransport(SimTransport):
    """Remembers the service's number of the last step that was sent."""

    sent_seq = 0

    async def send(self, step) -> None:
        self.sent_seq = step.seq
        await super().send(step)


class EngineLife(RandomScheduler):
    """From its start to its end, whoever ends it. `steps` are those that were answered."""

    def __init__(self, world: World, site: Site) -> None:
        self.world, self.site = world, site
        self.process = world.processes.start(f"{site.name} scheduler")
        self.ranks = [RankProcess(world, site, rank) for rank in range(history.RANKS)]
        self.process.on_death.append(self._end_ranks)
        self.epoch = self.steps = 0
        self.queue: list[Launch] = []  # answered steps whose ranks have not finished, in order
        self._busy = False  # the first of them is with the ranks
        self._lane, self._work = asyncio.Event(), asyncio.Event()  # some of the queue is done; there may be more to do
        self._brackets: dict[int, dict[int, int]] = {}
        self._has_lost = False
        self._corrected = set[int]()  # slots whose pages may hold less than the requests have computed
        super().__init__(site.texts, [rank.memory.pages for rank in self.ranks], world.rng, site.most_drafts)
        self._group = RankGroup([rank.memory.table for rank in self.ranks])
        self.incarnation = self._group.incarnation
        self.process.spawn(self._main())

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
        self._transport = SentTransport(self.world.network, ADDRESS, self.site.name)
        rng = self.rng
        request = OpenRequest(
            self.site.name,
            rng.getrandbits(64),
            stamp_table=self._group.agreed_stamps(),
            incarnation=self._group.incarnation,
        )
        retry = RetryPolicy(_ATTEMPTS, jitter=rng.random)
        nonces = lambda: rng.getrandbits(64)  # noqa: E731
        self.session = Session(self._transport, request, retry=retry, nonces=nonces, revive=self._revive)
        await self.session.open()
        await self._claim(self.session.next_seq, 0)
        self.process.spawn(self._launch_all())
        while not self.world.is_finishing:
            if not self.failed and len(self.pending) > self._busy and self._chance(4):
                self._fail()
            await self._step(self.plan())
            await asyncio.sleep(rng.random() * _THINK_S)
        await self._end_all()

    async def _step(self, parts: list[Part]) -> StepResult:
        answer = await self.session.apply(*parts, executed_through=self.told)
        made = self.session.epoch != self.epoch
        if made:
            self._has_lost = False
            await self._claim(answer.seq, answer.seq - self._transport.sent_seq)
        else:
            seq = self._transport.sent_seq
            fingerprint = history.fingerprint(answer.parts)
            self.world.tell(history.Answered(self.site.name, self.epoch, seq, answer.part, fingerprint))
        self.settle(parts, answer.parts)
        self._check_tables()
        self.queue.append(self.pending[-1])
        self._work.set()
        self._note_progress()
        self.steps += 1
        self.world.note_step()
        while len(self.queue) >= MOST_IN_FLIGHT:
            self._lane.clear()
            await self._lane.wait()
        return answer

    async def _end_all(self) -> None:
        """End every request, and let everything run: then all blocks must be free."""
        answer = await self._step(self.plan_end())
        for _ in range(2):
            while self.queue:
                self._lane.clear()
                await self._lane.wait()
            answer = await self._step(self.plan_end())
        pool = self.world.service.registry.get(self.site.name).host.replica.coordinator.pool
        usable = self.spec.num_blocks - 1 - len(pool.reserved)
        self.world.tell(history.Emptied(self.site.name, answer.parts[-1].free_blocks, usable))
        await self.session.close()
        self.site.is_finished = True

    async def _claim(self, next_seq: int, ahead: int) -> None:
        self.epoch = self.session.epoch
        for rank in self.ranks:
            await rank.ask(Claim(self.epoch, next_seq, ahead))

    def _end_ranks(self) -> None:
        """Ranks notice the death of their scheduler, each in its own time."""
        for rank in self.ranks:
            asyncio.get_running_loop().call_later(self.world.draw_linger_s(), rank.process.kill)

    # -- launches ----------------------------------------------------------------------------------------------------

    async def _launch_all(self) -> None:
        """Give the ranks one step after the other. What follows a failed step waits until the failure is told."""
        try:
            while True:
                while not self.queue or self.failed:
                    self._work.clear()
                    await self._work.wait()
                self._busy = True
                launch = self.queue[0]
                work = self._work_of(launch)
                await asyncio.gather(*(rank.ask(work) for rank in self.ranks))
                self._busy = False
                self.queue.pop(0)
                self._note_progress()
        except EXPLAINED as error:
            self.world.note_end(self, error)
            self.process.kill()

    def _work_of(self, launch: Launch) -> Work:
        runs = launch in self.pending
        orders = tuple(launch.orders)
        rows = Launch(launch.seq, [], launch.rows if runs else [])
        return Work(self.epoch, launch.seq, orders, rows, frozenset(self.lost))

    def _fail(self) -> None:
        self.fail(int(self._busy))

    def plan(self) -> list[Part]:
        self._corrected = set()
        return super().plan()

    def _row(self, facts: Facts, slot: int, *given: Any, **named: Any) -> None:
        super()._row(facts, slot, *given, **named)
        if facts.computed[-1] != UNCHANGED:
            self._corrected.add(slot)

    def _note_progress(self) -> None:
        self.launched = self.queue[0].seq - 1 if self.queue else self.seq
        self.pending = [launch for launch in self.pending if launch in self.queue]
        self._lane.set()

    # -- after a restart of the service ------------------------------------------------------------------------------

    def _revive(self) -> Revival:
        """Quiesce, then say what there is."""
        dropped = {row.life for launch in self.queue[int(self._busy) :] for row in launch.rows}
        if dropped or self.failed or self.lost:
            self._has_lost = True  # until the service has preempted everybody
        del self.queue[int(self._busy) :]
        for request in self.requests.values():
            request.checked *= request.life not in dropped  # what a transfer may find of it
        self.pending = [launch for launch in self.pending if launch in self.queue]
        if self._busy:
            raise Unavailable("a launch is running")
        self.failed, self.lost = [], set()
        for slot, request in self.requests.items():
            if request.is_held:
                self._bracket(slot, request)
            elif request.load is not None:
                request.load = request.tables = None
                self._corrected.add(slot)  # its pages hold less than it counts
        told = {slot: one for slot, one in self.requests.items() if not one.is_held}
        news = News(
            slot=list(told),
            num_tokens=[one.known for one in told.values()],
            tokens=[token for one in told.values() for token in tokens(one.script[: one.known])],
        )
        running = tuple(slot for slot, one in told.items() if one.running)
        held = tuple(slot for slot, one in self.requests.items() if one.is_held)
        resume = None if self._has_lost or self._chance(20) else self._resume(running)
        return Revival(self._group.agreed_stamps(), self._group.incarnation, news, running, held, resume)

    def _resume(self, running: tuple[int, ...]) -> Resume:
        """Who runs on with its blocks: all whose pages hold what they have computed, and nothing that is a guess."""
        kept = [slot for slot in running if not (self.requests[slot].drafts or slot in self._corrected)]
        rows = [(slot, self.requests[slot]) for slot in kept]
        return resume_of([ResumeRow(slot, one.computed, self._tables(slot), one.known) for slot, one in rows])

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _end_load(self, request: Request) -> int:
        self._check_owner()
        return super()._end_load(request)

    def _check_owner(self) -> None:
        """Transfers go through the workers, which look."""
        for rank in self.ranks:
            rank.memory.table.check_owner(self.epoch)

    def _bracket(self, slot: int, request: Request) -> None:
        """The service that held these pages has gone: what a transfer still reads is of these stamps, or is nothing."""
        assert request.tables is not None
        stamps = self._group.agreed_stamps()
        now = {block: stamps[block] for table in request.tables for block in table}
        self._brackets.setdefault(slot, now)  # of the first service that has gone: the pages are others' since

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
            self.world.tell(history.Moved(self.site.name, True))
        except WrongPage:
            self.world.tell(
                history.Lost(self.site.name, slot) if bracket is None else history.Moved(self.site.name, False)
            )

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _admitted(self, slot: int, hit: int, granted: int) -> Row:
        row = super()._admitted(slot, hit, granted)
        if hit:
            self.world.tell(history.Hit(self.site.name, hit, self._is_across(slot, hit)))
        return row

    def _is_across(self, slot: int, hit: int) -> bool:
        """Whether pages of the hit were written under an earlier service."""
        table, begun_by = self.ranks[0].memory.table, self.site.begun_by
        ends = [-(-hit // group.block_size) for group in self.spec.groups]
        adopted = {block for group, end in enumerate(ends) for block in self.tables[slot][group][:end]} - {0}
        epochs = {Stamp.unpack(table.read(block)).epoch for block in adopted}
        return any(begun_by.get(epoch) != begun_by[self.epoch] for epoch in epochs if epoch)

    def _check_tables(self) -> None:
        """The engine's tables are the service's, but for what left a window."""
        host = self.world.service.registry.get(self.site.name).host if self.world.service.process.alive else None
        if host is None or host.epoch != self.epoch or host.seq != self._transport.sent_seq:
            return
        for slot, request in self.requests.items():
            if not request.running:
                continue
            for mine, theirs in zip(self.tables[slot], host.replica.coordinator.tables(slot), strict=True):
                pairs = zip(mine, theirs, strict=False)
                if len(mine) != len(theirs) or any(block not in (0, own) for own, block in pairs):
                    self.world.tell(history.Broken(f"{self.site.name}, slot {slot}: {mine} here, {theirs} there"))
