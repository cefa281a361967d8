"""Before anything is measured: every operation on this device, by kernels and by torch, against float64."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from kvplane_kernels.cudnn_ops.entry import CudnnEntry
from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    StateInputs,
    StatePages,
    StateWeights,
)
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops import writes
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.launch import HOST, Chip, chip_of
from tests.bench.gpu.figures import Sizes
from tests.kernels.contract import CHECKS, run
from tests.kernels.subjects import SUBJECTS

# Each has a context on the GPU, about half a GiB.
PROCESSES = 16
# Seeds that a process checks at a time: each compiles kernels of its own, several seconds each.
SEEDS_AT_ONCE = 5
STATE_ERROR = 1e-5
WIDTH_ERROR = 2e-2

Task = tuple[str, str, str, Sequence[int]]


def failures(device: torch.device, sizes: Sizes) -> Iterator[str]:
    """Yield a line for each case that is wrong, as it is found. Cases are checked by several processes on a GPU, so
    that their kernels are compiled at the same time.
    """
    at_once = [range(sizes.seeds)[start : start + SEEDS_AT_ONCE] for start in range(0, sizes.seeds, SEEDS_AT_ONCE)]
    tasks = [
        (backend, operation, str(device), seeds)
        for backend in ("triton", "torch")
        for operation in sorted(CHECKS, key=lambda name: "attention" not in name)  # the longest first
        for seeds in at_once
    ]
    if not CudnnEntry.unfit(device):
        tasks += [("cudnn", "prefill_attention", str(device), seeds) for seeds in at_once]
    if device.type != "cuda":
        for task in tasks:
            yield from wrong_cases(*task)
        return
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(wrong_cases, *task) for task in tasks]):
            yield from done.result()
    yield from different_bytes(device)
    yield from different_states(device)
    yield from different_widths(device)


def wrong_cases(backend: str, operation: str, device: str, seeds: Sequence[int]) -> list[str]:
    """The cases of one operation that are wrong."""
    torch.set_num_threads(1)
    try:
        return run(SUBJECTS[backend](device), operation, seeds)
    except Exception as error:  # a kernel that does not compile
        return [f"{operation} by {backend}, seeds {seeds[0]} to {seeds[-1]}: {error!r}"]


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


def different_widths(device: torch.device) -> list[str]:
    """Prompts over 8-bit pages whose values have another size than their keys, which few cases of the contract have."""
    generator, found, lengths = torch.Generator().manual_seed(1), [], (79, 300)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for size, size_v in ((40, 16), (64, 16), (80, 40), (128, 64), (64, 128), (192, 128)):
            room = torch.randn((40, 16, size + size_v), generator=generator).to(dtype).flatten(1).to(device)
            k, v = room[:, : 16 * size].unflatten(1, (16, 1, size)), room[:, 16 * size :].unflatten(1, (16, 1, size_v))
            pages = AttentionPages(k, v, *(torch.full((1,), 0.5, device=device) for _ in range(2)))
            query = torch.randn((sum(lengths), 4, size), generator=generator).bfloat16().to(device)
            table = torch.arange(38, dtype=torch.int32).view(2, 19) + 1
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            batch = Batch(table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), starts.to(device))
            results = [
                ops.prefill_attention(query, pages, batch, AttentionRule(size**-0.5)).double()
                for ops in (TritonOps(), TorchOps())
            ]
            error = float((results[0] - results[1]).norm() / results[1].norm())
            if not error < WIDTH_ERROR:
                found.append(f"prefill over {dtype}, keys of {size} and values of {size_v}: error {error:.1e}")
    return found


def different_states(device: torch.device) -> list[str]:
    """States over several chunks, which the cases of the contract are too short for, against torch in float64."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = []
    for heads, size, state in ((4, 4, 8), (2, 64, 128)):
        channels, lengths = heads * size + 2 * state, (160, 1, 70)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        write = torch.zeros(sum(lengths), dtype=torch.int32)
        write[[63, 64, 159, 160, 230]] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
        read = torch.tensor([0, 4, 6], dtype=torch.int32)
        pages = drawn(7, channels, 3), drawn(7, heads, size, state)
        tokens = drawn(sum(lengths), channels), drawn(sum(lengths), heads).abs()
        weights = drawn(channels, 4), drawn(channels), -drawn(heads).abs(), drawn(heads)
        results = []
        for ops, place, dtype in ((TritonOps(), device, torch.float32), (TorchOps(), HOST, torch.float64)):
            conv, ssm = (part.to(place, dtype, copy=True) for part in pages)
            inputs = StateInputs(
                *(part.to(place) for part in (starts, read, write)), *(t.to(place, dtype) for t in tokens)
            )
            y = ops.state_step(
                StatePages(conv, ssm), inputs, StateWeights(*(part.to(place, dtype) for part in weights))
            )
            results.append([part.cpu().double() for part in (y, conv, ssm)])
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
        if not worst < STATE_ERROR:
            found.append(f"states of {heads} x {size} x {state} over several chunks: error {worst:.1e}")
    return found
