"""The scan of recurrent states: long rows, its depth, and that the host reads nothing from the device."""

from __future__ import annotations

import pytest
import torch

from kvplane_worker.ops.interface import StateInputs, StatePages, StateWeights
from kvplane_worker.ops.torch_ops import TorchOps
from kvplane_worker.ops.triton_ops import states
from kvplane_worker.ops.triton_ops.backend import TritonOps
from kvplane_worker.ops.triton_ops.launch import Chip
from tests.ops import interpreter

H200 = Chip(132, 227 << 10, native_fp8=True)
HEADS, SIZE, STATE, WIDTH, BLOCKS = 2, 16, 8, 4, 12
Step = tuple[StatePages, StateInputs, StateWeights]


def step(lengths: list[int], keep_every: int = 7) -> Step:
    """Rows of these lengths. Each stores states on the way and reads the block that the row after it writes last."""
    drawn = torch.Generator().manual_seed(len(lengths))
    channels, count, rows = HEADS * SIZE + 2 * STATE, sum(lengths), len(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn)

    pages = StatePages(normal(BLOCKS, channels, WIDTH - 1), normal(BLOCKS, HEADS, SIZE, STATE))
    write, begin = torch.zeros(count, dtype=torch.int32), 0
    for row, length in enumerate(lengths):
        write[begin + keep_every : begin + length : keep_every] = rows + 1 + row  # the same block: the last one counts
        write[begin + length - 1] = 1 + row
        begin += length
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    read = torch.tensor([1 + (row + 1) % rows for row in range(rows)], dtype=torch.int32)
    inputs = StateInputs(starts, read, write, normal(count, channels), normal(count, HEADS).exp() * 0.1)
    weights = StateWeights(normal(channels, WIDTH), normal(channels), -normal(HEADS).exp(), normal(HEADS))
    return pages, inputs, weights


@pytest.mark.parametrize("lengths", [[130], [1, 70, 33, 2], [1, 1, 1, 1]], ids=str)
def test_scan_of_long_rows_equals_torch(lengths):
    interpreter.quicken()
    (pages, inputs, weights), (wanted_pages, *_) = step(lengths), step(lengths)
    ops = TritonOps()
    y = ops.state_step(pages, inputs, weights)
    assert not ops.fallbacks
    torch.testing.assert_close(y, TorchOps().state_step(wanted_pages, inputs, weights), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pages.ssm, wanted_pages.ssm, rtol=1e-4, atol=1e-4)
    assert torch.equal(pages.conv, wanted_pages.conv)


@pytest.mark.parametrize("count", [4, 8192])
def test_a_step_is_four_launches_and_reads_nothing_from_the_device(count):
    """Tensors without data: whatever depended on a value would raise."""
    with torch.device("meta"):
        channels = HEADS * SIZE + 2 * STATE
        ints = torch.zeros(count, dtype=torch.int32)
        pages = StatePages(torch.zeros(BLOCKS, channels, WIDTH - 1), torch.zeros(BLOCKS, HEADS, SIZE, STATE))
        inputs = StateInputs(ints[:5], ints[:4], ints, torch.zeros(count, channels), torch.zeros(count, HEADS))
        weights = StateWeights(torch.zeros(channels, WIDTH), ints.float(), ints.float(), ints.float())
        y, launches = states.launches(pages, inputs, weights, H200)
    kernels = {launch.kernel.__name__: launch for launch in launches}
    assert list(kernels) == ["hold_states", "convolve_tokens", "scan_rows", "keep_inputs"]
    assert y.shape == (count, HEADS, SIZE)
    assert kernels["scan_rows"].grid == (4, HEADS, 1)
    assert kernels["scan_rows"].constants["S"].chunk == (64 if count > 64 else 16), "the depth is tokens / chunk"
