"""No page that a step reads is wrong, whatever is preempted, aborted, loaded and saved meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest

from kvplane.base.groups import SavePolicy
from kvplane_vllm.tiers import rank
from kvplane_vllm.tiers.copier import Copier
from kvplane_vllm.tiers.planner import Planner
from tests.vllm.tier_world import BLOCK, NUM_BLOCKS, World, options
from tests.vllm.tier_world_hits import SharingWorld
from tests.vllm.tier_world_states import StateWorld

STEPS, MOST_SEEDS = 100, 20


@pytest.fixture(autouse=True)
def named_content(monkeypatch):
    monkeypatch.setattr(rank, "content_of", lambda *_: bytes(range(16)))
    with TemporaryDirectory(prefix="kvplane-") as folder:  # its path is short enough for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def slowed(monkeypatch):
    save = Copier.save

    def later(self, copies):
        time.sleep(0.002)
        save(self, copies)

    monkeypatch.setattr(Copier, "save", later)


def played(seed, settings, lag=0, kind=World, worlds=1, **more):
    """Play a number of worlds at most, until one preempts: when memory runs short depends on the movers."""
    for number in range(worlds):
        world = kind(seed + 100 * number, settings, lag, **more)
        try:
            world.run(STEPS)
        finally:
            world.rank.close()
        if world.preempted or world.wrong:
            break
    return world


@pytest.mark.parametrize(
    ("save", "lag"),
    [(None, 0), (None, 2), (SavePolicy.THROUGH, 2), (SavePolicy.REUSE, 0), (SavePolicy.BEHIND, 1)],
    ids=["host", "host, steps in flight", "through", "reuse", "behind"],
)
def test_every_page_that_is_read_is_right(save, lag, tmp_path, monkeypatch):
    slowed(monkeypatch)
    settings = options(600) if save is None else options(70, tmp_path / "disk", 300, save)
    world = played(7 + lag, settings, lag, worlds=10)
    counts, replica = world.planner.counts, world.planner.host.replica
    assert (world.wrong, counts.mismatched, counts.unsaved) == (0, 0, 0)
    assert world.checked > 500
    assert world.preempted > 0
    assert counts.loaded_tokens > 200
    assert save is None or replica.tiers.counters.saved > 20
    assert (replica.block_counts.held, set(replica.tiers.open_jobs().values())) == (0, {0})


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
def test_no_load_has_fewer_tokens_than_the_option(has_disk, tmp_path, monkeypatch):
    take, taken = Planner.take, list[int]()

    def noted(self, request, tables, num_external):
        taken.extend([num_external] if num_external else [])
        take(self, request, tables, num_external)

    monkeypatch.setattr(Planner, "take", noted)
    least = 6 * BLOCK
    settings = options(70, tmp_path / "disk", 300) if has_disk else options(600)
    world = played(9, replace(settings, min_load=least), 1)
    assert (world.wrong, world.planner.counts.mismatched) == (0, 0)
    assert min(taken) >= least
    assert not has_disk or world.planner.counts.fetched_loads > 0


@pytest.mark.parametrize("window", [3, 8], ids=["window within a block", "window of two blocks"])
@pytest.mark.parametrize(("has_disk", "lag"), [(False, 0), (False, 2), (True, 1)])
def test_loads_behind_hits_of_the_engines_own_are_right(has_disk, lag, window, tmp_path, monkeypatch):
    """Plays schedules until some load began behind such a hit: how often that happens depends on the machine."""
    slowed(monkeypatch)
    mixed = 0
    for seed in range(MOST_SEEDS):
        settings = options(70, tmp_path / f"{seed}", 300) if has_disk else options(600)
        world = played(seed, settings, lag, SharingWorld, window=window)
        counts, replica = world.planner.counts, world.planner.host.replica
        assert (world.wrong, counts.mismatched) == (0, 0)
        assert min(world.checked, counts.loaded_tokens) > 0
        assert len(world.free) == NUM_BLOCKS - 1
        assert (replica.block_counts.held, set(replica.tiers.open_jobs().values())) == (0, {0})
        mixed += world.mixed
        if mixed:
            break
    assert mixed > 0


def test_a_load_that_begins_before_the_engines_own_hit_ends_is_found(monkeypatch):
    """The planted fault: what is loaded is a block too early."""
    copies = Planner._copies

    def early(self, shadow, tables, first, end, to_device=False):
        return copies(self, shadow, [[0, *table] for table in tables] if to_device else tables, first, end, to_device)

    monkeypatch.setattr(Planner, "_copies", early)
    world = played(11, options(600), 0, SharingWorld)
    assert world.wrong + world.planner.counts.mismatched > 0


@pytest.mark.parametrize(
    ("has_disk", "lag"), [(False, 0), (False, 2), (True, 1)], ids=["host", "host, steps in flight", "disk"]
)
def test_states_that_are_restored_are_those_at_the_end_of_the_load(has_disk, lag, tmp_path, monkeypatch):
    slowed(monkeypatch)
    world = played(5 + lag, options(70, tmp_path, 300) if has_disk else options(600), lag, StateWorld, 10)
    counts, replica = world.planner.counts, world.planner.host.replica
    assert (world.wrong, counts.mismatched, counts.unsaved) == (0, 0, 0)
    assert min(world.checked, counts.loaded_tokens) > 200
    assert world.preempted > 0
    assert (replica.block_counts.held, set(replica.tiers.open_jobs().values())) == (0, {0})


def test_a_state_that_is_kept_with_another_length_is_found(monkeypatch):
    """The planted fault: the state behind a block is kept as that behind the block before."""
    state_of = Planner._state_of

    def shorter(self, name, end, output):
        last, blocks = state_of(self, name, end, output)
        return max(0, last - BLOCK), blocks

    monkeypatch.setattr(Planner, "_state_of", shorter)
    assert played(5, options(600), 0, StateWorld).wrong > 0


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("kind", [World, StateWorld])
def test_pages_are_right_where_blocks_are_zeroed_before_the_connector_is_called(kind, lag, monkeypatch):
    """Plays schedules until some save was voided: how often that happens depends on the machine."""
    slowed(monkeypatch)
    for seed in range(MOST_SEEDS):
        world = played(seed, options(600), lag, kind, is_v2=True)
        counts, replica = world.planner.counts, world.planner.host.replica
        assert (world.wrong, counts.mismatched, replica.block_counts.held) == (0, 0, 0)
        assert min(world.checked, counts.loaded_tokens) > 100
        if counts.unsaved:
            break
    assert counts.unsaved > 0


def test_a_save_of_blocks_that_are_zeroed_before_is_found(monkeypatch):
    """The planted fault: it is not voided."""
    monkeypatch.setattr(Planner, "_void", lambda _: None)
    assert played(7, options(600), worlds=10, is_v2=True).wrong > 0


def test_without_the_fence_pages_are_wrong(monkeypatch):
    slowed(monkeypatch)
    monkeypatch.setattr(Copier, "fence", lambda self, blocks: None)
    assert played(7, options(600)).wrong > 0


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize("fails", [[10], range(10, 4000)], ids=["once", "from then on"])
def test_copies_that_fail_cost_hits_and_let_all_requests_end(method, fails, monkeypatch):
    copy, count = getattr(Copier, method), 0

    def failing(self, copies):
        nonlocal count
        count += 1
        if count in fails:
            raise MemoryError("planted")
        copy(self, copies)

    monkeypatch.setattr(Copier, method, failing)
    world = played(3, options(600))
    assert count >= 10
    assert world.wrong == 0
