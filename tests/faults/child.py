"""An engine in a child process that kills or stops itself at a given point of a step."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor

import kvplane
from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.job_table import JobTable
from kvplane.base.step import Cache, End, Part, PartResult, StepResult
from kvplane.blocking.session import Session
from kvplane.rank import Moves, PageMover, Rank
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_worker.attach import attach
from kvplane_worker.pages import PageBuffers
from tests.engine import child
from tests.engine.reference.batch import Launch
from tests.engine.reference.config import ModelConfig
from tests.engine.reference.engine import Engine, OpenSession
from tests.engine.reference.model import Model, RankModel
from tests.engine.reference.ranks import RankMemory
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import Scheduled, SchedulerConfig
from tests.worker.children import picklable

# Points of a step where the process can be killed or stopped, in order.
ASK = "before the step is asked for"
ORDERS = "behind the answer, before its orders"
ZEROES = "between the stamps and the zeroes"
RANKS = "between the orders of two ranks"
JOBS = "between the jobs of two ranks"  # of a replica with tiers
LAUNCH = "before the launch"
HALF_LAUNCH = "within the launch, between two ranks of a layer"
ACKNOWLEDGE = "behind the launch, before it is acknowledged"
HALF_ACKNOWLEDGE = "between the acknowledgements of two ranks"
END = "behind the step"
POINTS = (ASK, ORDERS, ZEROES, RANKS, LAUNCH, HALF_LAUNCH, ACKNOWLEDGE, HALF_ACKNOWLEDGE, END)
_HALFWAY = 3  # layer
GIVE_UP_S = 120.0
LOAD_DEADLINE_S = 3.0  # of loads from tiers
_HELD_SLOT = 40
LONG = [token % 251 for token in range(100)]

Reach = Callable[[str], None]


@dataclass
class Trap:
    """The point where the process sends itself a signal.

    Attributes:
        point: one of POINTS.
        passes: times that the point is passed before.
    """

    point: str
    passes: int
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Work:
    """Work of an engine.

    Attributes:
        prompts: requests as (prompt, most tokens to generate).
        trap: where the process signals itself; None = nowhere.
        act: a method of TrappedEngine to call first; "" = none.
    """

    prompts: Sequence[tuple[list[int], int]]
    trap: Trap | None = None
    act: str = ""


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

    def moves(self) -> Moves | None:
        return self.sound.moves()


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


@dataclass
class TrappedTable:
    """The job table of a rank."""

    sound: JobTable
    reach: Reach

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sound, name)

    def order(self, record: bytes, checksum: int) -> bool:
        done = self.sound.order(record, checksum)
        self.reach(JOBS)
        return done


class PatientSession:
    """A session whose service may not answer: every second time-out of a step begins a new engine life."""

    def __init__(self, sound: Session) -> None:
        self._sound = sound

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)

    def apply(self, part: Part, executed_through: int) -> StepResult:
        """See Session. Raises DeadlineExceeded or Unavailable when there is no answer within GIVE_UP_S."""
        until_s = time.monotonic() + GIVE_UP_S
        call: Callable[[], StepResult] = partial(self._sound.apply, part, executed_through=executed_through)
        for number in itertools.count(1):
            try:
                return call()
            except (DeadlineExceeded, Unavailable):
                if not self._sound.in_flight or time.monotonic() > until_s:
                    raise
                if number % 2 == 0:
                    self._sound.begin_new_life()
                call = self._sound.receive
        raise AssertionError("it counts without an end")


class TrappedEngine(Engine):
    """An engine that passes the points of each step in order."""

    def __init__(
        self, open_session: OpenSession, memory: Sequence[RankMemory], model: Model, config: SchedulerConfig
    ) -> None:
        self.trap: Trap | None = None
        self._memory = memory
        super().__init__(open_session, memory, model, config)
        self._session = cast(Session, PatientSession(self._session))
        self._ranks = [TrappedRank(one, self.reach) for one in memory]
        if self._jobs is not None:
            self._jobs._tables = tuple(cast(JobTable, TrappedTable(table, self.reach)) for table in self._jobs._tables)
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
        every, jobs = self._ranks, self._jobs
        for rank in every:
            self._ranks, self._jobs = [rank], jobs if rank is every[-1] else None
            super()._carry_out(answer)
            self.reach(RANKS)
        self._ranks = every

    def _compute(self, scheduled: list[Scheduled]) -> None:
        self.reach(LAUNCH)
        super()._compute(scheduled)
        self.reach(ACKNOWLEDGE)

    # -- acts outside requests ---------------------------------------------------------------------------------------

    def spoil(self) -> None:
        """Overwrite every page, and report all blocks as failed loads."""
        blocks = list(range(1, self._session.spec.num_blocks))
        for one in self._memory:
            scribble(one.pages)
        self._do(part_of(cache=Cache(evicted=blocks)))

    def hold(self) -> None:
        """End a request with its pages held for a transfer, and keep a copy of their content."""
        result = self._do(part_of(NewsRow(_HELD_SLOT, LONG), AdmitRow(_HELD_SLOT)))
        hit, tables = result.admit_hit[0], result.tables.by_row()[0]
        assert hit, "the request has cached blocks"
        sizes = [group.block_size for group in self._session.spec.groups]
        self._held = [block for group, table in tables.items() for block in table[: hit // sizes[group]] if block]
        self._before = self._content(self._held)
        self._do(part_of(FactRow(_HELD_SLOT, end=End.HELD)))

    def release(self) -> None:
        """End the transfer: the held pages must still have their content."""
        if self._content(self._held) != self._before:
            raise FailedPrecondition("pages that were held have been overwritten")
        self._do(part_of(cache=Cache(released=[_HELD_SLOT])))

    def _content(self, blocks: Sequence[int]) -> list[bytes]:
        groups = [(one.pages.group(number), one) for one in self._memory for number in range(one.pages.num_groups)]
        return [layer[blocks].numpy().tobytes() for group, _ in groups for layer in group.layers]

    def _do(self, part: Part) -> PartResult:
        """Apply a step without the scheduler, which computes nothing."""
        answer = self._session.apply(part, executed_through=self._executed_through())
        self._carry_out(answer)
        for rank in self._ranks:
            rank.executed(answer.seq)
        return answer.parts[0]


def scribble(pages: PageBuffers) -> None:
    """Overwrite every page but the null block's, with finite numbers, so that results differ without NaN."""
    for number in range(pages.num_groups):
        for layer in pages.group(number).layers:
            layer[1:] = 0x40


def vandal(connection: Connection, worker: str) -> None:
    """Give the pages of one rank other content and stamps, as by orders that other ranks did not get."""
    with attach(worker) as held:
        scribble(held.buffers)
        stamps = held.stamps.read_all()
        blocks = [block for block, stamp in enumerate(stamps) if stamp]
        held.stamps.write(blocks, [stamps[block] + 1 for block in blocks])
    connection.send(len(blocks))


def engine(connection: Connection, way: tuple[str, str], replica: str, workers: list[str], model: ModelConfig) -> None:
    """As `tests.engine.child.engine`, for Work. An error is sent, and ends the process. `way` is the address of the
    service and its session socket, "" without.
    """
    torch.set_num_threads(1)
    try:
        with kvplane.connect(way[0]) as client:
            served = child.begin(client, replica, workers, child.Made(TrappedEngine, model, LOAD_DEADLINE_S, way[1]))
            assert isinstance(served, TrappedEngine)
            connection.send(served.kept_keys)
            with contextlib.suppress(EOFError):
                while True:
                    work: Work = connection.recv()
                    if work.act:
                        getattr(served, work.act)()
                    served.trap = work.trap
                    child.serve(connection, served, list(work.prompts))
                    served.trap = None
    except KvplaneError as error:
        connection.send(picklable(error))
