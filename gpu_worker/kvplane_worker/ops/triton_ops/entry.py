"""Checks that selection runs before it imports Triton; a worker on a CPU never imports it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil

import torch

from kvplane_worker.ops.interface import PagedOps

MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)


class TritonEntry:
    """Creates a `TritonOps` where the machine supports it."""

    def __new__(cls) -> PagedOps:  # type: ignore[misc]
        """Import Triton, and create the backend."""
        from kvplane_worker.ops.triton_ops.backend import TritonOps

        return TritonOps()

    @staticmethod
    def unfit(device: torch.device) -> str:
        """Return why the backend cannot work on a device; "" = it can.

        CPU tensors need Triton's interpreter, which only tests use.
        """
        if device.type != "cuda":
            return f"needs a CUDA device, not {device.type}"
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        return unfit_machine(capability, installed_version(), os.environ.get("CC") or c_compiler())


def installed_version() -> str:
    """The installed version of Triton; "" = none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def c_compiler() -> str | None:
    """Path of the C compiler with which Triton would build its launchers; None = there is none."""
    return shutil.which("gcc") or shutil.which("clang")


def unfit_machine(capability: tuple[int, int], version: str, compiler: str | None) -> str:
    """Return why kernels cannot run with this device, Triton and compiler; "" = they can."""
    if capability < MIN_CAPABILITY:
        return f"compute capability {dotted(capability)} is below {dotted(MIN_CAPABILITY)}"
    if not version:
        return "triton is not installed"
    if version_of(version) < MIN_TRITON:
        return f"triton {version} is older than {dotted(MIN_TRITON)}"
    return "" if compiler else "no C compiler (CC, gcc or clang), which Triton needs for its launchers"


def dotted(numbers: tuple[int, int]) -> str:
    """Format two numbers as a version."""
    return f"{numbers[0]}.{numbers[1]}"


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
