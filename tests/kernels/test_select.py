"""Choice of a backend: the first that works, with the reasons against those before it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane_kernels import select
from kvplane_kernels.torch_ops import TorchOps


class CudaOps:
    """A backend that needs CUDA, and computes with the torch backend."""

    name = "fast"

    def __new__(cls):
        return TorchOps()

    @staticmethod
    def unfit(device: torch.device) -> str:
        return "" if device.type == "cuda" else f"needs CUDA, not {device.type}"


@pytest.fixture
def fast(monkeypatch):
    """List a backend before torch, in a separate module."""
    module = ModuleType("kvplane_kernels.fast_ops")
    module.CudaOps = CudaOps  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(select, "BACKENDS", {"fast": "fast_ops:CudaOps", **select.BACKENDS})


def test_cpu_has_a_backend():
    choice = select.choose("cpu")
    assert choice.reasons[-1] == f"{choice.ops.name}: chosen"


def test_unfit_backend_is_skipped_with_its_reason(fast, monkeypatch):
    monkeypatch.setattr(select, "BACKENDS", {"fast": select.BACKENDS["fast"], "torch": select.BACKENDS["torch"]})
    choice = select.choose(torch.device("cpu"))
    assert choice.ops.name == "torch"
    assert choice.reasons == ("fast: needs CUDA, not cpu", "torch: chosen")


def test_backend_with_a_missing_package_is_skipped(monkeypatch):
    torch_backend = select.BACKENDS["torch"]
    monkeypatch.setattr(select, "BACKENDS", {"gone": "gone_ops:GoneOps", "torch": torch_backend})
    missing = "gone: No module named 'kvplane_kernels.gone_ops'"
    assert select.choose("cpu").reasons == (missing, "torch: chosen")


def test_named_backend_is_chosen_or_an_error(fast):
    assert select.choose("cpu", "torch").reasons == ("torch: chosen, requested by name",)
    with pytest.raises(FailedPrecondition, match="fast: needs CUDA, not cpu"):
        select.choose("cpu", "fast")


def test_unknown_backend_name_is_refused_with_the_known_ones(fast):
    with pytest.raises(InvalidArgument, match="auto, fast,") as refusal:
        select.choose("cpu", "slow")
    assert refusal.value.field == "backend"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_has_no_backend():
    with pytest.raises(FailedPrecondition, match="torch: PyTorch finds no CUDA device"):
        select.choose("cuda:0")
