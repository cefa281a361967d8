"""An engine in a process of its own that kills or stops itself where it is told to: between any two acts of a step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

import kvplane
from kvplane.base.errors import KvplaneError
from kvplane.base.step import StepResult
from kvplane.rank import PageMover, Rank
from kvplane_worker.engine.batch import Launch
from kvplane_worker.engine.engine import Engine, OpenSession
from kvplane_worker.engine.model import Model, RankModel
from kvplane_worker.engine.ranks import RankMemory
from kvplane_worker.engine.request import Request
from kvplane_worker.engine.scheduler import Scheduled, SchedulerConfig
from tests.engine import child
from tests.worker.children import told

# Where a step can be cut short, in its order.
ASK = "before the step is asked for"
ORDERS = "behind the answer, before its orders"
ZEROES = "between the stamps and the zeroes"
RANKS = "between the orders of two ranks"
LAUNCH = "before the launch"
HALF_LAUNCH = "within the launch, between two ranks of a layer"
ACKNOWLEDGE = "behind the launch, before it is acknowledged"
HALF_ACKNOWLEDGE = "between the acknowledgements of two ranks"
END = "behind the step"
POINTS = (ASK, ORDERS, ZEROES, RANKS, LAUNCH, HALF_LAUNCH, ACKNOWLEDGE, HALF_ACKNOWLEDGE, END)
_HALFWAY = 3  # layer

Reach = Callable[[str], None]


@dataclass
class Trap:
    """Where the process sends itself a signal.

    Attributes:
        point: of POINTS.
        passes: times that the point is passed before.
    """

    point: str
    passes: int
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Work:
    """What an engine is to do: requests as (prompt, most tokens to generate), and a trap on its way."""

    prompts: Sequence[tuple[list[int], int]]
    trap: Trap | None = None


class TrappedRank(Rank):
    def __init__(self, memory: RankMemory, reach: Reach) -> None:
        super().__init__(memory.stamps, TrappedMover(memory.mover, reach))
        self._reach = reach

    def executed(self, seq: int) -> None:
        super().executed(seq)
        self._reach(HALF_ACKNOWLEDGE)


@dataclass
class TrappedMover:
    sound: PageMover
    reach: Reach

    @property
    def num_groups(self) -> int:
        return self.sound.num_groups

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        self.reach(ZEROES)
        self.sound.zero(group, blocks)

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        self.sound.copy(group, src, dst)


@dataclass
class TrappedModel:
    """The last rank of a model."""

    sound: RankModel
    reach: Reach

    def mix(self, number: int, x: Tensor, launch: Launch) -> Tensor:
        if number == _HALFWAY:
            self.reach(HALF_LAUNCH)
        return self.sound.mix(number, x, launch)

    def feed(self, number: int, x: Tensor) -> Tensor:
        return self.sound.feed(number, x)


class TrappedEngine(Engine):
    """Passes the points of each step one by one."""

    def __init__(
        self, open_session: OpenSession, memory: Sequence[RankMemory], model: Model, config: SchedulerConfig
    ) -> None:
        self.trap: Trap | None = None
        super().__init__(open_session, memory, model, config)
        self._ranks = [TrappedRank(one, self.reach) for one in memory]
        model._ranks[-1] = TrappedModel(model._ranks[-1], self.reach)  # type: ignore[call-overload]

    def reach(self, point: str) -> None:
        if self.trap is None or self.trap.point != point:
            return
        self.trap.passes -= 1
        if self.trap.passes < 0:
            number, self.trap = self.trap.signal, None
            os.kill(os.getpid(), number)

    def step(self) -> list[Request]:
        self.reach(ASK)
        finished = super().step()
        self.reach(END)
        return finished

    def _carry_out(self, answer: StepResult) -> None:
        self.reach(ORDERS)
        every = self._ranks
        for rank in every:
            self._ranks = [rank]
            super()._carry_out(answer)
            self.reach(RANKS)
        self._ranks = every

    def _compute(self, scheduled: list[Scheduled]) -> None:
        self.reach(LAUNCH)
        super()._compute(scheduled)
        self.reach(ACKNOWLEDGE)


def engine(connection: Connection, address: str, replica: str, workers: list[str]) -> None:
    """As `tests.engine.child.engine`, for Work. A refusal is said, and ends the process."""
    torch.set_num_threads(1)
    try:
        with kvplane.connect(address) as client:
            served = child.begin(client, replica, workers, TrappedEngine)
            assert isinstance(served, TrappedEngine)
            connection.send(served.kept_keys)
            with contextlib.suppress(EOFError):
                while True:
                    work: Work = connection.recv()
                    served.trap = work.trap
                    child.serve(connection, served, list(work.prompts))
                    served.trap = None
    except KvplaneError as error:
        connection.send(told(error))
