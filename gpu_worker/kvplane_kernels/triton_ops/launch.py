"""A kernel launch as a value: kernel, grid and arguments. Tests compile the same launches for other devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton

from kvplane_kernels.triton_ops.kernels import numbers

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: a function of `kernels`.
        grid: number of programs per axis.
        arguments: run-time arguments.
        constants: compile-time arguments.
        num_warps: warps (32 threads) per program.
        overlaps: whether it may begin before the launch before it in the stream has ended; the kernel waits for that
            itself (sm_90 and later).
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    overlaps: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the launch for Triton."""
        return options_of(self.num_warps, self.overlaps)

    def run(self) -> None:
        """Launch the kernel on the current stream of the tensors' device; in the interpreter, run it.

        Triton launches on the thread's current device, also if the pointers belong to another device. So the tensors'
        device is made current first.
        """
        with current(device_of(self.arguments)):
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    def compile(self) -> None:
        """Compile the kernel for the tensors' device, or load it from Triton's cache, without running it."""
        with current(device_of(self.arguments)):
            self.kernel.warmup(*self.arguments, **self.constants, grid=self.grid, **self.options)


def options_of(num_warps: int, overlaps: bool) -> dict[str, Any]:
    """Return the options of a launch for Triton."""
    return {"num_warps": num_warps, "launch_pdl": True} if overlaps else {"num_warps": num_warps}


class Fixed:
    """A kernel with a fixed grid and constants, for launches whose other arguments differ only in numbers for which
    Triton compiles no other kernel.

    The first call finds the compiled kernel as any launch does. Later ones skip Triton's binder, which looks at every
    argument and costs tens of microseconds. This is safe only as long as types, alignments and divisibilities of all
    arguments stay as in the first call: the caller keeps one object for each combination.
    """

    def __init__(
        self,
        kernel: Any,  # noqa: ANN401
        constants: Mapping[str, Any],
        num_warps: int,
        overlaps: bool = False,
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.num_warps = num_warps
        self.overlaps = overlaps
        self._options = options_of(num_warps, overlaps)
        self._values = tuple(constants.values())
        self._compiled: Any = None
        self._run: Any = None
        self._grid = (0, 0, 0)

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> Launch:
        """Return a launch as a value."""
        return Launch(self.kernel, grid, arguments, self.constants, self.num_warps, self.overlaps)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:  # noqa: ANN401
        """Launch the kernel on the current stream of the current device, which is that of the tensors."""
        if self._compiled is not None:
            if grid != self._grid:
                self._grid, self._run = grid, self._compiled[grid]
            self._run(*arguments, *self._values)
        elif is_interpreted():
            self.kernel[grid](*arguments, **self.constants, **self._options)
        else:
            self._compiled = self.kernel[grid](*arguments, **self.constants, **self._options)


def device_of(arguments: Iterable[Any]) -> torch.device:
    """Return the device of the first CUDA tensor among the arguments, also inside tuples; the host if there is none."""
    for argument in arguments:
        found = argument.device if isinstance(argument, torch.Tensor) else HOST
        if isinstance(argument, tuple):
            found = device_of(argument)
        if found.type == "cuda":
            return found
    return HOST


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the given device is the thread's current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True, slots=True)
class Chip:
    """The device properties that launches depend on.

    Attributes:
        multiprocessors: number of multiprocessors.
        shared_bytes: most shared memory of one program, in bytes.
        native_fp8: whether the device has instructions that convert 8-bit floats (sm_89 and later).
        interpreted: whether there is no device, and Triton's interpreter runs kernels with numpy (see `kernels`).
        has_tensor_memory: whether products are accumulated in tensor memory (sm_100, sm_103), from which all threads
            load them again.
        can_overlap: whether a launch may begin before the one before it has ended (sm_90 and later).
    """

    multiprocessors: int
    shared_bytes: int
    native_fp8: bool
    interpreted: bool = False
    has_tensor_memory: bool = False
    can_overlap: bool = False

    @property
    def has_warp_groups(self) -> bool:
        """Whether 4 warps multiply together, with accumulators in registers (sm_90)."""
        return self.can_overlap and not self.has_tensor_memory

    def fp8(self, dtype: torch.dtype) -> int:
        """Return how kernels convert elements of a type: a constant of `kernels.numbers`."""
        ways = {
            torch.float8_e4m3fn: (numbers.E4M3_NATIVE, numbers.E4M3_PACKED, numbers.E4M3_INTEGER),
            torch.float8_e5m2: (numbers.E5M2_NATIVE, numbers.E5M2_PACKED, numbers.E5M2_INTEGER),
        }.get(dtype, (numbers.NO_FP8,) * 3)
        return int(ways[2 if self.interpreted else 0 if self.native_fp8 else 1].value)


# Few multiprocessors, so that the rows of a test are split over workers.
INTERPRETER = Chip(multiprocessors=12, shared_bytes=1 << 20, native_fp8=False, interpreted=True)


def is_interpreted() -> bool:
    """Return whether the kernels were compiled for the interpreter (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


@cache
def chip_of(device: torch.device) -> Chip:
    """Return the properties of a device's chip."""
    if device.type != "cuda":
        return INTERPRETER
    found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    capability = torch.cuda.get_device_capability(device)
    return Chip(
        multiprocessors=found["multiprocessor_count"],
        shared_bytes=found["max_shared_mem"],
        native_fp8=capability >= (8, 9),
        has_tensor_memory=capability[0] == 10,
        can_overlap=capability >= (9, 0),
    )
