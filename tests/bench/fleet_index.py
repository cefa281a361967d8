"""CPU time of the fleet's index, compiled and in Python: a prompt of 240,000 tokens at 96 places, and events.

    python -m tests.bench.fleet_index [BLOCKS]     blocks per place (100,000)

Every place has another part of the prompt; the other groups have windows of 8 and 64 blocks and single states at every
500th block, a third of them evicted. Times are of the thread's CPU, the least and the median of 30 look-ups.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median

from kvplane.base.groups import GroupKind, GroupSpec, HashAlgorithm, MambaMode, ReplicaSpec
from kvplane_fleet.domains import Domain
from kvplane_fleet.hits import Asked, HitRule, claims
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex

PLACES, BLOCK, KEYS = 96, 16, 15_000
REPEATS = 30
COPIED = 8  # one run of keys in this number is stored twice


def rule_of(num_groups: int) -> HitRule:
    """Return the rule of full attention, then windows of 128 and 1024 tokens, then states."""
    groups = (
        GroupSpec(GroupKind.FULL_ATTENTION, BLOCK, lookup_class=0),
        GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=128, lookup_class=1),
        GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=1024, lookup_class=2),
        GroupSpec(GroupKind.MAMBA, BLOCK, mamba_mode=MambaMode.ALIGN, lookup_class=3),
    )[:num_groups]
    return HitRule(ReplicaSpec(groups, 1 << 20, 1 << 20, BLOCK, BLOCK, 1))


def cpu_ms(work: Callable[[], object]) -> tuple[float, float]:
    """Return the least and the median CPU time of a call, in milliseconds."""
    times = []
    for _ in range(REPEATS):
        begun_s = time.thread_time()
        work()
        times.append((time.thread_time() - begun_s) * 1e3)
    return min(times), median(times)


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of a call, in seconds."""
    begun_s = time.thread_time()
    work()
    return time.thread_time() - begun_s


def fill(index: Index | NativeIndex, prompt: list[int], num_groups: int, rng: Random) -> list[list[int]]:
    """Give each place a part of the prompt; returns the cells of each place."""
    cells = [[index.new_cell() for _ in range(num_groups)] for _ in range(PLACES)]
    for number, of_place in enumerate(cells):
        end = KEYS * (number + 1) // PLACES
        index.add(of_place[0], prompt[:end])
        for cell, kept in zip(of_place[1:], (8, 64, 1), strict=False):
            for at in range(500, end + 1, 500):
                if rng.random() > 0.33:
                    index.add(cell, prompt[at - kept : at])
    return cells


def measure(name: str, make: Callable[[], Index | NativeIndex], blocks: int, width: int) -> None:
    """Print the figures of one kind of index, with keys of `width` bits."""
    for num_groups in (1, 4):
        rng, index, rule = Random(1), make(), rule_of(num_groups)
        prompt = [rng.getrandbits(width) for _ in range(KEYS)]
        cells = fill(index, prompt, num_groups, rng)
        before_kb, keys = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
        spent_s, removed_s, removed = 0.0, 0.0, 0
        for of_place in cells:
            last = list[int]()
            for number in range(blocks // 32):
                run = [rng.getrandbits(width) for _ in range(32)]
                spent_s += cpu_s(partial(index.add, of_place[0], run))
                if number % COPIED == 0:
                    index.add(of_place[0], run)
                    last = run
                elif number % COPIED == 1:  # a copy of each of the last, then a key whole
                    removed_s += cpu_s(partial(index.remove, of_place[0], last))
                    removed_s += cpu_s(partial(index.remove, of_place[0], last))
                    removed += 64
                    index.add(of_place[0], last)
                    index.add(of_place[0], last[:16])  # half of the copies stay
                keys += 32
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 / max(keys, 1)
        asked = [Asked(rule, of_place) for of_place in cells]
        least, middle = cpu_ms(partial(claims, index, prompt, KEYS * BLOCK, asked))
        print(
            f"{name}, keys of {width} bits, {num_groups} groups: look-up {least:.2f} ms, median {middle:.2f}; "
            f"{keys / spent_s / 1e6:.2f} M stored blocks/s in runs of 32, {removed / removed_s / 1e6:.2f} M removed; "
            f"process grew by at most {grown:.0f} bytes per key, one in {2 * COPIED} has a copy; "
            f"{index.num_keys} keys; "
            f"clear of a place {1e6 * cpu_s(partial(index.clear, cells[0][0])):.0f} us",
            flush=True,
        )


def main() -> None:
    """Print all figures."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for width in (128, 64):
        measure("compiled", NativeIndex, blocks, width)
    measure("Python", Index, blocks // 10, 128)
    rng = Random(2)
    tokens = [rng.randrange(100_000) for _ in range(KEYS * BLOCK)]
    for algorithm in (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR, HashAlgorithm.KVPLANE):
        domain = Domain(algorithm, "", BLOCK, key_bytes=16)
        print(f"keys from 240,000 tokens, {algorithm.value}: {cpu_ms(partial(domain.keys, tokens))[0]:.1f} ms")


if __name__ == "__main__":
    main()
