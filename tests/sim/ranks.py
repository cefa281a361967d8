"""The processes of an engine life beside its scheduler: one per rank, which alone write the pages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplane.base.errors import FailedPrecondition, KvplaneError, OtherWriter, SequenceError, Unavailable
from kvplane.base.step import Orders
from kvplane.rank import Rank
from kvplane_worker.writer import ProcessName
from tests.core.page_memory import Launch, WrongPage
from tests.sim import history
from tests.sim.workers import FragileMover

if TYPE_CHECKING:
    from tests.sim.world import Site, World

_ASK_AGAIN_S = 0.05
_LAUNCH_S = 0.004


@dataclass(frozen=True)
class Claim:
    """Own the memory from the engine's step `next_seq` on; `ahead` as in history.Claimed."""

    epoch: int
    next_seq: int
    ahead: int


@dataclass(frozen=True)
class Work:
    """Obey the orders of a step, part by part, then run its launch."""

    epoch: int
    seq: int
    orders: tuple[Orders, ...]
    launch: Launch
    lost: frozenset[tuple[int, int]]


Reply = Callable[[KvplaneError | None], None]


class RankProcess:
    """Attaches to the memory of its rank when nobody else has it, then does what it is told, one by one."""

    def __init__(self, world: World, site: Site, rank: int) -> None:
        self._world, self._site = world, site
        self.process = world.processes.start(f"{site.name} rank {rank}")
        self.memory = site.memories[rank]
        self.place = (site.name, rank, self.memory.table.incarnation)
        self.mover = FragileMover(self.memory.pages, self.process)
        self.attached = False
        self._done = set[tuple[int, int]]()
        self._mail: deque[tuple[Claim | Work, Reply]] = deque()
        self._woken = asyncio.Event()
        self.process.spawn(self._main())

    async def has_attached(self) -> None:
        """Wait for it; raises Unavailable when the rank is dead."""
        while not self.attached:
            if not self.process.alive:
                raise Unavailable("a rank's process died")
            await asyncio.sleep(0.02)

    async def ask(self, message: Claim | Work) -> None:
        """Have it done; raises what the rank refused it for, Unavailable when the rank is dead."""
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

    def _take(self, message: Claim | Work, reply: Reply) -> None:
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
                continue  # its process lives: nothing but its end gives the pages to another
        rank = Rank(self.memory.table, self.mover)
        while True:
            while not self._mail:
                self._woken.clear()
                await self._woken.wait()
            message, reply = self._mail.popleft()
            try:
                await self._do(rank, message)
            except KvplaneError as error:
                reply(error)
            else:
                reply(None)

    async def _do(self, rank: Rank, message: Claim | Work) -> None:
        if isinstance(message, Claim):
            rank.claim(message.epoch, message.next_seq)
            self._world.tell(history.Claimed(self.place, message.epoch, message.ahead))
            return
        try:
            for part, orders in enumerate(message.orders):
                self._carry_out(rank, message, part, orders)
        except SequenceError:
            if (message.epoch, message.seq) in self._done:
                return  # a message that was repeated, or overtaken by its repetition
            raise FailedPrecondition("the launch of this step was cut short") from None
        await asyncio.sleep(self._world.rng.random() * _LAUNCH_S)
        try:
            self.memory.pages.run(message.launch, set(message.lost))
        except WrongPage as error:
            self._world.tell(history.Wrong(f"{self.place}, launch of step {message.seq}: {error}"))
        rank.executed(message.seq)
        self._done.add((message.epoch, message.seq))
        self._world.tell(history.Executed(self.place, message.epoch, message.seq))

    def _carry_out(self, rank: Rank, message: Work, part: int, orders: Orders) -> None:
        rank.carry_out(message.epoch, message.seq, part, orders)
        stamped = tuple(zip(orders.stamp_block, orders.stamp, strict=True))
        owner = self.memory.table.owner_epoch
        self._world.tell(history.CarriedOut(self.place, message.epoch, owner, message.seq, part, stamped))
