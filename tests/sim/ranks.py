"""The rank processes of an engine life; only they write pages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvplane.base.errors import FailedPrecondition, KvplaneError, OtherWriter, SequenceError, Unavailable
from kvplane.base.step import Orders
from kvplane.rank import Rank
from kvplane_worker.lending.writer import ProcessName
from tests.core.page_memory import Launch, WrongPage
from tests.sim import history
from tests.sim.workers import FragileMover

if TYPE_CHECKING:
    from tests.sim.world import Site, World

_ASK_AGAIN_S = 0.05
_LAUNCH_S, _LONG_LAUNCH_S = 0.004, 0.6


@dataclass(frozen=True)
class Claim:
    """Own the memory from the engine's step `next_seq` on; `ahead` and `service` as in history.Claimed, `life` as in
    history.Began.
    """

    epoch: int
    next_seq: int
    ahead: int
    service: int
    life: int


@dataclass(frozen=True)
class Work:
    """Carry out the orders of a step, part by part, then run its launch when it is ready."""

    epoch: int
    seq: int
    orders: tuple[Orders, ...]
    launch: Launch
    lost: frozenset[tuple[int, int]]
    is_ready: Callable[[], bool]
    life: int


@dataclass(frozen=True)
class Unanswered:
    """A launch without an answer; `blocks` are all that it may write to. The last message of an engine life."""

    epoch: int
    blocks: tuple[int, ...]
    launch: Launch


Message: TypeAlias = "Claim | Work | Unanswered"
Reply = Callable[[KvplaneError | None], None]


class RankProcess:
    """Attaches to the memory of its rank when it is free, then processes messages one by one.

    Launches also run one by one, on its device; meanwhile a new engine life may begin and send orders. Zeroes and
    copies run after the launches; stamps may be written earlier.
    """

    def __init__(self, world: World, site: Site, rank: int) -> None:
        self._world, self._site = world, site
        self.process = world.processes.start(f"{site.name} rank {rank}")
        self.memory = site.memories[rank]
        self.place = (site.name, rank, self.memory.table.incarnation)
        self.mover = FragileMover(self.memory.pages, self.process)
        self.attached = False
        self.obeyed = self.launched = (0, 0)  # the last (epoch, step) whose orders are done, or started on the device
        self._done = set[tuple[int, int]]()
        self._queued: list[tuple[int, int]] = []  # launches on the device that have not ended
        self._mail: deque[tuple[Message, Reply]] = deque()
        self._woken = asyncio.Event()
        self.process.spawn(self._main())

    def runs_launch_before(self, epoch: int) -> bool:
        """Whether a launch of an earlier engine life has not ended on the device."""
        return any(begun < epoch for begun, _ in self._queued)

    async def has_attached(self) -> None:
        """Wait until it has attached; raises Unavailable if the rank is dead."""
        while not self.attached:
            if not self.process.alive:
                raise Unavailable("a rank's process died")
            await asyncio.sleep(0.02)

    async def ask(self, message: Message) -> None:
        """Send a message and wait; raises the rank's refusal, Unavailable if the rank is dead."""
        done: asyncio.Future[KvplaneError | None] = asyncio.get_running_loop().create_future()

        def reply(refusal: KvplaneError | None) -> None:
            self._world.network.post(lambda: None if done.done() else done.set_result(refusal))

        while not done.done():
            if not self.process.alive:
                raise Unavailable("a rank's process died")
            self._world.network.post(lambda: self._take(message, reply))
            await asyncio.wait([done], timeout=_ASK_AGAIN_S)
        refusal = done.result()
        if refusal is not None:
            raise refusal

    def _take(self, message: Message, reply: Reply) -> None:
        self._mail.append((message, reply))
        self._woken.set()

    async def _main(self) -> None:
        rng = self._world.rng
        while not self.attached:
            await asyncio.sleep(rng.random() * 0.05)
            try:
                self.memory.writer.lend(ProcessName(self.process.pid, self.process.pid))
                self.attached = True
            except OtherWriter:
                continue  # its process is alive: only its exit frees the pages for another
        rank = Rank(self.memory.table, self.mover)
        while True:
            while not self._mail:
                self._woken.clear()
                await self._woken.wait()
            message, reply = self._mail.popleft()
            try:
                await self._do(rank, message, reply)
            except KvplaneError as error:
                reply(error)

    async def _do(self, rank: Rank, message: Message, reply: Reply) -> None:
        if isinstance(message, Work):
            await self._work(rank, message, reply)
            return
        if isinstance(message, Claim):
            rank.claim(message.epoch, message.next_seq)
            if not self._queued:
                rank.launches_ended()
            self._site.claimed_by[message.epoch] = message.life
            self._world.record(history.Claimed(self.place, message.epoch, message.ahead, message.service))
        else:
            await self._run_alone(rank, message)
        reply(None)

    async def _work(self, rank: Rank, message: Work, reply: Reply) -> None:
        step = message.epoch, message.seq
        if step in self._queued:
            return  # a message that was repeated
        if any(orders.zero_block or orders.copy_src for orders in message.orders):
            await self._idle()
        try:
            for part, orders in enumerate(message.orders):
                self._carry_out(rank, message, part, orders)
        except SequenceError:
            if step not in self._done:  # of a message that was repeated, or overtaken by its repetition
                raise FailedPrecondition("the launch of this step was cut short") from None
            reply(None)
            return
        self._queued.append(step)
        self.obeyed = step
        self._site.evictions.obeyed((message.epoch, message.life, message.seq), self)
        self.process.spawn(self._run(rank, message, reply))

    async def _run(self, rank: Rank, message: Work, reply: Reply) -> None:
        """Run on the device after the previous launch."""
        step = message.epoch, message.seq
        while self._queued[0] != step or not message.is_ready():  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(_LAUNCH_S)
        self.launched = step
        await self._launch(message.launch, set(message.lost))
        self._queued.remove(step)
        if self.memory.table.owner_epoch == message.epoch:
            rank.executed(message.seq)
            self._done.add(step)
            self._world.record(history.Executed(self.place, message.epoch, message.seq))
        elif not self._queued and self._world.rng.random() < 0.5:
            rank.launches_ended()  # or the first step of the new life reports it
        reply(None)

    async def _idle(self) -> None:
        while self._queued:  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(_LAUNCH_S)

    async def _run_alone(self, rank: Rank, message: Unanswered) -> None:
        if (message.epoch, 0) in self._done:
            return  # repeated
        await self._idle()
        rank.invalidate(message.epoch, message.blocks)
        self._done.add((message.epoch, 0))
        self._world.record(history.Invalidated(self.place, message.epoch, message.blocks))
        await self._launch(message.launch, set())

    async def _launch(self, launch: Launch, lost: set[tuple[int, int]]) -> None:
        rng = self._world.rng
        await asyncio.sleep(rng.random() * (_LONG_LAUNCH_S if rng.random() < 0.1 else _LAUNCH_S))
        try:
            self.memory.pages.run(launch, lost)
        except WrongPage as error:
            self._world.record(history.Wrong(f"{self.place}, launch of step {launch.seq}: {error}"))

    def _carry_out(self, rank: Rank, message: Work, part: int, orders: Orders) -> None:
        rank.carry_out(message.epoch, message.seq, part, orders)
        stamped = tuple(zip(orders.stamp_block, orders.stamp, strict=True))
        owner, life = self.memory.table.owner_epoch, message.life
        self._world.record(history.CarriedOut(self.place, message.epoch, owner, message.seq, part, stamped, life))
