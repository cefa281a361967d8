"""What decoding loses while the host link moves pages: at most 4 multiprocessors, and some bandwidth of the memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvplane_kernels.triton_ops.backend import TritonOps
from tests.bench.gpu.decoding import decoder
from tests.bench.gpu.figures import Figure, Sizes
from tests.bench.gpu.limits import Limits
from tests.bench.gpu.moving import pages_of
from tests.bench.gpu.timing import Clock

FRAGMENT_BYTES = 4 << 10
# Number of concurrent saves of `link_bytes`: on a GPU they take several times as long as the concurrent decodes.
SAVES = 4


def during_saves(clock: Clock, sizes: Sizes, limits: Limits) -> Iterator[Figure]:
    decode = decoder(clock.device, (torch.bfloat16, 16, sizes.kv_heads), [sizes.context] * sizes.rows)
    group = pages_of(clock, 2 * sizes.link_bytes, FRAGMENT_BYTES, layers=1)
    blocks = (torch.randperm(group.layers[0].shape[0] - 1) + 1).tolist()
    rows = torch.empty((len(blocks), FRAGMENT_BYTES), dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
    link = TritonOps().link_of(group)
    link.save(group, blocks, rows)  # measures its routes

    def saves() -> None:
        for _ in range(SAVES):
            link.save(group, blocks, rows)

    alone, loaded = clock.seconds_as_called(decode), clock.seconds_during(decode, saves)
    name = f"decode during saves of {FRAGMENT_BYTES >> 10} KiB fragments"
    yield Figure(name, alone / loaded, "decode alone", alone / loaded, 0.97)


PARTS = (during_saves,)
