"""What selection looks at before it imports Triton: a worker on a CPU never does."""

from __future__ import annotations

import importlib.metadata
import os
import shutil

import torch

from kvplane_worker.ops.interface import PagedOps

MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)


class TritonEntry:
    """Makes a `TritonOps`, where it fits."""

    def __new__(cls) -> PagedOps:  # type: ignore[misc]
        """Import Triton, and make the backend."""
        from kvplane_worker.ops.triton_ops.backend import TritonOps

        return TritonOps()

    @staticmethod
    def unfit(device: torch.device) -> str:
        """Return why the backend cannot work on a device, "" when it can.

        CPU tensors need the interpreter, which is for tests: no worker works so.
        """
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        return unfit_machine(capability, installed_version(), os.environ.get("CC") or c_compiler())


def installed_version() -> str:
    """Triton's version, "" when it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def c_compiler() -> str | None:
    """Where Triton would find a C compiler, which it needs to build its launchers; None when there is none."""
    return shutil.which("gcc") or shutil.which("clang")


def unfit_machine(capability: tuple[int, int], version: str, compiler: str | None) -> str:
    """Return why kernels cannot run with this device, Triton and compiler, "" when they can."""
    if capability < MIN_CAPABILITY:
        return f"compute capability {dotted(capability)} is below {dotted(MIN_CAPABILITY)}"
    if not version:
        return "triton is not installed"
    if version_of(version) < MIN_TRITON:
        return f"triton {version} is older than {dotted(MIN_TRITON)}"
    return "" if compiler else "no C compiler (CC, gcc or clang), which Triton needs for its launchers"


def dotted(numbers: tuple[int, int]) -> str:
    """Two numbers of a version."""
    return f"{numbers[0]}.{numbers[1]}"


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
