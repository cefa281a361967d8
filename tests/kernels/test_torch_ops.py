"""Special cases of the torch backend: empty launches, and work in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvplane_kernels.interface import Batch, PagedOps
from kvplane_kernels.torch_ops import TorchOps, attention, pages
from tests.kernels.contract import run
from tests.kernels.refusals import Arguments, call, valid_call
from tests.kernels.subjects import SUBJECTS

OPS: PagedOps = TorchOps()


@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention", "mla_decode"])
@pytest.mark.parametrize("elements", [1, 3000])
def test_attention_in_pieces_is_equal(monkeypatch, operation, elements):
    monkeypatch.setattr(attention, "PIECE_ELEMENTS", elements)
    assert run(SUBJECTS["torch"]("cpu"), operation, range(25)) == []


def test_checksums_in_pieces_are_equal(monkeypatch):
    monkeypatch.setitem(pages.PIECE_BYTES, "cpu", 3000)
    assert run(SUBJECTS["torch"]("cpu"), "checksum", range(25)) == []


def no_rows(arguments: Arguments) -> Arguments:
    """A launch without rows."""
    none = torch.zeros(0, dtype=torch.int32)
    query_start = None if arguments["batch"].query_start is None else torch.zeros(1, dtype=torch.int32)
    return {**arguments, "query": arguments["query"][:0], "batch": Batch(none.reshape(0, 2), none, query_start)}


@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention", "mla_decode"])
def test_empty_batch_has_empty_output(operation):
    arguments = no_rows(valid_call(operation, "cpu"))
    assert call(OPS, operation, arguments).shape[0] == 0


def test_empty_block_table_has_output_0():
    arguments = valid_call("decode_attention", "cpu")
    batch = replace(arguments["batch"], block_table=torch.zeros(3, 0, dtype=torch.int32))
    batch = replace(batch, seq_lens=torch.zeros(3, dtype=torch.int32))
    assert (call(OPS, "decode_attention", {**arguments, "batch": batch}) == 0).all()


@pytest.mark.parametrize("rows", [0, 2])
def test_state_step_without_tokens_changes_no_state(rows):
    arguments = valid_call("state_step", "cpu")
    before = arguments["pages"].ssm.clone()
    inputs, none = arguments["inputs"], torch.zeros(rows + 1, dtype=torch.int32)
    inputs = replace(inputs, query_start=none, read_block=inputs.read_block[:rows], write_block=none[:0])
    y = call(OPS, "state_step", {**arguments, "inputs": replace(inputs, x=inputs.x[:0], dt=inputs.dt[:0])})
    assert y.shape[0] == 0
    assert torch.equal(arguments["pages"].ssm, before)


def test_row_split_over_launches_has_the_same_states():
    arguments = valid_call("state_step", "cpu")
    tokens, inputs = 9, arguments["inputs"]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, inputs.x.shape[1], generator=generator)
    dt = torch.rand(tokens, inputs.dt.shape[1], generator=generator)

    def after(cuts: list[int]) -> tuple[torch.Tensor, ...]:
        pages = replace(arguments["pages"], conv=arguments["pages"].conv.clone(), ssm=arguments["pages"].ssm.clone())
        outputs = []
        for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            part = replace(
                inputs,
                query_start=torch.tensor([0, end - start], dtype=torch.int32),
                read_block=torch.tensor([1], dtype=torch.int32),
                write_block=torch.tensor([0] * (end - start - 1) + [1], dtype=torch.int32),
                x=x[start:end],
                dt=dt[start:end],
            )
            outputs.append(OPS.state_step(pages, part, arguments["weights"]))
        return pages.conv, pages.ssm, torch.cat(outputs)

    whole = after([])
    for one, cut in zip(whole, after([1, 4, 8]), strict=True):
        torch.testing.assert_close(one, cut, rtol=1e-6, atol=1e-6)
