"""Copies between the pages of vLLM and those in host memory, on a thread: one task after another, in the order of the
steps. So a load reads what saves before it have written, and a row is written when all that read it have ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch

from kvplane_kernels.interface import GroupPages, PageOps
from kvplane_vllm.tiers.messages import NO_SEALS, Copies, Seals

_log = logging.getLogger("vllm.kvplane")


@dataclass(slots=True)
class Task:
    """The copies of one step.

    Attributes:
        seq: the step that has ended with it; 0 = none.
        saves, loads: as in `StepOrders`.
        seals: of rows that earlier tasks have written.
        computed: when the device has computed the step; None on a CPU, where it has.
        reads: blocks that its saves read.
    """

    seq: int
    saves: Sequence[Copies]
    loads: dict[str, list[Copies] | None]
    seals: Seals = NO_SEALS
    computed: torch.cuda.Event | None = None
    reads: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.reads = frozenset(chain.from_iterable(one.device for one in self.saves))


class Copier:
    """The thread. `device` and `host`: the pages of each group; those in host memory are rows of one layer."""

    def __init__(
        self,
        device: Sequence[GroupPages],
        host: Sequence[GroupPages],
        ops: PageOps,
        seal: Callable[[Seals], None] = lambda _: None,
    ) -> None:
        """`seal`: lets peers read rows."""
        self._device, self._host, self._ops, self._seal = device, host, ops, seal
        self._where = device[0].layers[0].device
        self._lock = threading.Condition()
        self._tasks: deque[Task] = deque()  # the first one is worked on
        self._executed = 0
        self._loaded: dict[str, bool] = {}  # requests whose load has ended, and whether it is good
        self._is_closed = self._is_broken = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvplane-copier", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Add the copies of the next step. As all methods, raises RuntimeError if the device has failed."""
        if self._where.type == "cuda":
            task.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            task.computed.record(torch.cuda.current_stream(self._where))
        with self._lock:
            self._check()
            self._tasks.append(task)
            self._lock.notify_all()

    def fence(self, blocks: Iterable[int]) -> None:
        """Wait until no save reads one of these blocks."""
        wanted = frozenset(blocks)
        with self._lock:
            self._wait_for(lambda: all(wanted.isdisjoint(task.reads) for task in self._tasks))

    def drain(self) -> None:
        """Wait until no save reads any block."""
        with self._lock:
            self._wait_for(lambda: not any(task.reads for task in self._tasks))

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        self._lock.wait_for(lambda: self._error is not None or holds())
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("copies between the device and kvplane's tiers have ended") from self._error

    @property
    def is_broken(self) -> bool:
        """Whether a save failed: nothing is saved any more, and every load fails."""
        return self._is_broken

    def ended(self) -> tuple[int, dict[str, bool]]:
        """Return the step up to which all tasks have ended, and the loads that have since the last call, with whether
        they are good.
        """
        with self._lock:
            self._check()
            loaded, self._loaded = self._loaded, {}
            return self._executed, loaded

    def close(self) -> None:
        """Stop after the copy under way."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # of the device: the engine ends too, it would wait forever otherwise
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _work(self) -> None:
        with self._a_stream():
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._is_closed or self._tasks)
                    if self._is_closed:
                        return
                    task = self._tasks[0]
                good = self._carry_out(task)
                with self._lock:
                    self._tasks.popleft()
                    if not self._is_broken:
                        self._executed = max(self._executed, task.seq)
                    self._loaded |= good
                    self._lock.notify_all()

    def _a_stream(self) -> AbstractContextManager[object]:
        if self._where.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._where))  # type: ignore[no-untyped-call]

    def _carry_out(self, task: Task) -> dict[str, bool]:
        if task.computed is not None:
            task.computed.wait(torch.cuda.current_stream(self._where))
        try:
            for copies in () if self._is_broken else task.saves:
                self.save(copies)
        except Exception:  # what later loads find there is unknown: the engine continues without tiers
            _log.exception("the tiers are left alone: a save failed")
            self._is_broken = True
        self._seal(task.seals)
        good = dict[str, bool]()
        for name, parts in task.loads.items():
            try:
                good[name] = parts is not None and not self._is_broken
                for copies in parts if parts is not None and good[name] else ():
                    self.load(copies)
            except Exception:  # the request is computed instead
                _log.exception("the load of request %s failed", name)
                good[name] = False
        if self._where.type == "cuda":
            torch.cuda.current_stream(self._where).synchronize()
        return good

    def save(self, copies: Copies) -> None:
        """Copy blocks of vLLM to host memory."""
        for device, rows in self._rows(copies):
            self._ops.gather(self._device[copies.group], device, rows)

    def load(self, copies: Copies) -> None:
        """Copy blocks in host memory to those of vLLM."""
        for device, rows in self._rows(copies):
            self._ops.scatter(self._device[copies.group], device, rows)

    def _rows(self, copies: Copies) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """Yield runs of rows that follow each other in host memory, with the blocks of vLLM."""
        (rows,) = self._host[copies.group].layers
        pairs = sorted(zip(copies.host, copies.device, strict=True))
        first = 0
        for at in range(1, len(pairs) + 1):
            if at == len(pairs) or pairs[at][0] != pairs[at - 1][0] + 1:
                run, first = pairs[first:at], at
                yield [device for _, device in run], rows[run[0][0] : run[0][0] + len(run)]
