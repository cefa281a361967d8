"""What a worker process costs an engine on the same GPU: mapping its memory, and its copies while the engine decodes.

Without MPS the kernels of two processes take turns on the GPU, while copy engines work concurrently with kernels.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_worker.memory import open_memory
from tests.bench.gpu.decoding import decoder
from tests.bench.gpu.figures import Figure, Sizes
from tests.bench.gpu.limits import Limits
from tests.bench.gpu.moving import pages_of
from tests.bench.gpu.timing import Clock
from tests.engine.backends import lender

PAGE_BYTES = 64 << 10
MOST_ATTACH_S = 0.1


def attached(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Map memory of another process by its handle."""
    with lender() as other:
        other.connection.send((str(clock.device), sizes.moved_bytes))
        handle = other.connection.recv()
        begin = time.perf_counter()
        memory = open_memory(handle)
        memory.tensor()[:1].sum().item()
        spent = time.perf_counter() - begin
        memory.close()
    name = f"attach {sizes.moved_bytes >> 20} MiB of another process, seconds"
    yield Figure(name, spent, "a second", spent, MOST_ATTACH_S, at_most=True)


def copies(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    """Decode while another process saves pages over the host link, by each route."""
    decode = decoder(clock.device, (torch.bfloat16, 16, sizes.kv_heads), [sizes.context] * sizes.rows)
    alone = clock.seconds(decode)
    for way in ("batched", "buffered"):
        with saving(clock, sizes, way) as works:
            if works:
                ratio = alone / clock.seconds(decode)
                name = "batched copies" if way == "batched" else "kernels and copies of buffers"
                yield Figure(f"decode while another process saves pages by {name}", ratio, "decode alone", ratio)


@contextmanager
def saving(clock: Clock, sizes: Sizes, way: str) -> Iterator[bool]:
    """Another process that saves pages until the end; yields whether it has the route."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=save_until_closed, args=(theirs, clock, sizes.link_bytes, way), daemon=True)
    process.start()
    theirs.close()
    try:
        yield bool(ours.recv())
    finally:
        ours.close()
        process.join()


def save_until_closed(connection: Connection, clock: Clock, num_bytes: int, way: str) -> None:
    """Save pages repeatedly, until the other end closes the connection."""
    group, is_cuda = pages_of(clock, 2 * num_bytes, PAGE_BYTES, layers=1), clock.device.type == "cuda"
    blocks = (torch.randperm(group.layers[0].shape[0] - 1)[: max(1, num_bytes // PAGE_BYTES)] + 1).tolist()
    rows = torch.empty((len(blocks), PAGE_BYTES), dtype=torch.uint8, pin_memory=is_cuda)
    route = getattr(TritonOps().link_of(group), way)
    if route is not None:
        route.save(group, blocks, rows)
    connection.send(route is not None)
    while route is not None and not connection.poll():
        route.save(group, blocks, rows)
        if is_cuda:
            torch.cuda.synchronize(clock.device)


PARTS = (attached, copies)
