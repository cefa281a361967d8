"""`python -m tests.bench.tier_figures`: figures of tiers, each with its reference measured in the same run.

N5   a verified load from the file to pages, compared with bare preadv of the same bytes by as many threads (goal 0.85
     of its speed)
N7   the union of device and tiers for 128K tokens in 7 groups, compared with the device alone (goal 2x)
N9   a million slots: the index read by a worker, and verified entries of a store in the service (goal 2 s)
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from kvplane.base.groups import TierKind, TierSpec
from kvplane_core.face.entries import Entries, KeyRun
from kvplane_core.face.interface import INSIDE
from kvplane_core.spec.lookup import PrefixLookup
from kvplane_core.spec.replica import Replica
from kvplane_worker.tiers.disk import DiskSlots
from kvplane_worker.tiers.kept import Kept, read_index, write_index
from kvplane_worker.tiers.movers import NUM_THREADS
from kvplane_worker.tiers.seal import Content
from kvplane_worker.tiers.slots import ALIGNMENT_BYTES
from tests.bench.goals import goal
from tests.core.builders import Engine, full, replica_spec, window

ROUNDS, DISK_ROUNDS = 9, 31  # the time of a disk that others use varies most
SLOT_BYTES, SLOTS, PIECE = 1 << 20, 64, 4
MILLION = 1_000_000
TOKENS, BLOCK = 131_072, 16


def cpu_s(act: Callable[[], None]) -> float:
    """Median of the CPU time."""
    return statistics.median(_took_s(act, time.process_time) for _ in range(ROUNDS))


def _took_s(act: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    act()
    return clock() - began


def _each(threads: ThreadPoolExecutor, act: Callable[[int], None], pieces: range) -> None:
    for _ in threads.map(act, pieces):
        pass


def disk() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        slots = DiskSlots(TierSpec(TierKind.DISK, SLOTS), SLOT_BYTES, Path(folder), "bench")
        noise = torch.randint(0, 256, (1, SLOT_BYTES), dtype=torch.uint8)
        contents = [Content(slots.identity, 0, slot, 0, slot + 1) for slot in range(SLOTS)]
        for content in contents:
            assert slots.write([content], SLOT_BYTES, lambda rows: [bool(rows.copy_(noise).numel())])[0]
        pages = torch.empty(SLOTS, SLOT_BYTES, dtype=torch.uint8)
        stride = ALIGNMENT_BYTES + slots.slot_bytes
        buffers = [memoryview(mmap.mmap(-1, PIECE * stride)) for _ in range(SLOTS // PIECE)]

        def load(first: int) -> None:
            rows = slots.read(contents[first : first + PIECE], SLOT_BYTES)
            assert rows is not None
            pages[first : first + PIECE].copy_(rows)

        def read(first: int) -> None:
            """The same bytes in one call, as a load has them read."""
            assert os.preadv(slots._file, [buffers[first // PIECE]], slots._at(first)) == PIECE * stride

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            pieces = range(0, SLOTS, PIECE)
            load_all, read_all = (partial(_each, threads, act, pieces) for act in (load, read))
            rounds = [(_took_s(load_all), _took_s(read_all)) for _ in range(DISK_ROUNDS)]
        slots.close()
    rate = SLOTS * SLOT_BYTES / 1e9
    mine, other = (rate / statistics.median(times) for times in zip(*rounds, strict=True))
    text = f"verified load from the disk {mine:.2f} GB/s, bare preadv {other:.2f} GB/s; median of the ratios"
    return goal("N5", text, statistics.median(bare / verified for verified, bare in rounds), least=0.85)


def look_up() -> bool:
    groups = (full(BLOCK), *(window(1024, BLOCK, lookup_class=number) for number in range(5, 11)))
    blocks = TOKENS // BLOCK
    text = "".join(chr(97 + at % 23 + at // 23 % 3) for at in range(TOKENS))
    tiers = (TierSpec(TierKind.HOST, 8 * blocks),)
    spec = {"num_blocks": 9 * blocks, "max_model_len": TOKENS + 64, "max_in_flight_tokens": TOKENS + 64}
    engine = Engine(*groups, hash_block_size=BLOCK, scheduler_block_size=BLOCK, tiers=tiers, **spec)
    engine.admit(0, text)
    engine.idle()
    coordinator = engine.replica.coordinator
    pool, (host,) = coordinator.pool, coordinator.tiers.each
    digests = engine.replica.requests.content[0].digests
    keys = [key for block in range(1, pool.num_blocks) if (key := pool.key_of(block)) is not None]

    def on(lookup: PrefixLookup) -> Callable[[], None]:
        def find() -> None:
            assert lookup.find(digests, "", coordinator.most_hit(0), INSIDE, TOKENS).num_tokens >= TOKENS - BLOCK

        return find

    device = cpu_s(on(coordinator.lookup))
    host.install((slot, key, slot + 1) for slot, key in enumerate(keys))
    pool.index.clear()  # nothing is found on the device any more
    union = cpu_s(on(coordinator.union))
    text = f"look-up of {TOKENS:,} tokens, 7 groups: tiers {union * 1e3:.1f} ms, the device {device * 1e3:.1f} ms"
    return goal("N7", text, union / device, most=2)


def restart() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path, identity = Path(folder) / "index", bytes(16)
        versions = array("Q", range(1, MILLION + 1))
        write_index(path, identity, Kept(3, versions))
        began = time.process_time()
        assert read_index(path, identity, MILLION) is not None
        index_s = time.process_time() - began
    sizes = {"hash_block_size": BLOCK, "scheduler_block_size": BLOCK}
    spec = replica_spec(full(BLOCK), **sizes, tiers=(TierSpec(TierKind.DISK, MILLION),))
    replica = Replica(spec)
    size = replica.digest_size
    rows = Entries(size, [KeyRun("", 0, MILLION)], range(spec.num_blocks, spec.num_stamps), versions)
    rows.num_tokens, rows.age = [0] * MILLION, [0] * MILLION
    rows.digests = b"".join(at.to_bytes(size, "little") for at in range(MILLION))
    table = [0] * spec.num_blocks + list(versions)
    began = time.process_time()
    state = replica.verify_entries([table], [rows])
    verified_s = time.process_time() - began
    began = time.process_time()
    replica.install_recovered(state)
    installed_s = time.process_time() - began
    assert len(replica.tiers.each[0].key) == MILLION
    total = index_s + verified_s + installed_s
    parts = f"index {index_s:.2f}, verified {verified_s:.2f}, installed {installed_s:.2f}"
    return goal("N9", f"restart with {MILLION:,} slots, seconds of CPU time: {parts}", total, most=2)


def main() -> int:
    """Print the figures; returns whether one misses its goal."""
    torch.set_num_threads(1)
    reached = [figure() for figure in (disk, look_up, restart)]
    return not all(reached)


if __name__ == "__main__":
    sys.exit(main())
