"""CPU time of the host per layer and step: writing tokens and attending to them, as called and as prepared.

    python -m tests.bench.host_calls        a line per call: microseconds as called, prepared, and their ratio

Also checks of the stamps of 4,096 pages by a worker, before and after a transfer: page by page, and in columns.

No device takes part: kernels are compiled for an absent chip, and their launch by the driver is left out of both sides.
"As called" is what each call cost before launches were prepared: all checks, arguments, and Triton's binder. The sides
alternate, and each figure is a median of process time. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
import triton
from triton.compiler import CompiledKernel

from kvplane.base.stamp_table import StampTable
from kvplane_kernels import checks
from kvplane_kernels.columns import column, numbers
from kvplane_kernels.interface import AttentionRule, Batch
from kvplane_kernels.triton_ops import attention, backend, launch, writes
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_worker import transfers
from tests.kernels.compiled import CHIPS, NoDevice, keys_values

if TYPE_CHECKING:
    from kvplane_worker.lending.holdings import Holdings

ARCH, ROWS, BLOCKS, HEADS, GROUP, SIZE = 90, 64, 512, 8, 8, 128
ROUNDS, CALLS, STAMPED = 9, 200, 4096


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU time per call."""

    name: str
    called: float
    prepared: float

    @property
    def ratio(self) -> float:
        return self.prepared / self.called


def without_device() -> None:
    """Compile for an absent chip, and leave out what the driver does."""
    triton.runtime.driver.set_active(NoDevice(ARCH))

    def initialise(kernel: CompiledKernel) -> None:
        kernel.function, kernel._run = 0, lambda *arguments: None

    CompiledKernel._init_handles = initialise
    for module in (backend, launch):
        module.chip_of = lambda device: CHIPS[ARCH]  # type: ignore[attr-defined]


def sides() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By operation: a call as before launches were prepared, and as it is."""
    ops, rule, chip = TritonOps(), AttentionRule(SIZE**-0.5), CHIPS[ARCH]
    pages, slots = keys_values(torch.bfloat16, 16, HEADS, SIZE), torch.arange(ROWS)
    query = torch.zeros((ROWS, HEADS * GROUP, SIZE), dtype=torch.bfloat16)
    new = torch.zeros((ROWS, HEADS, SIZE), dtype=torch.bfloat16)
    table, lengths = torch.zeros((ROWS, BLOCKS), dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)
    decode = Batch(table, lengths)
    drafts = Batch(table[::4].contiguous(), lengths[::4].contiguous(), torch.arange(0, ROWS + 1, 4).int())

    def attends(batch: Batch) -> Callable[[], object]:
        def called() -> None:
            checks.check_attention(query, pages, batch, rule)
            for each in attention.launches(attention.keys_and_values(query, pages, batch, rule), chip):
                each.run()

        return called

    def written() -> None:
        checks.check_write_kv(pages, new, new, slots)
        k, v = (writes.Written(new, part, None) for part in (pages.k, pages.v))
        assert k.refusal() + v.refusal() == ""
        writes.write_launch(k, v, slots, chip).run()

    listed = tuple(range(1, STAMPED + 1))
    holdings = cast("Holdings", SimpleNamespace(stamps=StampTable.create(bytearray(65536), STAMPED + 1, 1)))

    def one_by_one() -> list[int]:
        before = [holdings.stamps.read(block) for block in listed]
        after = [holdings.stamps.read(block) for block in listed]
        return [at for at in range(STAMPED) if before[at] != after[at]]

    def in_columns() -> tuple[tuple[int, ...], ...]:
        ids = column(listed)
        before = transfers._stamps(holdings, ids)
        return numbers(before), numbers(transfers._positions(before != transfers._stamps(holdings, ids)))

    return {
        f"stamps of {STAMPED} pages": (one_by_one, in_columns),
        "decode": (attends(decode), lambda: ops.decode_attention(query, pages, decode, rule)),
        "drafts": (attends(drafts), lambda: ops.prefill_attention(query, pages, drafts, rule)),
        "write": (written, lambda: ops.write_kv(pages, new, new, slots)),
    }


def seconds(call: Callable[[], object]) -> float:
    begun = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - begun) / CALLS


def costs(rounds: int) -> list[Cost]:
    """Measure every operation."""
    torch.set_num_threads(1)
    without_device()
    found = []
    for name, pair in sides().items():
        times = [[seconds(side) for side in pair] for _ in range(rounds + 1)][1:]  # the first round compiles
        called, prepared = (statistics.median(side) * 1e6 for side in zip(*times, strict=True))
        found.append(Cost(name, called, prepared))
    layer = found[1], found[-1]
    found.append(Cost("a layer: decode and write", sum(c.called for c in layer), sum(c.prepared for c in layer)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.host_calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = costs(given.rounds)
    if given.json:
        print(json.dumps([{**asdict(cost), "ratio": cost.ratio} for cost in found]))
        return 0
    for cost in found:
        print(f"{cost.name:<28} {cost.called:7.1f} us as called {cost.prepared:7.1f} prepared, ratio {cost.ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
