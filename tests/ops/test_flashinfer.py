"""The FlashInfer backend, on a fake of FlashInfer's wrappers: indices, fallbacks, cached plans.

Where FlashInfer is installed, the calls are also checked against its signatures.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kvplane.base.errors import FailedPrecondition
from kvplane_worker.ops import select
from kvplane_worker.ops.flashinfer_ops import backend, calls, entry
from kvplane_worker.ops.flashinfer_ops.backend import FlashInferOps
from kvplane_worker.ops.flashinfer_ops.indices import PagedRows, paged_rows
from kvplane_worker.ops.interface import AttentionPages, AttentionRule, Batch
from kvplane_worker.ops.proof import load, prove
from kvplane_worker.ops.torch_ops import TorchOps
from tests.ops import cases
from tests.ops.contract import CHECKS, Subject, run
from tests.ops.flashinfer_twin import Faults, library
from tests.ops.formats import FORMATS

CPU = torch.device("cpu")
# Operation: seeds, and how many of them must run on the fake.
SEEDS = {"decode_attention": (240, 12), "prefill_attention": (240, 12), "mla_decode": (120, 8)}


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch):
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", 1 << 10)


def made(faults: Faults | None = None) -> FlashInferOps:
    return FlashInferOps(TorchOps(), library(faults))


# ---- indices


def rows_of(table: list[list[int]], seq_lens: list[int], starts: list[int] | None, window: int) -> PagedRows | str:
    ints = [None if part is None else torch.tensor(part, dtype=torch.int32) for part in (table, seq_lens, starts)]
    assert ints[0] is not None
    assert ints[1] is not None
    return paged_rows(Batch(ints[0], ints[1], ints[2]), 16, window)


def test_indices_name_only_attended_blocks():
    table = [[0, 0, 7, 4, 9], [3, 2, 8, 0, 0], [5, 0, 0, 0, 6]]
    rows = rows_of(table, [70, 33, 16], None, 20)
    assert isinstance(rows, PagedRows)
    assert rows.indptr.tolist() == [0, 2, 5, 6]
    assert rows.indices.tolist() == [4, 9, 3, 2, 8, 5]
    assert rows.last_page_len.tolist() == [6, 1, 16]
    assert rows.lengths.tolist() == [22, 33, 16]
    assert rows.empty.tolist() == []
    assert rows_of(table, [70, 33, 16], None, 0) == "a null block is inside the attended range"


def test_indices_begin_at_the_window_of_the_first_query():
    rows = rows_of([[1, 2, 3, 4, 5]], [70], [0, 30], 20)
    assert isinstance(rows, PagedRows)
    assert rows.indices.tolist() == [2, 3, 4, 5]  # query 40 attends to token 21
    assert rows.query_start.tolist() == [0, 30]


def test_rows_without_tokens_or_queries_get_a_borrowed_block():
    rows = rows_of([[0, 0], [7, 8], [3, 0]], [0, 20, 9], [0, 2, 5, 5], 0)
    assert isinstance(rows, PagedRows)
    assert rows.indptr.tolist() == [0, 1, 3, 4]
    assert rows.indices.tolist() == [7, 7, 8, 7]
    assert rows.lengths.tolist() == [1, 20, 1]
    assert rows.empty.tolist() == [0, 1]
    assert rows_of([[0], [4]], [0, 3], [0, 1, 1], 0) == "no row has both tokens and queries"


# ---- the contract, on the fake


@pytest.mark.parametrize("operation", SEEDS)
def test_flashinfer_backend_keeps_the_contract_on_random_cases(monkeypatch, operation):
    """Draw mostly supported shapes, and some unsupported ones."""
    monkeypatch.setattr(cases, "HEAD_SIZES", (64, 64, 128, 40))
    monkeypatch.setattr(cases, "LATENT_SIZES", ((576, 512), (40, 32)))
    ops, taken, (seeds, least) = made(), 0, SEEDS[operation]
    halves = tuple(form for form in FORMATS if form.name in ("float16", "bfloat16"))
    for seed in range(seeds):
        ops.fallbacks.clear()
        failures = run(Subject(ops, formats=halves), operation, [seed])
        assert not failures, failures
        taken += operation not in ops.fallbacks
    assert taken >= least, f"the fake ran {taken} of {seeds} cases"


def test_other_operations_use_the_other_backend():
    for operation in CHECKS.keys() - SEEDS.keys():
        assert not run(Subject(made()), operation, range(3))


@pytest.mark.parametrize("faults", [Faults(window=1), Faults(scale=0.2), Faults(reads_past_the_end=True)])
def test_faulty_flashinfer_fails_the_start_check(faults):
    assert not prove(made(), CPU).failure
    assert prove(made(faults), CPU).failure.startswith("decode_attention (bfloat16, window 20): ")


# ---- fallbacks and plans


def pages_of(size: int = 64, dtype: torch.dtype = torch.float16) -> AttentionPages:
    room = torch.randn((6, 2, 16, 2, size)).to(dtype)
    return AttentionPages(room[:, 0], room[:, 1])


def batch_of(*lengths: int) -> Batch:
    table = torch.arange(1, 1 + len(lengths) * 2, dtype=torch.int32).view(len(lengths), 2)
    return Batch(table, torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize(
    ("pages", "rule", "why"),
    [
        (pages_of(dtype=torch.float32), AttentionRule(0.1), "pages of float32, supported are bfloat16 and float16"),
        (pages_of(), AttentionRule(0.1, chunk=8), "chunks are not supported"),
        (pages_of(), AttentionRule(0.1, sinks=torch.zeros(4)), "sinks are not supported"),
        (pages_of(size=96), AttentionRule(0.1), "heads of 96 and 96 elements, supported are 64, 128, 256"),
        (
            AttentionPages(pages_of().k, pages_of().v.clone()),
            AttentionRule(0.1),
            "keys and values have different strides",
        ),
    ],
)
def test_unsupported_attention_falls_back_with_a_reason(pages, rule, why):
    ops, query = made(), torch.randn((2, 4, pages.k.shape[3])).to(pages.k.dtype)
    ops.decode_attention(query, pages, batch_of(20, 3), rule)
    assert ops.fallbacks == {"decode_attention": why}
    assert select.Choice(ops, ()).explained == (
        "flashinfer: everything but attention by torch",
        f"flashinfer: decode_attention by torch: {why}",
    )


def test_misaligned_queries_fall_back():
    wide = torch.randn((2, 4, 65)).half()
    ops = made()
    ops.decode_attention(wide[:, :, 1:], pages_of(), batch_of(20, 3), AttentionRule(0.1))
    assert ops.fallbacks == {"decode_attention": "heads are not contiguous, or not aligned to 16 bytes"}


def test_layers_of_a_step_share_a_plan_until_the_table_changes(monkeypatch):
    monkeypatch.setattr(backend, "MAX_PLANS", 2)
    ops, batch, pages = made(), batch_of(20, 3), pages_of()
    query, wrapper = torch.randn((2, 4, 64)).half(), ops._library.BatchDecodeWithPagedKVCacheWrapper
    layers = [ops.decode_attention(query, pages, batch, AttentionRule(0.1)) for _ in range(3)]
    assert wrapper.plans == 1
    ops.decode_attention(query, pages, batch, AttentionRule(0.1, window=4))
    assert wrapper.plans == 2
    batch.block_table[0, 0] = 5
    changed = ops.decode_attention(query, pages, batch, AttentionRule(0.1))
    assert wrapper.plans == 3
    want = TorchOps().decode_attention(query, pages, batch, AttentionRule(0.1))
    torch.testing.assert_close(changed, want, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(changed, layers[0], atol=1e-2)


def test_batch_of_inference_tensors_is_not_cached():
    ops, pages, query = made(), pages_of(), torch.randn((1, 4, 64)).half()
    with torch.inference_mode():
        batch = batch_of(20)
        for _ in range(2):
            ops.decode_attention(query, pages, batch, AttentionRule(0.1))
    assert ops._library.BatchDecodeWithPagedKVCacheWrapper.plans == 2


# ---- selection


def test_unfit_version_device_or_compiler_is_named():
    fits = entry.unfit_machine
    assert fits((8, 0), "0.7.2.post1", "/usr/bin/nvcc", False) == fits((9, 0), "0.7.3", None, True) == ""
    assert fits((7, 5), "0.7.2", "nvcc", True) == "compute capability 7.5 is below 8.0"
    remedy = "install flashinfer-python>=0.7.2,<0.8"
    assert fits((9, 0), "", "nvcc", True) == f"flashinfer is not installed: {remedy}"
    for version in ("0.6.12", "0.7.1", "0.8.0", "1.0"):
        assert fits((9, 0), version, "nvcc", True) == f"flashinfer {version} is not supported: {remedy}"
    assert fits((9, 0), "0.7.2", None, False).startswith("no nvcc, which compiles FlashInfer's kernels: set CUDA_HOME")


def test_nvcc_is_found_where_flashinfer_looks(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert entry.nvcc() is None
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch()
    assert entry.nvcc() == str(compiler)


def test_flashinfer_is_used_only_by_name_and_an_error_if_it_is_broken(monkeypatch):
    assert list(select.BACKENDS) == ["triton", "flashinfer", "torch"]
    why = "needs a CUDA device, not cpu"
    assert not any(reason.startswith("flashinfer") for reason in select.choose(CPU).reasons)
    with pytest.raises(FailedPrecondition, match=f"flashinfer: {why}"):
        select.choose(CPU, "flashinfer")
    monkeypatch.setattr(entry.FlashInferEntry, "unfit", staticmethod(lambda device: ""))
    monkeypatch.setattr(entry.FlashInferEntry, "__new__", lambda cls: made(Faults(window=1)))
    with pytest.raises(FailedPrecondition, match="flashinfer: failed its start check: decode_attention"):
        select.choose(CPU, "flashinfer", prove=lambda path, device, _: prove(load(path)(), device))


# ---- the real package


class Checked:
    """A wrapper that computes nothing, and checks each call against the real signature."""

    real: type

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.bind("__init__", *args, **kwargs)

    def plan(self, *args: object, **kwargs: object) -> None:
        self.bind("plan", *args, **kwargs)
        if hasattr(self.real, "_plan_impl"):
            self.bind("_plan_impl", *args, **kwargs)

    def run(self, *args: object, **kwargs: object) -> None:
        self.bind("run", *args, **kwargs)

    def bind(self, method: str, *args: object, **kwargs: object) -> None:
        inspect.signature(getattr(self.real, method)).bind(self, *args, **kwargs)


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_calls_match_the_installed_flashinfer():
    import flashinfer

    kinds = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    real = {name: type(name, (Checked,), {"real": getattr(flashinfer, name)}) for name in kinds}
    latent = type("Latent", (Checked,), {"real": flashinfer.mla.BatchMLAPagedAttentionWrapper})
    metadata = flashinfer.mla.MLAPlanMetadata
    mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=latent, MLAPlanMetadata=metadata)
    checked, workspace = SimpleNamespace(mla=mla, **real), torch.zeros(16, dtype=torch.uint8)
    rows = paged_rows(batch_of(20, 3), 16, 0)
    assert isinstance(rows, PagedRows)
    shape = calls.Shape(4, 2, 64, 16, 0.1, torch.float16)
    for call in (calls.decode, calls.prefill):
        call(checked, workspace, rows, shape)(torch.zeros((2, 4, 64)), pages_of())
    calls.latent(checked, workspace, rows, shape)(torch.zeros((2, 4, 64)), torch.zeros((2, 16, 64)))
    with pytest.raises(TypeError):
        real[kinds[0]](workspace, layout="NHD")
