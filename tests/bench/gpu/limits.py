"""What the machine can do: each limit is the best of simple ways to reach it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tests.bench.gpu.figures import Limit, Sizes
from tests.bench.gpu.timing import Clock, Work

CALLS = 100


@triton.jit
def read_words(words, sums, count, WORDS: tl.constexpr):
    """Read everything, write next to nothing."""
    total = tl.full([WORDS], 0, tl.int32)
    for start in range(tl.program_id(0) * WORDS, count, tl.num_programs(0) * WORDS):
        index = start + tl.arange(0, WORDS)
        total += tl.load(words + index, mask=index < count, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def nothing(word):
    """A launch that does nothing."""


@dataclass(frozen=True)
class Limits:
    """Bytes per second: read + written for a copy. Seconds of a launch: on the device, and of the host."""

    copy: Limit
    read: Limit
    fill: Limit
    to_host: Limit
    to_device: Limit
    launch: Limit
    host_launch: Limit

    def all(self) -> tuple[Limit, ...]:
        return (self.copy, self.read, self.fill, self.to_host, self.to_device, self.launch, self.host_launch)


def measure(clock: Clock, sizes: Sizes) -> Limits:
    device, count = clock.device, sizes.moved_bytes // 4
    words = torch.randint(0, 1000, (count,), dtype=torch.int32, device=device)
    other, sums = torch.empty_like(words), torch.zeros(1 << 14, dtype=torch.int32, device=device)
    num_bytes = words.numel() * 4
    pinned = torch.empty(sizes.link_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = torch.empty(sizes.link_bytes, dtype=torch.uint8, device=device)
    reads: list[Work] = [lambda: torch.sum(words)]
    programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    for per_program, width, warps in ((4, 4096, 8), (8, 4096, 4), (4, 8192, 8), (2, 16384, 16)):
        reads.append(reader(words, sums, (programs * per_program, width, warps)))
    # In a graph the driver copies at two thirds of the speed of a call or of a kernel.
    copies = clock.seconds_as_called(lambda: other.copy_(words)), clock.seconds(lambda: torch.add(words, 1, out=other))
    return Limits(
        copy=Limit("device copy", 2 * num_bytes / min(copies)),
        read=Limit("device read", num_bytes / min(clock.seconds(read) for read in reads)),
        fill=Limit("device fill", num_bytes / clock.seconds(lambda: other.zero_())),
        to_host=Limit("pinned copy to the host", len(near) / clock.seconds_as_called(lambda: sent(near, pinned))),
        to_device=Limit("pinned copy to the device", len(near) / clock.seconds_as_called(lambda: sent(pinned, near))),
        launch=Limit("launch floor", clock.seconds(lambda: nothing[(1,)](sums))),
        host_launch=Limit("host time of a launch by Triton", host_seconds(clock, lambda: nothing[(1,)](sums))),
    )


def host_seconds(clock: Clock, work: Work) -> float:
    """Seconds of the host per call. Work of the device is not waited for."""
    work()
    if clock.device.type == "cuda":
        torch.cuda.synchronize(clock.device)
    calls = CALLS if clock.device.type == "cuda" else 1
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def reader(words: torch.Tensor, sums: torch.Tensor, shape: tuple[int, int, int]) -> Work:
    programs, width, warps = shape
    return lambda: read_words[(programs,)](words, sums, words.numel(), WORDS=width, num_warps=warps)


def sent(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target.copy_(source, non_blocking=True)
