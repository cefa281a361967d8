"""The checks that decide whether the Triton backend can be used, before Triton is imported. A worker on a CPU never
imports Triton.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil

import torch

from kvplane_kernels.interface import PagedOps

MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)


class TritonEntry:
    """A class that `select` can load without importing Triton. Calling it creates a `TritonOps`."""

    def __new__(cls) -> PagedOps:  # type: ignore[misc]
        """Import Triton and create the backend."""
        from kvplane_kernels.triton_ops.backend import TritonOps

        return TritonOps()

    @staticmethod
    def unfit(device: torch.device) -> str:
        """Return why the backend cannot work on a device; "" if it can.

        CPU tensors need Triton's interpreter, which only tests use.
        """
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        return unfit_machine(capability, installed_version(), os.environ.get("CC") or c_compiler())


def installed_version() -> str:
    """Return the installed version of Triton; "" if it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def c_compiler() -> str | None:
    """Return the path of the C compiler with which Triton would build its launchers; None if there is none."""
    return shutil.which("gcc") or shutil.which("clang")


def unfit_machine(capability: tuple[int, int], version: str, compiler: str | None) -> str:
    """Return why Triton kernels cannot run with this device, Triton version and C compiler; "" if they can."""
    if capability < MIN_CAPABILITY:
        return f"compute capability {dotted(capability)} is below {dotted(MIN_CAPABILITY)}"
    if not version:
        return "triton is not installed"
    if version_of(version) < MIN_TRITON:
        return f"triton {version} is older than {dotted(MIN_TRITON)}"
    return "" if compiler else "no C compiler (CC, gcc or clang), which Triton needs for its launchers"


def dotted(numbers: tuple[int, int]) -> str:
    """Return two numbers as a version text, such as "3.1"."""
    return f"{numbers[0]}.{numbers[1]}"


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
