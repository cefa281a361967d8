"""Invalid calls: every backend names the argument and a remedy, and writes nothing."""

from __future__ import annotations

import pytest
import torch

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.checks import check_scales
from kvplane_kernels.interface import AttentionPages
from tests.kernels.contract import CHECKS
from tests.kernels.refusals import (
    BAD,
    PER_TOKEN,
    VALID_CALLS,
    attention_pages,
    call,
    tensors,
    valid_call,
    without_rows,
)
from tests.kernels.subjects import SUBJECTS

DEVICE = "cpu"


@pytest.fixture(params=sorted(SUBJECTS))
def ops(request):
    return SUBJECTS[request.param](DEVICE).ops


@pytest.mark.parametrize("operation", VALID_CALLS)
def test_valid_call_is_accepted(ops, operation):
    call(ops, operation, valid_call(operation, DEVICE))


@pytest.mark.parametrize("operation", PER_TOKEN)
def test_batch_without_rows_has_no_result_and_writes_nothing(ops, operation):
    arguments = without_rows(operation, DEVICE)
    before = [tensor.clone() for tensor in tensors(arguments)]
    out = call(ops, operation, arguments)
    assert out is None or out.shape[0] == 0
    assert all(torch.equal(now, then) for now, then in zip(tensors(arguments), before, strict=True))


@pytest.mark.parametrize("wrong", BAD, ids=lambda bad: f"{bad.operation}: {bad.field} {bad.what}")
def test_wrong_argument_is_named_and_nothing_is_written(ops, wrong):
    arguments = valid_call(wrong.operation, DEVICE)
    wrong.spoil(arguments)
    present = [tensor for tensor in tensors(arguments) if tensor.device.type != "meta"]
    before = [tensor.clone() for tensor in present]
    with pytest.raises(InvalidArgument) as refusal:
        call(ops, wrong.operation, arguments)
    assert refusal.value.field == wrong.field
    assert refusal.value.remedy
    assert all(torch.equal(now, then) for now, then in zip(present, before, strict=True))


def test_every_operation_has_refusals():
    assert {wrong.operation for wrong in BAD} == set(VALID_CALLS) == CHECKS.keys()


def eight_bit(**scales: torch.Tensor | None) -> AttentionPages:
    pages = attention_pages()
    k, v = pages.k.to(torch.float8_e4m3fn), pages.v.to(torch.float8_e4m3fn)
    return AttentionPages(k, v, **{"k_scale": torch.ones(1), "v_scale": torch.ones(2), **scales})


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
def test_scale_that_is_zero_or_not_finite_is_refused(field, scale):
    check_scales(eight_bit())
    with pytest.raises(InvalidArgument) as refusal:
        check_scales(eight_bit(**{field: torch.tensor([1.0, scale])}))
    assert refusal.value.field == f"pages.{field}"


@pytest.mark.parametrize("scale", [None, torch.ones(3), torch.ones(1).double()])
def test_empty_scale_is_refused(scale):
    with pytest.raises(InvalidArgument, match=r"pages\.v_scale"):
        check_scales(eight_bit(v_scale=scale))
