"""Before anything is measured: every operation on this device, by kernels and by torch, against float64."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from kvplane_worker.ops.triton_ops import writes
from kvplane_worker.ops.triton_ops.launch import Chip, chip_of
from tests.bench.gpu.figures import Sizes
from tests.ops.contract import CHECKS, run
from tests.ops.subjects import SUBJECTS

# Each has a context on the GPU, about half a GiB.
PROCESSES = 8


def failures(device: torch.device, sizes: Sizes) -> list[str]:
    """A line for each case that is wrong. Operations are checked by several processes on a GPU, so that their kernels
    are compiled at the same time.
    """
    tasks = [(backend, operation, str(device), sizes.seeds) for backend in ("triton", "torch") for operation in CHECKS]
    if device.type != "cuda":
        return [line for task in tasks for line in wrong_cases(*task)]
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        found = [line for lines in pool.map(wrong_cases, *zip(*tasks, strict=True)) for line in lines]
    return found + different_bytes(device)


def wrong_cases(backend: str, operation: str, device: str, seeds: int) -> list[str]:
    """The cases of one operation that are wrong."""
    return run(SUBJECTS[backend](device), operation, range(seeds))


def different_bytes(device: torch.device) -> list[str]:
    """8-bit floats by instructions and by integers: the same bytes, where the chip has the instructions."""
    chip = chip_of(device)
    if not chip.native_fp8:
        return []
    integers = Chip(chip.multiprocessors, chip.shared_bytes, native_fp8=False)
    key = torch.randint(-(2**15), 2**15, (4096, 8, 128), dtype=torch.int16, device=device).view(torch.bfloat16)
    scale, slots = torch.rand(8, device=device) + 0.01, torch.arange(4096, device=device)
    stored = []
    for each in (chip, integers):
        pages = torch.zeros((256, 16, 8, 128), dtype=torch.uint8, device=device)
        written = writes.Written(key, pages.view(torch.float8_e4m3fn), scale)
        writes.write_launch(written, None, slots, each).run()
        stored.append(pages.view(4096, 8, 128))
    is_nan = [(part & 0x7F) == 0x7F for part in stored]
    different = (stored[0] != stored[1]) & ~(is_nan[0] & is_nan[1])
    count = int(different.sum())
    return [f"{count} bytes differ between float8 by instructions and by integers"] if count else []
