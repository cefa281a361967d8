"""A block pool with one object per block, the obvious design, to compare with columns."""

from __future__ import annotations

from collections import OrderedDict


class Block:
    """One block of the pool."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0
        self.key: bytes | None = None


class ObjectPool:
    """References, an LRU order and a map from keys to blocks; free blocks in an ordered dictionary."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, Block] = OrderedDict((n, Block(n)) for n in range(1, num_blocks))
        self.index: dict[bytes, Block] = {}

    def take(self, count: int) -> list[Block]:
        """Allocate the oldest free blocks."""
        taken = [self.free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if block.key is not None:
                del self.index[block.key]
                block.key = None
            block.references = 1
        return taken

    def find(self, key: bytes) -> Block | None:
        """Find the block of a key."""
        return self.index.get(key)

    def touch(self, blocks: list[Block]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if block.references == 0:
                del self.free[block.number]
            block.references += 1

    def register(self, block: Block, key: bytes) -> None:
        """Register a key for the block."""
        block.key = key
        self.index[key] = block

    def release(self, blocks: list[Block]) -> None:
        """Release a reference of each block."""
        for block in blocks:
            block.references -= 1
            if block.references == 0:
                self.free[block.number] = block
                self.free.move_to_end(block.number, last=block.key is not None)


class ObjectDecoder:
    """256 requests that grow by a token per step, one group of full attention, over the object pool."""

    def __init__(self, pool: ObjectPool, num_requests: int, num_tokens: int, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.tokens = [num_tokens + n % block_size for n in range(num_requests)]
        self.tables = [pool.take(-(-tokens // block_size)) for tokens in self.tokens]

    def step(self, keys: dict[int, bytes]) -> None:
        """Each request: one token, a block where one starts, a key where one fills (given by request)."""
        for request, table in enumerate(self.tables):
            self.tokens[request] += 1
            if self.tokens[request] > len(table) * self.block_size:
                table.extend(self.pool.take(1))
            if request in keys:
                self.pool.register(table[-1], keys[request])
