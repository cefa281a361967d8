"""No page that a step reads is wrong, whatever is preempted, aborted, loaded and saved meanwhile."""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory

import pytest

from kvplane.base.groups import SavePolicy
from kvplane_vllm.tiers import rank
from kvplane_vllm.tiers.copier import Copier
from tests.vllm.tier_world import World, options

STEPS = 100


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


def played(seed, settings, lag=0):
    world = World(seed, settings, lag)
    try:
        world.run(STEPS)
    finally:
        world.rank.close()
    return world


@pytest.mark.parametrize(
    ("save", "lag"),
    [(None, 0), (None, 2), (SavePolicy.THROUGH, 2), (SavePolicy.REUSE, 0), (SavePolicy.BEHIND, 1)],
    ids=["host", "host, steps in flight", "through", "reuse", "behind"],
)
def test_every_page_that_is_read_is_right(save, lag, tmp_path, monkeypatch):
    slowed(monkeypatch)
    settings = options(600) if save is None else options(70, tmp_path / "disk", 300, save)
    world = played(7 + lag, settings, lag)
    counts, replica = world.planner.counts, world.planner.host.replica
    assert (world.wrong, counts.mismatched, counts.unsaved) == (0, 0, 0)
    assert world.checked > 500
    assert world.preempted > 0
    assert counts.loaded_tokens > 200
    assert save is None or replica.tiers.counters.saved > 20
    assert (replica.block_counts.held, set(replica.tiers.open_jobs().values())) == (0, {0})


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
