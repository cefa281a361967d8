"""Transfers: verified by stamps before and after, and refused as a whole when the order is invalid."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.torch_ops import TorchOps
from kvplane_plan.planner import Layout, to_rank_plan
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.transfers import MAX_BLOCKS_PER_CALL, Outcome, Transfer, TransferKind, checksum, transfer
from tests.plan.layers import full, named, plan, window
from tests.worker.rig import refusal

BLOCKS = 24
OPS = TorchOps()
COPY, ZERO, GATHER, SCATTER = TransferKind


@pytest.fixture(params=list(Layout))
def held(request, tmp_path: Path):
    place = RunDir(tmp_path / "r")
    layers = named(f=(2, full()), w=(2, window()))
    options = {"num_blocks": BLOCKS, "max_model_len": 64, "max_batched_tokens": 16}
    rank = to_rank_plan(plan(layers, layout=request.param, **options))
    holdings = Holdings.allocate(rank, "cpu", place, staging_bytes=8 * rank.bytes_per_block)
    noise = torch.randint(0, 256, (holdings.buffers.memory.numel() - 8,), generator=torch.manual_seed(1))
    holdings.buffers.memory[8:] = noise.to(torch.uint8)
    holdings.stamps.write(range(1, BLOCKS), range(101, 100 + BLOCKS))
    yield holdings
    holdings.close()
    place.leave()


def page(holdings: Holdings, group: int, block: int) -> bytes:
    return b"".join(bytes(layer[block].tolist()) for layer in holdings.buffers.group(group).layers)


@dataclass
class Hasty(TorchOps):
    """Change the content of a page during a transfer."""

    holdings: Holdings
    block: int

    def _meanwhile(self):
        self.holdings.stamps.write([self.block], [999])

    def copy_pages(self, group, src, dst):
        super().copy_pages(group, src, dst)
        self._meanwhile()

    def gather(self, group, blocks, staging):
        super().gather(group, blocks, staging)
        self._meanwhile()

    def checksum(self, group, blocks):
        self._meanwhile()
        return super().checksum(group, blocks)


def test_gather_and_scatter_round_trip(held: Holdings):
    pages = [page(held, 0, block) for block in (3, 1, 7)]
    outcome = transfer(held, OPS, Transfer(GATHER, 0, (3, 1, 7), first_row=2))
    assert (outcome.stamps, outcome.discarded) == ((103, 101, 107), ())
    assert [bytes(row.tolist()) for row in held.staging_rows(0, 2, 3)] == pages
    transfer(held, OPS, Transfer(SCATTER, 0, (9, 8, 2), first_row=2))
    assert [page(held, 0, block) for block in (9, 8, 2)] == pages


def test_copy_and_zero_act_in_order(held: Holdings):
    first = page(held, 1, 1)
    assert transfer(held, OPS, Transfer(COPY, 1, (1, 2), dst_blocks=(2, 3))).discarded == ()
    assert page(held, 1, 2) == page(held, 1, 3) == first
    others = [page(held, 0, block) for block in range(3)]
    transfer(held, OPS, Transfer(ZERO, 0, (4, 5)))
    assert set(page(held, 0, 4) + page(held, 0, 5)) == {0}
    assert [page(held, 0, block) for block in range(3)] == others


@pytest.mark.parametrize("kind", [COPY, GATHER])
def test_page_that_changes_during_a_transfer_is_discarded(held: Holdings, kind):
    targets = (7, 8, 9) if kind is COPY else ()
    outcome = transfer(held, Hasty(held, 2), Transfer(kind, 0, (1, 2, 3), targets))
    assert (outcome.stamps, outcome.discarded) == ((101, 102, 103), (1,))


@pytest.mark.parametrize("kind", list(TransferKind))
def test_page_with_an_unexpected_stamp_is_not_moved(held: Holdings, kind):
    targets = (7, 8, 9, 10) if kind is COPY else ()
    changed = (7, 8, 9, 10) if kind is COPY else (1, 2, 3, 4)
    before = [page(held, 0, block) for block in changed]
    held.staging.fill_(5)
    outcome = transfer(held, OPS, Transfer(kind, 0, (1, 2, 3, 4), targets, 0, (101, 5, 103, 104)))
    assert outcome.discarded == (1,)
    after = [page(held, 0, block) for block in changed]
    assert after[1] == before[1]
    if kind is GATHER:
        rows = [bytes(row.tolist()) for row in held.staging_rows(0, 0, 4)]
        assert rows == [before[0], b"\5" * len(before[1]), *before[2:]]
    else:
        assert all(one != other for at, (one, other) in enumerate(zip(before, after, strict=True)) if at != 1)


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_pages_with_the_expected_stamps_are_moved_and_all_others_discarded(held: Holdings, seed):
    """Random stamps, expected or not, and pages listed twice: staging rows of discarded pages keep their bytes."""
    drawn = random.Random(seed)
    blocks = tuple(drawn.choices(range(1, BLOCKS), k=drawn.randrange(9)))
    expected = tuple(100 + block if drawn.random() < 0.6 else 2**64 - 1 for block in blocks)
    held.staging[:] = 7
    outcome = transfer(held, OPS, Transfer(GATHER, 0, blocks, expected_stamps=expected))
    wrong = [at for at, block in enumerate(blocks) if expected[at] != 100 + block]
    assert outcome == Outcome(tuple(100 + block for block in blocks), tuple(wrong) if expected else ())
    for at, block in enumerate(blocks):
        row = bytes(held.staging_rows(0, at, 1)[0].tolist())
        assert row == (bytes([7]) * len(row) if at in wrong else page(held, 0, block))


def test_a_page_listed_many_times_is_named_once_and_at_once(held: Holdings):
    """Counting each page of a list that names one 65,536 times took four billion comparisons."""
    refused = refusal(transfer, held, OPS, Transfer(SCATTER, 0, (3,) * MAX_BLOCKS_PER_CALL))
    assert "the pages [3] are listed twice" in str(refused)


def test_checksums_differ_between_pages_and_discard_changed_ones(held: Holdings):
    outcome = checksum(held, OPS, 0, [1, 2, 1])
    assert outcome.checksums[0] == outcome.checksums[2] != outcome.checksums[1]
    assert (outcome.stamps, outcome.discarded) == ((101, 102, 101), ())
    held.buffers.group(0).layers[1][2, 77] ^= 1
    assert checksum(held, OPS, 0, [2]).checksums != outcome.checksums[1:2]
    assert checksum(held, Hasty(held, 2), 0, [1, 2]).discarded == (1,)
    assert checksum(held, OPS, 0, []).checksums == ()


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (Transfer(COPY, 0, (BLOCKS,), (1,)), "blocks"),
        (Transfer(COPY, 0, (1,), (BLOCKS,)), "dst_blocks"),
        (Transfer(COPY, 0, (1,), (0,)), "dst_blocks"),
        (Transfer(COPY, 0, (1, 2), (3,)), "dst_blocks"),
        (Transfer(ZERO, 0, (1,), (2,)), "dst_blocks"),
        (Transfer(ZERO, 0, (1, 0)), "blocks"),
        (Transfer(ZERO, 9, (1,)), "group"),
        (Transfer(ZERO, 0, (1,) * 65537), "blocks"),
        (Transfer(SCATTER, 0, (1, 1)), "blocks"),
        (Transfer(SCATTER, 0, (0,)), "blocks"),
        (Transfer(SCATTER, 0, (1, 2), first_row=7), "first_row"),
        (Transfer(GATHER, 0, (1,), first_row=8), "first_row"),
        (Transfer(GATHER, 0, (1, 2), expected_stamps=(101,)), "expected_stamps"),
    ],
)
def test_invalid_transfer_moves_nothing(held: Holdings, order: Transfer, field):
    before = held.buffers.memory.clone(), held.staging.clone(), held.stamps.snapshot()
    error = refusal(transfer, held, OPS, order)
    assert (type(error), error.field) == (InvalidArgument, field)
    assert torch.equal(held.buffers.memory, before[0])
    assert torch.equal(held.staging, before[1])
    assert held.stamps.snapshot() == before[2]
