"""The scan of recurrent states: long rows, its depth, and that the host reads nothing from the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from kvplane_kernels.interface import (
    DeltaInputs,
    PagedOps,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
)
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops import delta_rule, selective_scan, states
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.launch import Chip
from tests.kernels import interpreter

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


@pytest.mark.parametrize("lengths", [[67], [1, 40, 12, 2], [1, 1, 1, 1]], ids=str)
def test_selective_scan_of_long_rows_equals_torch(lengths):
    """Mamba-1, with a convolution whose last inputs are stored by token."""
    interpreter.quicken()
    found, wanted = (mamba_1(ops, lengths) for ops in (TritonOps(), TorchOps()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def mamba_1(ops: PagedOps, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Result and states after a step of Mamba-1."""
    (_, inputs, weights), drawn = step(lengths), torch.Generator().manual_seed(1)
    channels, size = inputs.x.shape[1], 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn)

    conv, states, count = normal(BLOCKS, WIDTH - 1, channels).mT, normal(BLOCKS, channels, size), len(inputs.x)
    blocks = (inputs.query_start, inputs.read_block, inputs.write_block)
    u = ops.convolve(conv, StateRows(*blocks), inputs.x, weights.conv_weight, weights.conv_bias)
    tokens = u, normal(count, channels).exp() * 0.1, normal(count, size), normal(count, size)
    y = ops.selective_scan(states, ScanInputs(*blocks, *tokens), -normal(channels, size).exp(), normal(channels))
    assert not getattr(ops, "fallbacks", {})
    return y, conv, states


@pytest.mark.parametrize("lengths", [[67], [1, 40, 12, 2], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("are_alike", [False, True], ids=["any keys", "equal keys"])
@pytest.mark.parametrize("by_key", [False, True], ids=["gates of heads", "gates of keys"])
def test_gated_delta_rule_of_long_rows_equals_torch(lengths, are_alike, by_key):
    """Also where all keys are nearly equal: products of inverses in powers would lose all digits."""
    interpreter.quicken()
    found, wanted = (delta_rule_step(ops, lengths, are_alike, by_key) for ops in (TritonOps(), TorchOps()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def delta_rule_step(ops: PagedOps, lengths: list[int], are_alike: bool, by_key: bool) -> tuple[torch.Tensor, ...]:
    """Result and states after a step of four heads that share queries and keys of two."""
    (_, inputs, _), drawn = step(lengths), torch.Generator().manual_seed(1)
    count = len(inputs.x)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn)

    q, k = (normalize(normal(count, 2, 20), dim=2) for _ in range(2))
    if are_alike:
        k = normalize(k[:1] + 0.01 * k, dim=2)
    states, gate = normal(BLOCKS, 4, 10, 20), normal(count, 4, *[20] * by_key)
    tokens = q, k, normal(count, 4, 10), -0.1 * gate.exp(), 2 * normal(count, 4).sigmoid()
    y = ops.gated_delta_rule(states, DeltaInputs(inputs.query_start, inputs.read_block, inputs.write_block, *tokens))
    assert not getattr(ops, "fallbacks", {})
    return y, states


@pytest.mark.parametrize("by_key", [False, True], ids=["gates of heads", "gates of keys"])
@pytest.mark.parametrize(("count", "names"), [(4, "hold advance"), (8192, "hold invert advance")])
def test_a_gated_delta_rule_is_at_most_three_launches_and_its_depth_is_tokens_over_64(count, names, by_key):
    with torch.device("meta"):
        ints, k, v = torch.zeros(count, dtype=torch.int32), torch.zeros(count, 2, 128), torch.zeros(count, 4, 128)
        inputs = DeltaInputs(ints[:5], ints[:4], ints, k, k, v, v if by_key else v[..., 0], v[..., 0])
        y, launches = delta_rule.launches(torch.zeros(BLOCKS, 4, 128, 128), inputs, H200)
        run = list(launches)
    assert " ".join(launch.kernel.__name__.split("_")[0] for launch in run) == names
    assert y.shape == (count, 4, 128)
    assert run[-1].constants["S"].chunk == (64 if count > 64 else 0), "0: tokens of short rows, one by one"


@pytest.mark.parametrize(("count", "chunk"), [(4, 0), (8192, 64)])
def test_a_selective_scan_is_two_launches_and_its_depth_is_tokens_over_64(count, chunk):
    with torch.device("meta"):
        ints, x, b = torch.zeros(count, dtype=torch.int32), torch.zeros(count, 100), torch.zeros(count, 16)
        inputs = ScanInputs(ints[:5], ints[:4], ints, x, x, b, b)
        y, launches = selective_scan.launches(torch.zeros(BLOCKS, 100, 16), inputs, torch.zeros(100, 16), x[0], H200)
        hold, scan = launches
    assert (hold.kernel.__name__, scan.kernel.__name__) == ("hold_states", "scan_channels")
    assert y.shape == (count, 100)
    assert scan.constants["S"].chunk == chunk, "0: tokens of short rows, one by one"


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


def test_tokens_of_one_head_whose_elements_are_apart_are_left_to_torch():
    ints, k, v, gate = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, 8), torch.zeros(2, 1, 4), torch.zeros(2, 1)
    inputs = DeltaInputs(ints, ints[:1], ints, k, k, v, k, gate)
    states = torch.zeros(2, 1, 4, 8)
    assert delta_rule.refusal(states, inputs) == ""
    for name in ("q", "k", "g"):
        apart = replace(inputs, **{name: torch.zeros(2, 1, 16)[..., ::2]})
        assert delta_rule.refusal(states, apart) == "the elements of a token are not contiguous"


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (16, 1)])
def test_a_selective_scan_of_tokens_of_one_element_is_left_to_torch(channels, size):
    ints, count = torch.zeros(2, dtype=torch.int32), 2
    x, dt = torch.zeros((count, channels)), torch.zeros((count, channels))
    b, c = torch.zeros((count, size)), torch.zeros((count, size))
    inputs = ScanInputs(torch.tensor([0, 2], dtype=torch.int32), ints[:1], ints, x, dt, b, c)
    assert selective_scan.refusal(torch.zeros((2, channels, size)), inputs) == "tokens of one element"
