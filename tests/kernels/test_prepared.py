"""Launches are prepared once per form of a call: what a form leaves out changes no result; bad calls are refused."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.remembered import MAX_FORMS
from tests.kernels import interpreter

SIZE, RULE = 16, AttentionRule(0.3)


@pytest.fixture
def ops() -> TritonOps:
    interpreter.quicken()
    return TritonOps()


def pages() -> AttentionPages:
    room = torch.randn((9, 2, 4, 2, SIZE))
    return AttentionPages(room[:, 0], room[:, 1])


def batch(lengths: list[int], queries: list[int] | None = None) -> Batch:
    table = torch.arange(1, 9, dtype=torch.int32).repeat(len(lengths), 1)
    starts = None if queries is None else torch.tensor([0, *queries]).cumsum(0).int()
    return Batch(table, torch.tensor(lengths, dtype=torch.int32), starts)


def queries(count: int) -> torch.Tensor:
    return torch.randn((count, 4, SIZE))


def assert_as_torch(
    ops: TritonOps, query: torch.Tensor, kept: AttentionPages, rows: Batch, rule: AttentionRule
) -> None:
    wanted = TorchOps().prefill_attention(query, kept, rows, rule)
    torch.testing.assert_close(ops.prefill_attention(query, kept, rows, rule), wanted)


def test_calls_of_one_form_share_launches_and_no_result(ops):
    kept, window = pages(), replace(RULE, window=5)
    sinks = [replace(RULE, sinks=torch.randn(4)) for _ in range(2)]
    for lengths in ([9, 30], [1, 2], [32, 7]):
        for rule in (RULE, window, replace(window, scale=0.5), *sinks, replace(RULE, soft_cap=2.0)):
            assert_as_torch(ops, queries(2), kept, batch(lengths), rule)
            assert_as_torch(ops, queries(5)[:, :, :], pages(), batch(lengths, [1, 4]), rule)
    first, second = ops.prefill_attention(queries(2), kept, batch([9, 9]), RULE), queries(2)
    before = first.clone()
    ops.prefill_attention(second, kept, batch([9, 9]), RULE)
    assert torch.equal(first, before), "a later call wrote into the result of an earlier one"


def test_a_form_that_is_known_still_refuses_bad_calls(ops):
    kept, rows = pages(), batch([9, 30])
    assert_as_torch(ops, queries(2), kept, rows, RULE)
    for query, given, rule, lse in (
        (queries(3), rows, RULE, None),
        (queries(2), batch([9, 30, 1]), RULE, None),
        (queries(2).double(), rows, RULE, None),
        (queries(2), rows, replace(RULE, window=-1), None),
        (queries(2), rows, replace(RULE, sinks=torch.zeros(3)), None),
        (queries(2), rows, RULE, torch.zeros((3, 4))),
        (queries(2), replace(rows, seq_lens=rows.seq_lens.long()), RULE, None),
    ):
        with pytest.raises(InvalidArgument):
            ops.prefill_attention(query, kept, given, rule, lse)
    new, slots = torch.randn((3, 2, SIZE)), torch.arange(4, 7)
    ops.write_kv(kept, new, new, slots)
    for key, value, into in (
        (new[:2], new, slots),
        (new, new[:2], slots),
        (new, new, slots[:2]),
        (new, new, slots.int()),
    ):
        with pytest.raises(InvalidArgument):
            ops.write_kv(kept, key, value, into)


def test_pages_that_end_take_their_launches_along(ops):
    kept, rows = pages(), batch([9, 30])
    ops.prefill_attention(queries(2), kept, rows, RULE)
    ops.write_kv(kept, queries(2)[:, :2], queries(2)[:, :2], torch.arange(4, 6))
    held = [ops._attention._kept, ops._writes._kept, ops._batches._kept]
    assert [len(each) for each in held] == [1, 1, 1]
    for scale in range(2 * MAX_FORMS):
        ops.prefill_attention(queries(0), kept, batch([]), replace(RULE, scale=float(scale)))
    assert len(held[0][kept]) <= MAX_FORMS
    del kept, rows
    gc.collect()
    assert [len(each) for each in held] == [0, 0, 0]


def test_benchmark_of_host_time_compares_every_call():
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.bench.host_calls", "--rounds", "1", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    costs = json.loads(done.stdout)
    names = {"stamps of 4096 pages", "decode", "drafts", "write", "a layer: decode and write"}
    assert {cost["name"] for cost in costs} == names
    assert all(cost["called"] > 0 and cost["prepared"] > 0 for cost in costs)
