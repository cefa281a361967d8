"""The checks that decide whether the FlashInfer backend can be used. They run before FlashInfer is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from kvplane_worker.ops.interface import PagedOps
from kvplane_worker.ops.proof import prove
from kvplane_worker.ops.torch_ops import TorchOps
from kvplane_worker.ops.triton_ops.entry import TritonEntry

PACKAGE = "flashinfer-python"
# Supported versions: FIRST <= version < BELOW. Later ones may change the calls.
FIRST, BELOW = (0, 7, 2), (0, 8)
MIN_CAPABILITY = (8, 0)
REMEDY = f"install {PACKAGE}>=0.7.2,<0.8"


class FlashInferEntry:
    """A class that `select` can load without importing FlashInfer. Calling it creates a `FlashInferOps`."""

    def __new__(cls) -> PagedOps:  # type: ignore[misc]
        """Import FlashInfer, and create the backend together with the best other backend of the current device.

        Raises:
            ImportError: FlashInfer or a dependency cannot be imported.
        """
        from kvplane_worker.ops.flashinfer_ops.backend import FlashInferOps

        try:
            library = importlib.import_module("flashinfer")
        except (AttributeError, OSError, RuntimeError, ValueError) as error:
            raise ImportError(f"flashinfer cannot be imported: {error}") from error
        return FlashInferOps(best_other(torch.device("cuda", torch.cuda.current_device())), library)

    @staticmethod
    def unfit(device: torch.device) -> str:
        """Return why the backend cannot work on a device; "" if it can."""
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        return unfit_machine(capability, installed_version(), nvcc(), find_spec("flashinfer_jit_cache") is not None)


def best_other(device: torch.device) -> PagedOps:
    """Create the backend that computes what FlashInfer does not support: Triton if it passes its trials on the device,
    else PyTorch.
    """
    return TritonEntry() if is_triton_proved(device) else TorchOps()


@cache
def is_triton_proved(device: torch.device) -> bool:
    """Return whether the Triton backend supports the device and passes its trials there. The result is computed once
    per device.
    """
    return not TritonEntry.unfit(device) and not prove(TritonEntry(), device).failure


def installed_version() -> str:
    """Return the installed version of FlashInfer; "" if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvcc() -> str | None:
    """Return the path of the compiler that FlashInfer would use for its kernels; None if there is none."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    home = next((home for home in homes if home), None)
    given = os.environ.get("FLASHINFER_NVCC") or (f"{home}/bin/nvcc" if home else shutil.which("nvcc"))
    path = Path(given or "/usr/local/cuda/bin/nvcc")
    return str(path) if path.exists() else None


def unfit_machine(capability: tuple[int, int], version: str, compiler: str | None, has_prebuilt: bool) -> str:
    """Return why FlashInfer cannot run with this device, FlashInfer version and compiler; "" if it can."""
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    if not version:
        return f"flashinfer is not installed: {REMEDY}"
    if not FIRST <= numbers(version) < BELOW:
        return f"flashinfer {version} is not supported: {REMEDY}"
    if compiler or has_prebuilt:
        return ""
    return "no nvcc, which compiles FlashInfer's kernels: set CUDA_HOME, or install flashinfer-jit-cache"


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 7, 2) for 0.7.2.post1."""
    parts = version.split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())
