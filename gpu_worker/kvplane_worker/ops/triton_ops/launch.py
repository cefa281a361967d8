"""A launch as a value: kernel, grid and arguments. So the very launches that run can also be compiled elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton

from kvplane_worker.ops.triton_ops.kernels.numbers import INTEGER_FP8, NATIVE_FP8

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: a function of `kernels`.
        grid: numbers of programs.
        arguments: what is known at launch.
        constants: what is compiled in.
        num_warps: 32 threads each, of a program.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4

    def run(self) -> None:
        """Start it on its tensors' device, on the stream that is current there; in the interpreter, run it.

        Triton launches on the thread's current device, whatever device the pointers are of.
        """
        with current(device_of(self.arguments)):
            self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.num_warps)


def device_of(arguments: Iterable[Any]) -> torch.device:
    """Of the first tensor on a device among arguments and tuples of them; the host when there is none."""
    for argument in arguments:
        found = argument.device if isinstance(argument, torch.Tensor) else HOST
        if isinstance(argument, tuple):
            found = device_of(argument)
        if found.type == "cuda":
            return found
    return HOST


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within, the device is the thread's current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True, slots=True)
class Chip:
    """What launches depend on.

    Attributes:
        multiprocessors: how many programs run side by side, at least.
        shared_bytes: shared memory of one multiprocessor that one program may have.
        native_fp8: conversions of float8_e4m3fn are instructions (sm_89 and later).
        interpreted: no device: numpy plays it (see `kernels`).
    """

    multiprocessors: int
    shared_bytes: int
    native_fp8: bool
    interpreted: bool = False

    @property
    def fp8(self) -> int:
        """How 8-bit elements become numbers: a constant of `kernels.numbers`."""
        return int((NATIVE_FP8 if self.native_fp8 else INTEGER_FP8).value)


# So few that a test's rows are shared among workers.
INTERPRETER = Chip(multiprocessors=12, shared_bytes=1 << 20, native_fp8=False, interpreted=True)


def is_interpreted() -> bool:
    """True when the kernels were decorated for the interpreter (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip that kernels on the device's tensors run on."""
    if device.type != "cuda":
        return INTERPRETER
    found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    return Chip(found["multiprocessor_count"], found["max_shared_mem"], has_fp8)
