"""The cuDNN backend, on a fake of cuDNN's frontend: which rows it takes, spans, plans, fallbacks.

`python -m tests.bench.gpu --only correct` checks the contract with the real one, on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvplane_kernels import select
from kvplane_kernels.cudnn_ops import backend, calls, entry
from kvplane_kernels.cudnn_ops.backend import CudnnOps
from kvplane_kernels.cudnn_ops.rows import Limits, Split, spans_of, split
from kvplane_kernels.interface import PAGE_OPERATIONS, AttentionPages, AttentionRule, Batch, LayerAttention
from kvplane_kernels.proof import load, prove
from kvplane_kernels.torch_ops import TorchOps
from tests.kernels import cases
from tests.kernels.contract import CHECKS, Subject, run
from tests.kernels.cudnn_twin import Faults, Library
from tests.kernels.subjects import HALVES

CPU = torch.device("cpu")
# Every row of a case is long, and a few blocks fill the workspace.
SMALL = Limits(products=1, pairs=1, shared=1, room_bytes=1 << 20)
SEEDS, LEAST_ROWS, LEAST_FOLDS = 240, 120, 10


def made(faults: Faults = Faults(), limits: Limits = Limits()) -> CudnnOps:  # noqa: B008 - frozen
    return CudnnOps(TorchOps(), Library(faults), limits)


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """A list of the calls of a function of the backend, which grows."""
    calls: list[object] = []
    called = getattr(backend, name)

    def counted(*given: object) -> object:
        calls.append(given)
        return called(*given)

    monkeypatch.setattr(backend, name, counted)
    return calls


# ---- the contract, on the fake


@pytest.fixture
def halves(monkeypatch):
    """Draw mostly supported heads, and rules without sinks most of the time."""
    monkeypatch.setattr(cases, "HEAD_SIZES", (8, 64, 64, 128, 40, 5))
    drawn = cases.draw_rule

    def plain(rng: np.random.Generator, *given):
        rule = drawn(rng, *given)
        return rule if rng.random() < 0.1 else replace(rule, sinks=None, chunk=0, soft_cap=0.0, slopes=None)

    monkeypatch.setattr(cases, "draw_rule", plain)


def test_cudnn_backend_keeps_the_contract_on_random_cases(halves, monkeypatch):
    folds = calls_of(monkeypatch, "fold")
    ops = made(limits=SMALL)
    few = CudnnOps(TorchOps(), ops._library, replace(SMALL, room_bytes=1 << 16))
    for each, seeds in ((ops, range(SEEDS // 2)), (few, range(SEEDS // 2, SEEDS))):
        failures = run(Subject(each, formats=HALVES), "prefill_attention", seeds)
        assert not failures, failures
    assert ops.rows + few.rows >= LEAST_ROWS
    assert len(folds) >= LEAST_FOLDS


@pytest.mark.parametrize(
    "faults",
    [
        Faults(window=1),
        Faults(scale=0.2),
        Faults(from_the_top=True),
        Faults(reads_past_the_end=True),
        Faults(writes_past_the_end=True),
        Faults(base_2=True),
    ],
)
def test_contract_catches_a_faulty_cudnn(halves, faults):
    ops = made(faults, replace(SMALL, room_bytes=1 << 16))
    assert any(run(Subject(ops, formats=HALVES), "prefill_attention", [seed]) for seed in range(60))


def test_other_operations_use_the_other_backend():
    for operation in CHECKS.keys() - {"prefill_attention"}:
        assert not run(Subject(made(limits=SMALL)), operation, range(3))


@pytest.mark.parametrize(
    "faults",
    [Faults(scale=0.2), Faults(from_the_top=True), Faults(reads_past_the_end=True), Faults(writes_past_the_end=True)],
)
def test_faulty_cudnn_fails_the_start_check(faults):
    assert prove(made(faults), CPU, ["prefill_attention"]).failure.startswith("prefill_attention (a long row): ")


def test_correct_cudnn_passes_the_start_check_with_a_long_row():
    ops = made()
    assert not prove(ops, CPU, ["prefill_attention"]).failure
    assert ops.rows == 2
    failure = prove(made(Faults(window=1)), CPU, ["prefill_attention"]).failure
    assert failure.startswith("prefill_attention (a long row, window): ")


# ---- rows and spans

SHAPE = calls.Shape(8, 2, 64, torch.float16, 0.1, 0, True, 1024, 96)
MANY = Limits(products=64, pairs=1, shared=16)


def batch_of(lengths: list[int], counts: list[int], block_size: int = 16, tree: torch.Tensor | None = None) -> Batch:
    columns = -(-max(lengths) // block_size)
    table = torch.arange(1, 1 + len(lengths) * columns, dtype=torch.int32).view(len(lengths), columns)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return Batch(table, torch.tensor(lengths, dtype=torch.int32), starts, tree)


def rows_taken(batch: Batch, shape: calls.Shape = SHAPE, **limits: int) -> list[int]:
    return [row.row for row in split(batch, shape, 16, replace(MANY, **limits)).long]


def test_rows_with_enough_products_are_taken():
    batch = batch_of([50, 50, 50, 50, 0], [1, 8, 7, 50, 2])
    assert rows_taken(batch) == [1, 3]
    assert rows_taken(batch, products=400) == [3]
    assert rows_taken(batch, pairs=8 * 50 * 25) == [3]
    assert rows_taken(batch, pairs=8 * 50 * 25 + 1) == []
    assert rows_taken(batch, replace(SHAPE, window=10), pairs=8 * 50 * 10) == [3]
    assert rows_taken(batch, replace(SHAPE, window=10), pairs=8 * 50 * 10 + 1) == []
    assert rows_taken(batch, shared=32) == [1, 3]  # 8 queries of 4 heads share a key
    assert rows_taken(batch, shared=33) == [3]
    assert rows_taken(batch, queries=49) == [1]
    assert rows_taken(batch_of([200], [81])) == []  # the workspace of 96 tokens may hold 81 of a row
    assert rows_taken(batch_of([200], [80])) == [0]


def test_row_with_a_null_block_is_taken_only_if_the_window_excludes_it():
    batch = batch_of([90, 90], [20, 20])
    batch.block_table[1, 2] = 0
    assert rows_taken(batch) == [0]
    assert rows_taken(batch, replace(SHAPE, window=22)) == [0, 1]  # from token 49 on
    assert rows_taken(batch, replace(SHAPE, window=24)) == [0]  # from token 47 on


def test_windowed_row_is_taken_if_its_tokens_fit_at_once():
    assert rows_taken(batch_of([300], [20]), replace(SHAPE, window=70)) == [0]
    assert rows_taken(batch_of([300], [20]), replace(SHAPE, window=90)) == []


def test_spans_begin_at_blocks_and_end_with_the_row():
    assert spans_of(0, 90, 96, 16) == [(0, 90)]
    assert spans_of(0, 100, 96, 16) == [(16, 100), (0, 16)]
    assert spans_of(32, 300, 96, 16) == [(208, 300), (112, 208), (32, 112)]
    for first, end, most, size in ((0, 1, 3, 3), (14, 500, 21, 7), (0, 529, 1056, 528)):
        spans = spans_of(first, end, most, size)
        assert spans[0][1] == end
        assert spans[-1][0] == first
        assert all(begin % size == 0 and stop - begin <= most for begin, stop in spans)
        assert [begin for begin, _ in spans[:-1]] == [stop for _, stop in spans[1:]]


def test_other_rows_become_a_batch_of_their_own():
    divided = split(batch_of([50, 50, 60, 0, 9], [1, 20, 1, 0, 1]), SHAPE, 16, MANY)
    assert [(row.row, row.queries) for row in divided.long] == [(1, slice(1, 21))]
    assert divided.rest is not None
    assert divided.rest.query_start is None, "each of them has one query: a decode"
    assert divided.rest.seq_lens.tolist() == [50, 60, 9]
    assert divided.index is not None
    assert divided.index.tolist() == [0, 21, 22]
    divided = split(batch_of([50, 50, 60], [2, 20, 0]), SHAPE, 16, MANY)
    assert divided.rest is not None
    assert divided.rest.query_start is not None
    assert divided.rest.query_start.tolist() == [0, 2]
    assert split(batch_of([50, 7], [20, 0]), SHAPE, 16, MANY).rest is None
    assert split(batch_of([50], [2]), SHAPE, 16, MANY) == Split(())


# ---- plans and fallbacks


def pages_of(size: int = 64, dtype: torch.dtype = torch.float16, blocks: int = 20) -> AttentionPages:
    room = torch.randn((blocks, 2, 16, 2, size)).to(dtype)
    return AttentionPages(room[:, 0], room[:, 1])


def test_plans_are_built_by_the_warm_up_and_serve_every_length():
    ops, pages = made(limits=replace(SMALL, room_bytes=1 << 16)), pages_of()
    layer = LayerAttention(pages, 8, torch.float16, AttentionRule(0.1))
    done = ops.warm_up((), (), (layer, layer))
    assert done.kernels == ("cudnn_attention",) * 2  # the second for the earlier spans of a row
    assert ops.warm_up((), (), (layer,)).kernels == ()
    for lengths, queries in (([300], [40]), ([17, 130, 5], [9, 60, 1]), ([100, 100], [1, 30])):
        query = torch.randn((sum(queries), 8, 64)).half()
        ops.prefill_attention(query, pages, batch_of(lengths, queries), AttentionRule(0.1))
    assert ops.late_compiles == 0
    assert ops.rows == 6
    ops.prefill_attention(query, pages, batch_of([100, 100], [1, 30]), AttentionRule(0.2))
    assert ops.late_compiles == 1
    assert ops.explained[:2] == (
        "8 rows of prefill attention by cudnn; everything else by torch",
        "2 plans built before serving, 1 since",
    )


def test_layers_of_a_step_share_a_split_until_the_table_changes(monkeypatch):
    ops, batch, pages = made(limits=SMALL), batch_of([100], [30]), pages_of()
    query, splits = torch.randn((30, 8, 64)).half(), calls_of(monkeypatch, "split")
    layers = [ops.prefill_attention(query, pages, batch, AttentionRule(0.1)) for _ in range(3)]
    assert len(splits) == 1
    batch.block_table[0, 0] = 19
    changed = ops.prefill_attention(query, pages, batch, AttentionRule(0.1))
    assert len(splits) == 2
    want = TorchOps().prefill_attention(query, pages, batch, AttentionRule(0.1))
    torch.testing.assert_close(changed, want, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(changed, layers[0], atol=1e-2)


def test_batch_of_inference_tensors_is_not_cached():
    ops, pages, query = made(limits=SMALL), pages_of(), torch.randn((30, 8, 64)).half()
    with torch.inference_mode():
        batch = batch_of([100], [30])
        for _ in range(2):
            batch.block_table.add_(1)
            found = ops.prefill_attention(query, pages, batch, AttentionRule(0.1))
            want = TorchOps().prefill_attention(query, pages, batch, AttentionRule(0.1))
            torch.testing.assert_close(found, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("pages", "rule", "why"),
    [
        (pages_of(dtype=torch.float32), AttentionRule(0.1), "pages of float32, supported are bfloat16 and float16"),
        (pages_of(), AttentionRule(0.1, chunk=8), "chunks are not supported"),
        (pages_of(), AttentionRule(0.1, sinks=torch.zeros(8)), "sinks are not supported"),
        (pages_of(), AttentionRule(0.1, soft_cap=2.0), "soft caps are not supported"),
        (pages_of(), AttentionRule(0.1, slopes=torch.zeros(8)), "slopes are not supported"),
        (
            pages_of(size=20),
            AttentionRule(0.1),
            "heads of 20 and 20 elements, supported are equal multiples of 8 to 256",
        ),
    ],
)
def test_unsupported_attention_falls_back_with_a_reason(pages, rule, why):
    ops, query = made(limits=SMALL), torch.randn((9, 8, pages.k.shape[3])).to(pages.k.dtype)
    ops.prefill_attention(query, pages, batch_of([20], [9]), rule)
    assert ops.fallbacks == {"prefill_attention": why}
    assert select.Choice(ops, ()).explained == (
        "cudnn: 0 rows of prefill attention by cudnn; everything else by torch",
        "cudnn: 0 plans built before serving, 0 since",
        f"cudnn: prefill_attention by torch: {why}",
    )


def test_trees_fall_back():
    ops, tree = made(limits=SMALL), torch.full((9,), -1, dtype=torch.int64)
    ops.prefill_attention(
        torch.randn((9, 8, 64)).half(), pages_of(), batch_of([20], [9], tree=tree), AttentionRule(0.1)
    )
    assert ops.fallbacks == {"prefill_attention": "trees are not supported"}


# ---- selection


def test_unfit_version_or_device_is_named(monkeypatch):
    fits = entry.unfit_machine
    assert fits((9, 0), "1.18.0") == fits((10, 0), "1.32.1") == ""
    assert fits((8, 9), "1.18.0") == "compute capability 8.9 is below 9.0"
    remedy = "install nvidia-cudnn-frontend>=1.18,<2"
    assert fits((9, 0), "") == f"nvidia-cudnn-frontend is not installed: {remedy}"
    for version in ("1.9.0", "2.0.0"):
        assert fits((9, 0), version) == f"nvidia-cudnn-frontend {version} is not supported: {remedy}"
    monkeypatch.setattr(entry, "PACKAGE", "kvplane-no-such-package")
    assert entry.installed_version() == ""


def test_cudnn_is_preferred_where_attention_is_used(monkeypatch):
    assert list(select.BACKENDS) == ["cudnn", "triton", "torch"]
    assert select.choose(CPU).reasons[0] == "cudnn: needs a CUDA device, not cpu"
    assert not any(reason.startswith("cudnn") for reason in select.choose(CPU, operations=PAGE_OPERATIONS).reasons)
    monkeypatch.setattr(entry.CudnnEntry, "unfit", staticmethod(lambda device: ""))
    monkeypatch.setattr(entry.CudnnEntry, "__new__", lambda cls: made(Faults(from_the_top=True)))
    faulty = select.choose(CPU, prove=lambda path, device, _: prove(load(path)(), device))
    assert faulty.ops.name == "torch"
    assert faulty.reasons[0].startswith("cudnn: failed its start check: prefill_attention (a long row)")
    monkeypatch.setattr(entry.CudnnEntry, "__new__", lambda cls: made())
    assert select.choose(CPU, prove=lambda path, device, _: prove(load(path)(), device)).ops.name == "cudnn"
