"""The kernels of a plan, compiled before serving; and a count of the kernels that Triton compiles later.

A compile takes seconds, during which a step of the engine waits. So an engine or worker compiles what its plan needs
(`warm_up`), and the count of later compiles should stay 0.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kvplane_worker.ops.interface import AttentionPages, AttentionRule, Batch, GroupPages
from kvplane_worker.ops.triton_ops import attention, moves, writes
from kvplane_worker.ops.triton_ops.kernels.moves import CHECKED_GATHER, CHECKSUM, COPY, GATHER, SCATTER, ZERO
from kvplane_worker.ops.triton_ops.launch import Chip, Launch

PACKAGE = "kvplane_worker."
# Queries per row of the batches that are compiled for: none given (one each), few, and many.
QUERIES = (0, 2, 256)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of layers with equal pages and rules.

    Attributes:
        pages: the pages of one of these layers.
        q_heads: query heads of the rank.
        dtype: element type of queries and new tokens.
        rule: the rule, with tensors of its sinks and slopes if there are any.
    """

    pages: AttentionPages
    q_heads: int
    dtype: torch.dtype
    rule: AttentionRule


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        kernels: the name of each kernel that was compiled or loaded from Triton's cache; of a family, once per kernel.
        cpu_s: CPU time of this process and of the compilers that it started, in seconds.
    """

    kernels: tuple[str, ...]
    cpu_s: float


class Watch:
    """Counts the kernels of this package that Triton compiles in this process, or loads from its cache on disk.

    Attributes:
        late: maps a kernel to the number of times that it was compiled outside `warming`.
    """

    def __init__(self) -> None:
        self.late: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._warmed: list[str] | None = None
        self._next: Any = None
        self._is_installed = False

    def install(self) -> None:
        """Begin to count. Another listener that was installed in Triton before is still called."""
        with self._lock:
            if not self._is_installed:
                self._is_installed = True
                self._next = triton.knobs.compilation.listener
                triton.knobs.compilation.listener = self._compiled

    @contextmanager
    def warming(self) -> Iterator[list[str]]:
        """Collect the names of kernels that are compiled in this context, by any thread, instead of counting them."""
        self.install()
        with self._lock:
            warmed: list[str] = []
            self._warmed = warmed
        try:
            yield warmed
        finally:
            with self._lock:
                self._warmed = None

    def _compiled(self, **given: Any) -> None:  # noqa: ANN401
        function = given["src"].fn
        if function.module.startswith(PACKAGE):
            with self._lock:
                if self._warmed is None:
                    self.late[function.__name__] += 1
                else:
                    self._warmed.append(function.__name__)
        if self._next:
            self._next(**given)


WATCH = Watch()


def warm_up(launches: Iterable[Launch], threads: int = 0) -> WarmUp:
    """Compile the kernels of launches, several at a time. In the interpreter there is nothing to compile."""
    before = os.times()
    with WATCH.warming() as warmed:
        if not triton.knobs.runtime.interpret:
            with ThreadPoolExecutor(threads or os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
                for launch in launches:
                    launch.compile()
    return WarmUp(tuple(warmed), sum(os.times()[:4]) - sum(before[:4]))


def engine_launches(groups: Sequence[GroupPages], layers: Sequence[Attention], chip: Chip) -> Iterator[Launch]:
    """Return launches of every kernel with which an engine attends, writes tokens, and zeroes and copies its pages."""
    for layer in layers:
        for queries in QUERIES:
            yield from attention.launches(call_of(layer, queries), chip)
        yield write_of(layer, chip)
    for group in groups:
        yield from move_launches(group, (COPY, ZERO))


def worker_launches(groups: Sequence[GroupPages]) -> Iterator[Launch]:
    """Return launches of every kernel with which a worker moves and sums whole pages on its device."""
    for group in groups:
        yield from move_launches(group, (COPY, ZERO, GATHER, SCATTER, CHECKSUM, CHECKED_GATHER))


def call_of(layer: Attention, queries: int) -> attention.Call:
    """Return a call for one row; 0 queries = one, without query starts."""
    device = layer.pages.k.device
    starts = torch.tensor([0, queries], dtype=torch.int32, device=device) if queries else None
    one = torch.ones((1, 1), dtype=torch.int32, device=device)
    query = torch.empty((max(1, queries), layer.q_heads, layer.pages.k.shape[3]), dtype=layer.dtype, device=device)
    return attention.keys_and_values(query, layer.pages, Batch(one, one[0], starts), layer.rule)


def write_of(layer: Attention, chip: Chip) -> Launch:
    """Return the launch that writes one token."""
    pages = layer.pages
    key, value = (
        writes.Written(torch.empty((1, *part.shape[2:]), dtype=layer.dtype, device=part.device), part, scale)
        for part, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    )
    return writes.write_launch(key, value, torch.zeros(1, dtype=torch.int64, device=pages.k.device), chip)


def move_launches(group: GroupPages, kinds: Sequence[Any]) -> Iterator[Launch]:
    """Return a launch of each kind for one block of a group."""
    if not group.layers or moves.refusal(group):
        return
    device, table = group.layers[0].device, moves.LayerTable.of(group)
    ids = moves.on_device([1], device)
    row = torch.empty((1, group.bytes_per_block), dtype=torch.uint8, device=device)
    sums = torch.empty(1, dtype=torch.int64, device=device)
    for kind in kinds:
        yield moves.move_launch(
            table,
            moves.Move(
                int(kind),
                ids,
                targets=ids if kind == COPY else None,
                staging=row if kind in (GATHER, SCATTER, CHECKED_GATHER) else None,
                sums=sums if kind in (CHECKSUM, CHECKED_GATHER) else None,
            ),
        )
