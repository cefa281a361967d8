"""A linker with a planted fault: loads write other bytes. Tokens must differ, else these tests see nothing."""

from __future__ import annotations

from kvplane_sglang.linker import KvplaneLinker
from kvplane_sglang.pools import PagePool


class FaultyPool(PagePool):
    """Loads zeroes."""

    def scatter(self, indices, source):
        super().scatter(indices, source * 0)


class FaultyLinker(KvplaneLinker):
    """Loads them after it has verified the right bytes."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        pools = self.tiers._pools
        for name, pool in pools.items():
            pools[name] = FaultyPool(pool.name, pool.tensors, pool.rows)
