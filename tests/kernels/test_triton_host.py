"""Host-side decisions of the Triton backend: supported machines, fallbacks, tiles, and planned copies."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.compiler import ASTSource

from kvplane.base.errors import FailedPrecondition
from kvplane_kernels import select
from kvplane_kernels.interface import PAGE_OPERATIONS, AttentionPages, AttentionRule, Batch, GroupPages, WarmUp
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops import attention, compiles, moves
from kvplane_kernels.triton_ops.attention import DECODE, DECODE_NARROW, LATENT
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.entry import unfit_machine
from kvplane_kernels.triton_ops.kernels import arguments
from kvplane_kernels.triton_ops.launch import INTERPRETER, Chip
from tests.kernels import interpreter

A100 = Chip(108, 163 << 10, native_fp8=False)
H200 = Chip(132, 227 << 10, native_fp8=True)


@pytest.fixture
def ops() -> TritonOps:
    interpreter.quicken()
    return TritonOps()


def test_cpu_worker_uses_torch_with_reasons():
    choice = select.choose("cpu", operations=PAGE_OPERATIONS)
    why = "needs a CUDA device, not cpu"
    assert choice.reasons == (f"triton: {why}", "torch: chosen")
    with pytest.raises(FailedPrecondition, match="triton: needs a CUDA device"):
        select.choose("cpu", "triton")


def test_unfit_device_triton_or_compiler_is_named():
    assert unfit_machine((9, 0), "3.6.0", "gcc") == ""
    assert unfit_machine((7, 5), "3.6.0", "gcc") == "compute capability 7.5 is below 8.0"
    assert unfit_machine((8, 0), "3.5.1", "gcc") == "triton 3.5.1 is older than 3.6"
    assert unfit_machine((8, 0), "", "gcc") == "triton is not installed"
    assert "no C compiler" in unfit_machine((8, 0), "3.10.0", None)


def attend(ops: TritonOps, dtype: torch.dtype, size: int) -> torch.Tensor:
    room = torch.randn((3, 2, 4, 1, size)).to(dtype)
    pages, query = AttentionPages(room[:, 0], room[:, 1]), torch.randn((1, 2, size)).to(dtype)
    batch = Batch(torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    return ops.decode_attention(query, pages, batch, AttentionRule(0.3))


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [
        (torch.float64, 16, "no kernel multiplies torch.float64 with pages of torch.float64"),
        (torch.float32, 20, "a head of 20 elements is not a multiple of 8"),
        (torch.float32, 264, "a head of 264 elements: at most 256"),
    ],
)
def test_unsupported_shapes_fall_back_to_torch_with_a_reason(ops, dtype, size, reason):
    assert attend(ops, dtype, size).isfinite().all()
    assert ops.fallbacks == {"decode_attention": reason}
    explained = select.Choice(ops, ("triton: chosen",)).explained
    assert explained == ("triton: chosen", f"triton: decode_attention by torch: {reason}")


def test_supported_shapes_have_no_fallback(ops):
    attend(ops, torch.float32, 16)
    assert ops.fallbacks == {}


def test_misaligned_pages_and_staging_fall_back_to_torch(ops):
    group = GroupPages((torch.zeros((4, 40), dtype=torch.uint8),))
    ops.zero_pages(group, [1])
    assert ops.fallbacks == {"zero_pages": "pages are not aligned to 16 bytes"}
    ops.gather(
        GroupPages((torch.zeros((4, 64), dtype=torch.uint8),)), [1], torch.zeros(65, dtype=torch.uint8)[1:][None]
    )
    assert ops.fallbacks["gather"] == "rows of the staging buffer are not aligned to 16 bytes"


def test_gather_checked_equals_gather_and_checksum(ops):
    group = GroupPages(tuple(torch.randint(0, 256, (5, size), dtype=torch.uint8) for size in (64, 4112)))
    staging, again = (torch.zeros((3, group.bytes_per_block), dtype=torch.uint8) for _ in range(2))
    sums = ops.gather_checked(group, [3, 1, 3], staging)
    ops.gather(group, [3, 1, 3], again)
    assert torch.equal(staging, again)
    assert torch.equal(sums, ops.checksum(group, [3, 1, 3]))


def test_background_launch_moves_everything():
    group = GroupPages((torch.randint(0, 256, (9, 80 << 10), dtype=torch.uint8),))
    staging = torch.zeros((8, 80 << 10), dtype=torch.uint8)
    blocks = torch.arange(1, 9, dtype=torch.int32)
    launch = moves.move_launch(moves.LayerTable.of(group), moves.Move(1, blocks, staging=staging, background=True))
    assert launch.grid == (moves.FEW_PROGRAMS,)
    interpreter.quicken()
    launch.run()
    assert torch.equal(staging, group.layers[0][1:])


def test_tiles_fit_in_shared_memory():
    assert DECODE.tile(512, H200) == 64
    assert DECODE.tile(256, A100) == 128
    assert DECODE.programs(512, H200) == 2 * 132
    assert DECODE_NARROW.programs(256, H200) == 3 * 132
    assert DECODE.programs(512, A100) == 2 * 108
    assert LATENT.tile(1152, H200) == 64
    assert LATENT.tile(1152, A100) == 32
    assert LATENT.tile(100_000, A100) == 16


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=12))
def test_planned_parallel_copies_equal_ordered_copies(pairs):
    one_by_one = list(range(6))
    for source, target in pairs:
        one_by_one[target] = one_by_one[source]
    plan = moves.plan_copies([source for source, _ in pairs], [target for _, target in pairs])
    written = {target for _, target in plan.direct + plan.staged}
    assert not written & {source for source, _ in plan.direct}
    at_once = list(range(6))
    for source, target in plan.direct + plan.staged:
        at_once[target] = source
    assert at_once == one_by_one


def test_row_shared_by_all_workers_is_merged_in_rounds(ops):
    torch.manual_seed(0)
    room, query = torch.randn((65, 2, 16, 1, 16)), torch.ones((1, 1, 16))
    room[:, 0] += torch.linspace(0, 1, 65)[:, None, None, None]  # later tokens weigh more: the maximum rises
    pages = AttentionPages(room[:, 0], room[:, 1])
    batch = Batch(torch.arange(1, 65, dtype=torch.int32)[None], torch.tensor([1024], dtype=torch.int32))
    rule = AttentionRule(0.3)
    launch = attention.launches(attention.keys_and_values(query, pages, batch, rule), INTERPRETER)[1]
    assert launch.constants["S"].parts * 2 < INTERPRETER.multiprocessors
    wanted = TorchOps().decode_attention(query, pages, batch, rule)
    torch.testing.assert_close(ops.decode_attention(query, pages, batch, rule), wanted)


def test_describe_counts_what_was_compiled_before_and_while_serving(ops, monkeypatch):
    assert not any("compiled" in line for line in ops.explained)
    group = GroupPages((torch.zeros((4, 64), dtype=torch.uint8),))
    monkeypatch.setattr(
        compiles, "warm_up", lambda launches: WarmUp(tuple(one.kernel.__name__ for one in launches), 1.5)
    )
    monkeypatch.setattr(compiles.WATCH, "late", Counter(attention_spans=2))
    assert len(ops.warm_up([group], PAGE_OPERATIONS).kernels) == 8
    ops.warm_up([group], ("zero_pages",))
    first, second = ops.explained
    assert first == "9 kernels compiled before serving, in 3.0 s of CPU time; 2 compiled since"
    assert second == "attention_spans compiled 2 times while serving"


def test_kernel_on_disk_is_of_the_constants_as_they_are_computed_now(monkeypatch):
    kernel = SimpleNamespace(__name__="kernel", cache_key="its source", arg_names=["S"])
    shape = arguments.Shape(16, 128, 128, 8)

    def name() -> str:
        return ASTSource(kernel, {}, {"S": shape}).hash()

    before = name()
    assert name() == before
    monkeypatch.setattr(arguments, "SOURCE", "after an upgrade")
    assert name() != before
