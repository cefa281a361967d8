"""Movers: what is loaded is what was saved, or the job fails and no page changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from kvplane.base.errors import OutOfMemory, StaleEpoch
from kvplane.base.groups import TierKind, TierSpec
from kvplane_kernels.torch_ops import TorchOps
from kvplane_plan.planner import Layout
from kvplane_worker.pages import PageBuffers
from kvplane_worker.tiers import DiskSlots, HostSlots, Movers, movers
from kvplane_worker.tiers.movers import NUM_THREADS
from kvplane_worker.tiers.seal import HEADER_BYTES, UNSEALED, Content
from kvplane_worker.tiers.slots import aligned
from tests.worker.test_page_buffers import BLOCKS, rank_plan
from tests.worker.tier_rig import EPOCH, IDENTITY, SLOTS, STAMP, WAIT_S, Rig

CORRUPTIONS = 300
TARGET = 12  # the first page that damaged slots are loaded into
AT_ONCE = BLOCKS - TARGET


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.movers.close()


@pytest.mark.parametrize("layout", list(Layout))
def test_loaded_pages_are_equal_to_the_saved_ones(layout):
    rig = Rig(layout)
    for group in range(rig.pages.num_groups):
        saved = {block: rig.page(group, block) for block in (3, 1, 7, 8)}
        for at, block in enumerate(saved):
            rig.save(group * 100 + at + 1, block, at, group)
        assert all(rig.until(group * 100 + at + 1) for at in range(4))
        rig.load(group * 100 + 50, [(at, group * 100 + at + 1, 12 + at) for at in range(4)], group)
        assert rig.until(group * 100 + 50)
        assert [rig.page(group, 12 + at) for at in range(4)] == list(saved.values())
    assert rig.slots.counts.loaded == rig.slots.counts.saved == 4 * rig.pages.num_groups
    rig.movers.close()


def test_a_save_of_a_page_that_changed_is_discarded(rig: Rig):
    rig.save(1, 3, 0, stamp=STAMP)
    assert not rig.until(1)
    assert rig.slots.held(0) == (0, 0)
    assert rig.slots.counts.discarded == 1


def test_a_save_of_a_page_that_changes_meanwhile_is_discarded():
    class Hasty(TorchOps):
        def gather(self, group, blocks, staging):
            super().gather(group, blocks, staging)
            made.stamps.write(blocks, [999])

    made = Rig(ops=Hasty())
    made.save(1, 3, 0)
    assert not made.until(1)
    made.load(2, [(0, 1, 9)])
    assert not made.until(2)
    made.movers.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_saves_of_a_part_are_copied_together_and_those_that_fail_fail_alone(tmp_path, kind):
    """One copy for each run of slots, one end for each run of jobs with one result."""

    class Counts(TorchOps):
        def gather(self, group, blocks, staging):
            copied.append(list(blocks))
            super().gather(group, blocks, staging)
            made.stamps.write([6], [999])

    copied = list[list[int]]()
    made, tier = Rig(ops=Counts(), disk=tmp_path), int(kind == "disk")
    saved = {block: made.page(0, block) for block in range(3, 11)}
    rows = [made.row_of_save(100 + at, 3 + at, 20 + at + (at > 5))._replace(tier=tier) for at in range(8)]
    rows[1] = rows[1]._replace(stamp=7)
    rows.append(rows[-1]._replace(job=108, version=108, slot=SLOTS))
    rows.append(rows[-1]._replace(job=109, version=109, slot=30, block=BLOCKS))
    made.save_all(rows)
    results = [made.until(job) for job in range(100, 110)]
    assert results == [True, False, True, False, True, True, True, True, False, False]
    assert copied == [[3, 4, 5, 6, 7, 8], [9, 10]]
    ends = [(100, 1, True), (101, 1, False), (102, 1, True), (103, 1, False), (104, 4, True), (108, 2, False)]
    assert made.table.ends_from(0) == ends
    slots = made.movers.tiers[tier]
    assert (slots.counts.saved, slots.counts.discarded, slots.counts.failed) == (6, 2, 0)
    first = made.movers._place.first_id(tier)
    held = [made.stamps.read(first + row.slot) for row in rows[:8]]
    assert held == [job if is_good else 0 for job, is_good in zip(range(100, 108), results, strict=False)]
    made.stamps.write([6], [STAMP + 6])
    for at, (block, page) in enumerate(saved.items()):
        made.load(200 + at, [(rows[at].slot, 100 + at, 12 + at)], tier=tier)
        assert made.until(200 + at) == results[at]
        assert not results[at] or made.page(0, 12 + at) == page, block
    made.movers.close()


def test_a_thread_takes_no_more_saves_at_once_than_a_piece(monkeypatch):
    pages = PageBuffers.allocate(rank_plan(Layout.LAYER_OUTERMOST))
    width = max(pages.group(group).bytes_per_block for group in range(pages.num_groups))
    monkeypatch.setattr(movers, "PIECE_BYTES", 3 * aligned(width))
    made = Rig()
    taken, real = list[int](), made.movers._carry_out
    made.movers._carry_out = lambda job: taken.append(len(job.rows)) or real(job)  # type: ignore[method-assign,func-returns-value]
    made.save_all([made.row_of_save(1 + at, 1 + at, at) for at in range(8)])
    assert all(made.until(job) for job in range(1, 9))
    assert sorted(taken) == [2, 3, 3]
    made.movers.close()


@pytest.mark.parametrize(
    "changes", [{"version": 2}, {"slot": 1}, {"group": 1}, {"stamp": 5}, {"epoch": EPOCH - 1}, {"epoch": EPOCH + 1}]
)
def test_a_load_of_anything_else_than_was_saved_changes_no_page(rig: Rig, changes):
    rig.save(1, 3, 0)
    rig.save(7, 4, 1)
    assert rig.until(1)
    assert rig.until(7)
    before = rig.pages.memory.clone()
    rig.load(2, [(0, 1, 9)], **changes)
    assert not rig.until(2)
    assert rig.pages.memory.equal(before)


@pytest.mark.parametrize("seed", range(0, CORRUPTIONS, 100))
def test_a_damaged_slot_is_never_scattered(rig: Rig, seed):
    count_unscattered(rig, range(seed, seed + 100))


def count_unscattered(rig: Rig, seeds: range) -> int:
    """Damage the slot of a saved page in one way per seed, and load it; returns how many loads failed: all.

    AT_ONCE at a time, each with its own two slots and its own page to load into.
    """
    for first in range(0, len(seeds), AT_ONCE):
        cases = [(seed, 10 * (seed + 1), Random(seed), 2 * at) for at, seed in enumerate(seeds[first:][:AT_ONCE])]
        groups = [rng.randrange(rig.pages.num_groups) for _, _, rng, _ in cases]
        for (_, job, rng, slot), group in zip(cases, groups, strict=True):
            rig.save(job, rng.randrange(1, TARGET), slot, group)
            rig.save(job + 1, rng.randrange(1, TARGET), slot + 1, group)
        for (_, job, rng, slot), group in zip(cases, groups, strict=True):
            assert rig.until(job)
            assert rig.until(job + 1)
            damage(rig.slots, slot, rng, rig.pages.group(group).bytes_per_block)
        before = rig.pages.memory.clone()
        for (_, job, _, slot), group in zip(cases, groups, strict=True):
            rig.load(job + 2, [(slot, job, TARGET + slot // 2)], group)
        for seed, job, _, _ in cases:
            assert not rig.until(job + 2), f"seed {seed}: the damaged slot was loaded"
        assert rig.pages.memory.equal(before), f"seeds {[seed for seed, *_ in cases]}: a page changed"
    return len(seeds)


def damage(slots: HostSlots, slot: int, rng: Random, num_bytes: int) -> None:
    """Flip bits of payload or header, cut, take the next slot's bytes, header or both, or an older content."""
    row, other = slots._rows[slot], slots._rows[slot + 1]
    how = rng.randrange(7)
    if how == 0:
        row[rng.randrange(num_bytes)] ^= 1 << rng.randrange(8)
    elif how == 1:
        header = bytearray(slots._header(slot))
        header[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        slots._set_header(slot, bytes(header))
    elif how == 2:
        row[rng.randrange(num_bytes) : num_bytes] ^= 0xFF
    elif how == 3:
        row.copy_(other)
        row[0] ^= 1  # the other page may be the same one
    elif how == 4:
        slots._set_header(slot, slots._header(slot + 1))
    elif how == 5:
        row.copy_(other)
        slots._set_header(slot, slots._header(slot + 1))
    else:
        slots._set_header(slot, UNSEALED)


def test_the_seal_names_everything_that_gives_the_bytes_their_meaning():
    payload = memoryview(bytes(range(100)))
    content = Content(IDENTITY, 0, 3, 1, 9)
    others = [
        Content(b"another identity", 0, 3, 1, 9),
        Content(IDENTITY, 1, 3, 1, 9),
        Content(IDENTITY, 0, 4, 1, 9),
        Content(IDENTITY, 0, 3, 2, 9),
        Content(IDENTITY, 0, 3, 1, 10),
    ]
    seals = [content.seal(payload), content.seal(payload[:99]), *(other.seal(payload) for other in others)]
    assert len(set(seals)) == len(seals)
    assert content.seal(payload) == seals[0]


def test_a_load_waits_for_the_step_before_it(rig: Rig):
    rig.save(1, 3, 0)
    assert rig.until(1)
    rig.step(2)
    rig.load(2, [(0, 1, 9)], seq=2, after=1)
    rig.load(3, [(0, 1, 10)])  # another one need not wait
    assert rig.until(3)
    assert 2 not in rig.ended
    rig.stamps.set_executed(1)
    assert rig.until(2)


def test_a_load_waits_for_orders_that_the_device_carries_out(rig: Rig):
    rig.save(1, 3, 0)
    assert rig.until(1)
    rig.stamps.begin(2, 0)
    rig.stamps.finish(moving=True)
    rig.load(2, [(0, 1, 9)], seq=2)
    rig.save(3, 4, 1)
    assert rig.until(3)
    assert 2 not in rig.ended
    rig.stamps.moves_ended(2)
    assert rig.until(2)


# -- engine lives ----------------------------------------------------------------------------------------------------


class Stopping(TorchOps):
    """The second write of pages stops until `go` is set."""

    def __init__(self) -> None:
        self.go, self.reached, self.writes = threading.Event(), threading.Event(), 0

    def scatter(self, group, blocks, staging):
        self.writes += 1
        if self.writes == 2:
            self.reached.set()
            assert self.go.wait(WAIT_S)
        super().scatter(group, blocks, staging)


@pytest.fixture
def stopped() -> Iterator[tuple[Rig, Stopping]]:
    """A load of three pieces that stops in the second one."""
    ops = Stopping()
    rig = Rig(ops=ops)
    for at in range(3):
        rig.save(at + 1, 3 + at, 2 * at)  # no two slots follow each other
        assert rig.until(at + 1)
    rig.load(9, [(2 * at, at + 1, 15 + at) for at in range(3)])
    assert ops.reached.wait(WAIT_S)
    yield rig, ops
    ops.go.set()
    rig.movers.close()


def test_a_claim_waits_for_no_load_and_lists_what_is_being_written(stopped):
    rig, ops = stopped
    last = rig.page(0, 17)
    assert rig.movers.claim(EPOCH + 1) == (16,)
    assert rig.movers.written == (16,)
    assert rig.table.life == EPOCH
    ops.go.set()
    assert not rig.until(9)
    assert rig.page(0, 17) == last, "a piece began after the claim"
    until(lambda: rig.table.life == EPOCH + 1)
    assert rig.movers.written == ()
    with pytest.raises(StaleEpoch):
        rig.movers.claim(EPOCH + 1)


@pytest.mark.parametrize("is_locked", [False, True], ids=["no lock", "a lock, planted"])
def test_no_lock_is_held_while_bytes_move(tmp_path, monkeypatch, is_locked):
    """Claims, and who asks what is written, wait for no piece of a save, a load or a move."""
    seen, of_slots = set[tuple[type, str]](), (HostSlots, DiskSlots)
    acts: set[tuple[type, str]] = {(TorchOps, "gather"), (TorchOps, "scatter")}
    acts |= {(kind, act) for kind in of_slots for act in ("read", "write")}
    watched = list[Movers]()

    def watch(owner, name):
        real = getattr(owner, name)

        def act(*given):
            assert not watched[0]._lock._is_owned(), f"a lock is held in {name}"  # type: ignore[attr-defined]
            seen.add((owner, name))
            return real(*given)

        monkeypatch.setattr(owner, name, act)

    for one in acts:
        watch(*one)
    carry_out = Movers._carry_out

    def locked(self, job):
        with self._lock:
            return carry_out(self, job)

    if is_locked:
        monkeypatch.setattr(Movers, "_carry_out", locked)
    rig = Rig(disk=tmp_path)
    watched.append(rig.movers)
    rig.save(1, 3, 0)
    assert rig.until(1) is not is_locked
    if not is_locked:
        rig.move(2, 0, 1, 0)
        assert rig.until(2)
        rig.load(3, [(0, 2, 9)], tier=1)
        assert rig.until(3)
        assert seen == acts
    rig.movers.close()


def test_no_job_of_a_new_life_begins_while_a_mover_works_for_an_earlier_one(stopped):
    rig, ops = stopped
    rig.movers.claim(EPOCH + 1)
    rig.save(20, 5, 1, epoch=EPOCH + 1)
    rig.save(21, 5, 3, epoch=EPOCH)
    assert not rig.until(21)  # of the earlier life: it does not begin
    assert 20 not in rig.ended
    ops.go.set()
    assert rig.until(20)
    assert rig.ended[9] is False


def test_of_idle_threads_one_looks_at_the_job_table(rig: Rig):
    """Also after jobs; a thread that looks does so every few milliseconds."""
    for job in range(1, 20):
        rig.save(job, job % 11 + 1, job)
        assert rig.until(job)
    looking, real = list[str](), rig.table.take

    def take():
        looking.append(threading.current_thread().name)
        return real()

    rig.table.take = take  # type: ignore[method-assign]
    until(lambda: len(looking) > 20)
    assert len(set(looking[1:])) == 1


def test_jobs_are_carried_out_while_other_threads_wait_for_a_disk():
    class Waits(TorchOps):
        def gather(self, group, blocks, staging):
            if blocks[0] < NUM_THREADS:
                assert go.wait(WAIT_S)
            super().gather(group, blocks, staging)

    go = threading.Event()
    rig = Rig(ops=Waits())
    for job in range(1, NUM_THREADS):
        rig.save(job, job, job)
    for job in range(NUM_THREADS, 20):
        rig.save(job, NUM_THREADS + job % 5, job)
    assert all(rig.until(job) for job in range(NUM_THREADS, 20))
    assert len(rig.ended) == 20 - NUM_THREADS
    go.set()
    assert all(rig.until(job) for job in range(1, NUM_THREADS))
    rig.movers.close()


def test_a_bug_in_a_job_fails_it_and_the_next_one_runs():
    class Broken(TorchOps):
        def gather(self, group, blocks, staging):
            if blocks == [3]:
                raise RuntimeError("a bug")
            super().gather(group, blocks, staging)

    rig = Rig(ops=Broken(), num_threads=1)
    rig.save(1, 3, 0)
    rig.save(2, 4, 1)
    assert (rig.until(1), rig.until(2)) == (False, True)
    rig.movers.close()


def test_a_tier_that_does_not_fit_is_refused():
    with pytest.raises(OutOfMemory, match="of what is free") as refused:
        HostSlots(TierSpec(TierKind.HOST, 1 << 22), 1 << 30, "cpu")
    assert 0 < int(refused.value.metadata["num_blocks"]) < 1 << 22


def until(holds) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_a_move_whose_slot_was_given_away_is_no_damage(tmp_path):
    """The core gives a slot away while its copy is moved; what lost its bytes under its version is damaged."""
    rig = Rig(disk=tmp_path)
    rig.disk.begin(None)
    rig.save(1, 3, 0)
    rig.save(2, 4, 1)
    assert rig.until(1)
    assert rig.until(2)
    rig.save(3, 5, 0)
    assert rig.until(3)
    host = rig.movers.tiers[0]
    rig.move(4, 0, 1, 7)
    assert not rig.until(4)
    assert (host.counts.discarded, host.counts.refused) == (1, 0)
    host._rows[1, 0] ^= 1  # type: ignore[attr-defined]
    rig.move(5, 1, 2, 8)
    assert not rig.until(5)
    assert (host.counts.discarded, host.counts.refused) == (1, 1)
    rig.movers.close()


def test_a_move_seals_no_bytes_that_were_written_after_it_read_them(tmp_path, monkeypatch):
    """A tier in host memory is read in place: another job writes the slot between its verification and the copy."""
    rig = Rig(disk=tmp_path)
    rig.disk.begin(None)
    rig.save(1, 3, 0)
    assert rig.until(1)
    write = DiskSlots.write

    def late(self, contents, num_bytes, fill):
        rig.save(2, 5, 0)
        assert rig.until(2)
        return write(self, contents, num_bytes, fill)

    monkeypatch.setattr(DiskSlots, "write", late)
    rig.move(3, 0, 1, 7)
    assert not rig.until(3)
    assert rig.stamps.read(rig.movers._place.first_id(1) + 7) == 0
    assert rig.disk.held(7) == (0, 0)
    host = rig.movers.tiers[0]
    assert (host.counts.discarded, host.counts.refused, rig.disk.counts.saved) == (1, 0, 0)
    rig.movers.close()
