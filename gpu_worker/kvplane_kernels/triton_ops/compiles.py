"""The kernels of a plan, compiled before serving; and a count of the kernels that Triton compiles later.

A compile takes seconds, during which a step of the engine waits. So an engine or worker compiles what its plan needs
(`warm_up`), and the count of later compiles should stay 0.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from kvplane_kernels.interface import (
    Batch,
    DeltaInputs,
    GroupPages,
    LayerAttention,
    LayerLatents,
    LayerStates,
    LayerUse,
    ScanInputs,
    StateInputs,
    StateRows,
    StateWeights,
    WarmUp,
)
from kvplane_kernels.triton_ops import attention, delta_rule, moves, selective_scan, states, writes
from kvplane_kernels.triton_ops.kernels.moves import CHECKED_GATHER, CHECKSUM, COPY, GATHER, SCATTER, ZERO
from kvplane_kernels.triton_ops.launch import Chip, Launch

PACKAGE = "kvplane_kernels."
# Queries per row of the batches that are compiled for: none given (one each), few, and many.
QUERIES = (0, 2, 256)
# Kernels of an operation. Those in STAGED also have a form for the host link, with few programs.
KINDS = {
    "copy_pages": (int(COPY),),
    "zero_pages": (int(ZERO),),
    "gather": (int(GATHER),),
    "scatter": (int(SCATTER),),
    "checksum": (int(CHECKSUM), int(CHECKED_GATHER)),
}
STAGED = (int(GATHER), int(SCATTER))


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


def launches_of(
    groups: Sequence[GroupPages],
    operations: Collection[str],
    layers: Sequence[LayerUse],
    chip: Chip,
) -> Iterator[Launch]:
    """Return a launch of every kernel that `TritonOps.warm_up` compiles."""
    for layer in layers:
        if isinstance(layer, LayerStates):
            yield from step_launches(layer, chip)
            continue
        if isinstance(layer, LayerLatents):
            yield from latent_launches(layer, chip)
            continue
        if not attention.pages_refusal(query_of(layer, 1), layer.pages):
            for queries in QUERIES:
                yield from attention.launches(call_of(layer, queries), chip)
        key, value = written(layer)
        if not (key.refusal() or value.refusal()):
            slots = torch.zeros(1, dtype=torch.int64, device=layer.pages.k.device)
            yield writes.write_launch(key, value, slots, chip)
    for group in groups:
        if group.layers and not moves.refusal(group):
            for operation in operations:
                for kind in KINDS[operation]:
                    yield move_of(group, kind)
                    if kind in STAGED:
                        yield move_of(group, kind, background=True)


def latent_launches(layer: LayerLatents, chip: Chip) -> Iterator[Launch]:
    """Return the launches of attention and writes of latent rows."""
    pages, device = layer.pages, layer.pages.rows.device
    size = pages.rows.shape[2]
    one = torch.ones((1, 1), dtype=torch.int32, device=device)
    query = torch.empty((max(QUERIES), layer.q_heads, size), dtype=layer.dtype, device=device)
    if not attention.latent_refusal(query, pages, layer.value_size):
        for queries in QUERIES:
            batch = Batch(one, one[0], starts_of(queries, device))
            call = attention.latent(query[: max(1, queries)], pages, batch, 1.0, layer.value_size)
            yield from attention.launches(call, chip)
    row = torch.empty((1, 1, size), dtype=layer.dtype, device=device)
    new = writes.Written(row, pages.rows.unsqueeze(2), pages.scale)
    if not new.refusal():
        yield writes.write_launch(new, None, torch.zeros(1, dtype=torch.int64, device=device), chip)


def starts_of(queries: int, device: torch.device) -> Tensor | None:
    """Return where the queries of one row begin and end; None for 0 queries."""
    return torch.tensor([0, queries], dtype=torch.int32, device=device) if queries else None


def step_launches(layer: LayerStates, chip: Chip) -> Iterator[Launch]:
    """Return the launches of steps of a layer with states: of one token, and of many."""
    for count in (1, states.CHUNK):
        ints = torch.zeros(count + 1, dtype=torch.int32, device=layer.pages.conv.device)
        yield from calls_of(layer, StateRows(ints[:2], ints[:1], ints[:count]), chip)


def calls_of(layer: LayerStates, rows: StateRows, chip: Chip) -> Iterator[Launch]:
    """Return the launches of a step of a layer with states."""
    (conv, ssm), count = (layer.pages.conv, layer.pages.ssm), rows.write_block.shape[0]
    blocks, channels = (rows.query_start, rows.read_block, rows.write_block), conv.shape[1]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=layer.dtype, device=conv.device)

    x, taps, one = empty(count, channels), empty(channels, conv.shape[2] + 1), empty(channels)
    if layer.operation == "state_step":
        head = empty(ssm.shape[1])
        inputs = StateInputs(*blocks, x, empty(count, ssm.shape[1]))
        if not states.refusal(layer.pages, inputs):
            yield from states.launches(layer.pages, inputs, StateWeights(taps, one, head, head), chip)[1]
        return
    if not states.refused_convolution(conv, x):
        yield from states.convolve(conv, rows, x, taps, one, chip)[1]
    if layer.operation == "selective_scan":
        scanned = ScanInputs(*blocks, x, x, empty(count, ssm.shape[2]), empty(count, ssm.shape[2]))
        if not selective_scan.refusal(ssm, scanned):
            yield from selective_scan.launches(ssm, scanned, empty(channels, ssm.shape[2]), one, chip)[1]
    if layer.operation == "gated_delta_rule":
        _, heads, value_size, key_size = ssm.shape
        k, beta = empty(count, (channels - heads * value_size) // (2 * key_size), key_size), empty(count, heads)
        gates = empty(count, heads, key_size) if layer.gates_of_keys else beta
        corrected = DeltaInputs(*blocks, k, k, empty(count, heads, value_size), gates, beta)
        if not delta_rule.refusal(ssm, corrected):
            yield from delta_rule.launches(ssm, corrected, chip)[1]


def query_of(layer: LayerAttention, queries: int) -> Tensor:
    """Return queries of a layer."""
    pages = layer.pages.k
    return torch.empty((queries, layer.q_heads, pages.shape[3]), dtype=layer.dtype, device=pages.device)


def call_of(layer: LayerAttention, queries: int) -> attention.Call:
    """Return a call for one row; 0 queries = one, without query starts."""
    device = layer.pages.k.device
    one = torch.ones((1, 1), dtype=torch.int32, device=device)
    query = query_of(layer, max(1, queries))
    return attention.keys_and_values(query, layer.pages, Batch(one, one[0], starts_of(queries, device)), layer.rule)


def written(layer: LayerAttention) -> list[writes.Written]:
    """Return the arguments of the write of one token: keys, and values."""
    pages = layer.pages
    return [
        writes.Written(torch.empty((1, *part.shape[2:]), dtype=layer.dtype, device=part.device), part, scale)
        for part, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    ]


def move_of(group: GroupPages, kind: int, background: bool = False) -> Launch:
    """Return the launch that moves or sums one block of a group; see `moves.Move`."""
    device, table = group.layers[0].device, moves.LayerTable.of(group)
    ids = moves.on_device([1], device)
    row = torch.empty((1, group.bytes_per_block), dtype=torch.uint8, device=device)
    sums = torch.empty(1, dtype=torch.int64, device=device)
    return moves.move_launch(
        table,
        moves.Move(
            kind,
            ids,
            targets=ids if kind == COPY else None,
            staging=row if kind in (GATHER, SCATTER, CHECKED_GATHER) else None,
            sums=sums if kind in (CHECKSUM, CHECKED_GATHER) else None,
            background=background,
        ),
    )
