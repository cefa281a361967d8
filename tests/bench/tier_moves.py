"""Loads and saves on CPU pages, by the movers of a worker: `python -m tests.bench.tier_moves`.

Loads of what a hit needs, compared with loads of every block of every group, by the same movers in the same run; and
copies between pages and rows, compared with copying the same bytes in one piece. CPU time of this process, median of
interleaved runs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import torch

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.job_table import JobKind, JobRow, JobTable, job_table_bytes
from kvplane.base.rank_plan import RankPlan
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane_kernels.interface import GroupPages
from kvplane_kernels.torch_ops import TorchOps, pages
from kvplane_worker.pages import PageBuffers
from kvplane_worker.tiers import HostSlots, MoverMemory, Movers
from tests.base.job_rows import record
from tests.bench.goals import goal
from tests.service.tier_rows import Rows, plan_with, rows_of_hit

SHAPES = (("gpt-oss-20b", 16_384, 1), ("gemma-3-27b", 4_096, 4))
PAGE_BYTES = (32_768, 65_536, 131_072)
EPOCH = 1


class Bench:
    """A host tier that has every block of a prompt, and the pages of one rank."""

    def __init__(self, rows: Rows, plan: RankPlan) -> None:
        self.rows, self.job, self.position = rows, 0, 0
        self.pages = PageBuffers.allocate(plan)
        num_blocks = plan.num_blocks
        self.stamps = StampTable.create(bytearray(table_bytes(2 * num_blocks)), 2 * num_blocks, incarnation=1)
        self.stamps.write(range(1, num_blocks), range(1, num_blocks))
        self.stamps.claim(EPOCH)
        self.stamps.launches_ended()
        self.stamps.begin(1, 0)
        self.stamps.finish()
        self.table = JobTable.create(bytearray(job_table_bytes(num_blocks)), num_blocks)
        width = max(self.pages.group(group).bytes_per_block for group in range(self.pages.num_groups))
        slots = HostSlots(TierSpec(TierKind.HOST, num_blocks), width, "cpu")
        self.movers = Movers(MoverMemory(self.pages, self.stamps, [slots]), TorchOps(), self.table)
        self.slots = list(range(1, num_blocks))
        random.Random(1).shuffle(self.slots)
        self.saved = self.versions = dict[int, int]()

    def save_all(self) -> None:
        for block in self.slots[: self.rows.everything.total()]:
            self.job += 1
            self.versions[block] = self.job
        groups = [group for group, count in sorted(self.rows.everything.items()) for _ in range(count)]
        self.group_of = dict(zip(self.versions, groups, strict=True))
        saves = [
            JobRow(job, JobKind.SAVE, EPOCH, 1, 0, 0, 0, block, job, block, block, self.group_of[block])
            for block, job in self.versions.items()
        ]
        for save in saves:
            while not self.table.order(record([save])):
                time.sleep(0.001)
        assert self.wait(len(saves)) == len(saves)

    def load(self, some: Counter[int]) -> float:
        """Load this number of rows of each group; returns the CPU time."""
        left, chosen = some.copy(), list[int]()
        for block, group in self.group_of.items():
            if left[group]:
                left[group] -= 1
                chosen.append(block)
        self.job += 1
        step = EPOCH, 1, 0
        rows = [
            JobRow(self.job, JobKind.LOAD, *step, 0, 0, block, self.versions[block], block, block, self.group_of[block])
            for block in chosen
        ]
        began = time.process_time()
        assert self.table.order(record(rows))
        assert self.wait(1) == 1
        return time.process_time() - began

    def wait(self, count: int) -> int:
        """Wait for the ends of this number of jobs; returns how many are done."""
        done = 0
        while count:
            ends = self.table.ends_from(self.position)
            self.position += len(ends)
            count -= sum(end.num_jobs for end in ends)
            done += sum(end.num_jobs for end in ends if end.is_done)
            time.sleep(0.002)
        return done


def partial(model: str, length: int, tensor_parallel: int, runs: int) -> bool:
    rows = rows_of_hit(model, length, tensor_parallel=tensor_parallel)
    bench = Bench(rows, plan_with(model, length, rows.everything.total() + 99, tensor_parallel))
    bench.save_all()
    times: dict[str, list[float]] = {"everything": [], "needed": []}
    for _ in range(runs):
        times["everything"].append(bench.load(rows.everything))
        times["needed"].append(bench.load(rows.needed))
    bench.movers.close()
    sizes = [rows.num_bytes(some) for some in (rows.everything, rows.needed)]
    by_bytes, by_time = sizes[0] / sizes[1], median(times["everything"]) / median(times["needed"])
    text = (
        f"{model}, {length:,} tokens: {sizes[0] / 2**20:.1f} MiB and {sizes[1] / 2**20:.1f} MiB, {by_bytes:.2f}x;"
        f" CPU time {median(times['everything']):.3f} s and {median(times['needed']):.3f} s, {by_time:.2f}x;"
        " as a share of the ratio of bytes"
    )
    return goal("N2", text, by_time / by_bytes, least=0.95)


def copies(page_bytes: int, runs: int) -> bool:
    """Compare gather, scatter and checksum of random blocks with one copy of the same bytes, which bypasses the caches,
    and with copies of as many pieces of a page, which use them.
    """
    num_layers, total = 12, 192 << 20
    count = total // num_layers // page_bytes
    memory = torch.zeros((num_layers, 4 * count, page_bytes), dtype=torch.uint8).random_()
    group, blocks = GroupPages(tuple(memory)), random.Random(1).sample(range(4 * count), count)
    rows = torch.zeros((count, num_layers * page_bytes), dtype=torch.uint8)
    other = torch.zeros(total, dtype=torch.uint8)
    flat = rows.view(-1)[:total]
    starts = range(0, flat.numel() - page_bytes + 1, page_bytes)
    sources = [flat.data_ptr() + at for at in random.Random(2).sample(starts, len(starts))]
    targets = [other.data_ptr() + at for at in starts]
    acts: dict[str, Callable[[], object]] = {
        "one copy": lambda: other[: flat.numel()].copy_(flat),
        "pieces": lambda: pages.move(targets, sources, page_bytes),
        "gather": lambda: pages.gather(group, blocks, rows),
        "scatter": lambda: pages.scatter(group, blocks, rows),
        "checksum": lambda: pages.checksum(group, blocks),
    }
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(runs):
        for name, act in acts.items():
            began = time.process_time()
            act()
            times[name].append(time.process_time() - began)
    speed = {name: flat.numel() / median(values) / 1e9 for name, values in times.items()}
    one, bound = speed["one copy"], speed["pieces"] / speed["one copy"]
    text = (
        f"pages of {page_bytes:,} bytes, of one copy, {one:.1f} GB per CPU second; copies of pieces reach {bound:.2f}"
    )
    reached = [goal("N4", f"{name}, {text}", speed[name] / one, least=0.7) for name in ("gather", "scatter")]
    return all([*reached, goal("N4", "checksum of them, GB per CPU second", speed["checksum"], least=1)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tier_moves", description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    reached = [partial(model, length, tensor_parallel, given.runs) for model, length, tensor_parallel in SHAPES]
    reached += [copies(page_bytes, given.runs) for page_bytes in PAGE_BYTES]
    return not all(reached)


if __name__ == "__main__":
    sys.exit(main())
