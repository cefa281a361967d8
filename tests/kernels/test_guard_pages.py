"""Kernels access nothing outside their tensors: each tensor is next to a page without access rights."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.contract import run
from tests.kernels.subjects import SUBJECTS

PAGE = mmap.PAGESIZE
KEPT: list[mmap.mmap] = []
SEEDS = {"write_kv": 12, "decode_attention": 8, "prefill_attention": 8, "mla_decode": 5, "gather": 12, "checksum": 5}
SEEDS |= {"write_latent": 12, "copy_pages": 12, "zero_pages": 12, "scatter": 12}


def guarded_bytes(size: int, at_end: bool) -> np.ndarray:
    """Allocate memory that ends, or begins, at a page without access rights."""
    room = -(-max(size, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    KEPT.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (start, start + PAGE + room):
        assert protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0, os.strerror(ctypes.get_errno())
    offset = PAGE + (room - size if at_end else 0)
    return np.frombuffer(memory, np.uint8, size, offset)


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """Copy an array next to a guard page."""
    dense = tensor.contiguous()
    data = guarded_bytes(dense.numel() * dense.element_size(), at_end)
    data[:] = dense.view(-1).view(torch.uint8).numpy() if dense.numel() else 0
    return real_from_numpy(data).view(dense.dtype).view(dense.shape)


real_from_numpy, real_tensor, real_new_empty = torch.from_numpy, torch.tensor, torch.Tensor.new_empty


def guard_new_tensors(at_end: bool) -> None:
    """Place tensors made from arrays and lists, and results, next to guard pages, in this process from now on."""

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        return guarded(real_from_numpy(array), at_end)

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        return guarded(real_tensor(*args, **kwargs), at_end)

    def new_empty(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return guarded(real_new_empty(self, *args, **kwargs), at_end)

    torch.from_numpy, torch.tensor, torch.Tensor.new_empty = from_numpy, tensor, new_empty  # type: ignore[method-assign, assignment]


def in_a_child(work: Callable[[], int]) -> int:
    """Run work in a forked child. Returns its exit status; minus the signal number if a signal ended it.

    The child collects no garbage of earlier tests: gRPC's objects crash or hang in a child without their threads.
    """
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        gc.freeze()
        faulthandler.disable()
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("at_end", [True, False], ids=["ends at the guard", "begins at the guard"])
@pytest.mark.parametrize("operation", SEEDS)
def test_kernels_access_no_memory_outside_their_tensors(operation, at_end):
    def work() -> int:
        guard_new_tensors(at_end)
        subject = SUBJECTS["triton"]("cpu")
        failures = run(subject, operation, range(500, 500 + SEEDS[operation]))
        return min(len(failures), 50)

    assert in_a_child(work) == 0


@triton.jit
def read_one_too_many(source, target, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, tl.load(source + index + 1))


def test_guard_page_catches_one_element_too_many():
    def work() -> int:
        source, target = guarded(torch.zeros(64), True), torch.zeros(64)
        read_one_too_many[(1,)](source, target, COUNT=64)
        return 0

    assert in_a_child(work) == -signal.SIGSEGV
