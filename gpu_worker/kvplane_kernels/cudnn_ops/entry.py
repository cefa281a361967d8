"""The checks that decide whether the cuDNN backend can be used. They run before cuDNN's frontend is imported."""

from __future__ import annotations

import importlib
import importlib.metadata

import torch

from kvplane_kernels.interface import PagedOps
from kvplane_kernels.triton_ops.entry import TritonEntry, dotted, version_of

PACKAGE = "nvidia-cudnn-frontend"
# Supported versions: FIRST <= version < BELOW. Later ones may change the calls.
FIRST, BELOW = (1, 18), (2, 0)
MIN_CAPABILITY = (9, 0)
REMEDY = f"install {PACKAGE}>=1.18,<2"


class CudnnEntry:
    """A class that `select` can load without importing cuDNN's frontend. Calling it creates a `CudnnOps`."""

    def __new__(cls) -> PagedOps:  # type: ignore[misc]
        """Import cuDNN's frontend, and create the backend together with the Triton backend.

        Raises:
            ImportError: the frontend, or cuDNN itself, cannot be loaded.
        """
        from kvplane_kernels.cudnn_ops.backend import CudnnOps

        try:
            library = importlib.import_module("cudnn")
        except (AttributeError, OSError, RuntimeError, ValueError) as error:
            raise ImportError(f"cudnn cannot be imported: {error}") from error
        return CudnnOps(TritonEntry(), library)

    @staticmethod
    def unfit(device: torch.device) -> str:
        """Return why the backend cannot work on a device; "" if it can."""
        if why := TritonEntry.unfit(device):
            return why
        return unfit_machine(torch.cuda.get_device_capability(device), installed_version())


def installed_version() -> str:
    """Return the installed version of cuDNN's frontend; "" if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def unfit_machine(capability: tuple[int, int], version: str) -> str:
    """Return why cuDNN does not compute attention with this device and version of its frontend; "" if it does."""
    if capability < MIN_CAPABILITY:
        return f"compute capability {dotted(capability)} is below {dotted(MIN_CAPABILITY)}"
    if not version:
        return f"{PACKAGE} is not installed: {REMEDY}"
    return "" if FIRST <= version_of(version) < BELOW else f"{PACKAGE} {version} is not supported: {REMEDY}"
