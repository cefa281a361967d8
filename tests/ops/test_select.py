"""Choosing a backend: the first that fits, with the reasons against those before it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane_worker.ops import select
from kvplane_worker.ops.torch_ops import TorchOps


class CudaOps:
    """A backend that needs CUDA; where it is there, it is torch's."""

    name = "fast"

    def __new__(cls):
        return TorchOps()

    @staticmethod
    def unfit(device: torch.device) -> str:
        return "" if device.type == "cuda" else f"needs CUDA, not {device.type}"


@pytest.fixture
def fast(monkeypatch):
    """A backend before torch's, in a module of its own."""
    module = ModuleType("kvplane_worker.ops.fast_ops")
    module.CudaOps = CudaOps  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(select, "BACKENDS", {"fast": "fast_ops:CudaOps", **select.BACKENDS})


def test_the_cpu_has_a_backend():
    choice = select.choose("cpu")
    assert choice.reasons[-1] == f"{choice.ops.name}: chosen"


def test_one_that_does_not_fit_is_passed_over_and_says_why(fast, monkeypatch):
    monkeypatch.setattr(select, "BACKENDS", {"fast": select.BACKENDS["fast"], "torch": select.BACKENDS["torch"]})
    choice = select.choose(torch.device("cpu"))
    assert choice.ops.name == "torch"
    assert choice.reasons == ("fast: needs CUDA, not cpu", "torch: chosen")


def test_one_whose_package_is_missing_is_passed_over(monkeypatch):
    torch_backend = select.BACKENDS["torch"]
    monkeypatch.setattr(select, "BACKENDS", {"gone": "gone_ops:GoneOps", "torch": torch_backend})
    missing = "gone: No module named 'kvplane_worker.ops.gone_ops'"
    assert select.choose("cpu").reasons == (missing, "torch: chosen")


def test_asked_for_by_name_it_is_the_one_or_an_error(fast):
    assert select.choose("cpu", "torch").reasons == ("torch: chosen, asked for by name",)
    with pytest.raises(FailedPrecondition, match="fast: needs CUDA, not cpu"):
        select.choose("cpu", "fast")


def test_a_name_that_is_not_there_is_refused_with_those_that_are(fast):
    with pytest.raises(InvalidArgument, match="auto, fast,") as refusal:
        select.choose("cpu", "slow")
    assert refusal.value.field == "backend"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_has_no_backend():
    with pytest.raises(FailedPrecondition, match="torch: torch finds no CUDA device"):
        select.choose("cuda:0")
