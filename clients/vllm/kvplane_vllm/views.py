"""Read-only objects of vLLM's types that show the state of kvplane's allocator: blocks, pool, managers and coordinator.

vLLM's scheduler, connectors and tests read their attributes. An object reads the allocator at each access and stores no
state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvplane_core.face.interface import INSIDE, Need
from kvplane_core.face.keys import Key

if TYPE_CHECKING:
    from kvplane_core.face.native.row_views import NativePool


def _key_of(digest: bytes, group: int) -> Key:
    """Return the allocator's key of a block hash. All keys have one domain, since vLLM's hash already covers salt and
    adapter.
    """
    return "", group, digest


class Block:
    """One block of the allocator, with the attributes of vLLM's KVCacheBlock."""

    __slots__ = ("_pool", "block_id")

    def __init__(self, pool: NativePool, block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """The number of requests that hold the block."""
        return self._pool.references[self.block_id]

    @property
    def is_null(self) -> bool:
        """Whether this is the null block."""
        return self.block_id == 0

    @property
    def block_hash(self) -> Any:
        """The block's key in the prefix cache, followed by vLLM's group suffix; None for a block without a key."""
        found = self._pool.key_of(self.block_id)
        return None if found is None else make_block_hash_with_group_id(found[2], found[1])  # type: ignore[arg-type]

    @property
    def block_hash_num_tokens(self) -> int | None:
        """The number of prompt tokens, from the first one, that the block's key identifies; None for a block without a
        key.
        """
        return None if self._pool.key_of(self.block_id) is None else self._pool.key_tokens[self.block_id]

    def __eq__(self, other: object) -> bool:
        return getattr(other, "block_id", None) == self.block_id

    def __hash__(self) -> int:
        return hash(self.block_id)

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt})"


class Blocks(KVCacheBlocks):
    """Blocks of a request, by group. Their objects are made when they are read: vLLM's scheduler reads only the ids."""

    def __init__(self, objects: Sequence[Block], ids: Sequence[Sequence[int]]) -> None:
        """`objects`: all blocks of the pool. `ids`: the blocks of each group; the caller must not change them later."""
        self._objects, self._ids = objects, ids
        self._is_empty = not any(ids)

    @cached_property
    def blocks(self) -> Any:
        """The blocks of each group."""
        return tuple([self._objects[block] for block in row] if row else () for row in self._ids)

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> Any:
        """See vLLM's KVCacheBlocks."""
        if allow_none and self._is_empty:
            return None
        ids = self._ids if group_ids is None else [self._ids[group] for group in group_ids]
        return None if allow_none and not any(ids) else tuple([list(row) for row in ids])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and list(map(list, self.blocks)) == list(map(list, other.blocks))

    __hash__ = None  # type: ignore[assignment]


class Pool:
    """The allocator's block pool, with the attributes of vLLM's BlockPool."""

    def __init__(self, manager: Any) -> None:  # an InProcessManager, which makes the views
        self._manager = manager
        self.enable_caching = manager.enable_caching
        self.hash_block_size = manager.spec.hash_block_size
        self.num_gpu_blocks = manager.spec.num_blocks
        self.enable_kv_cache_events = manager.enable_kv_cache_events
        self.metrics_collector = manager.metrics_collector

    @property
    def blocks(self) -> Sequence[Block]:
        """All blocks; the index is the block id."""
        return self._manager.blocks

    @property
    def null_block(self) -> Block:
        """Block 0, which is never allocated and stands for a missing block."""
        return self._manager.blocks[0]

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that can be allocated now."""
        return self._manager.pool.num_free

    def get_usage(self) -> float:
        """Return the share of the blocks that requests hold, 0 to 1."""
        total = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Sequence[int]) -> list[Block] | None:
        """Return, for each group, one block with this block hash; None if a group has no such block."""
        found = self._manager.pool.find("", tuple(kv_cache_group_ids), bytes(block_hash), INSIDE)
        return None if found is None else [self._manager.blocks[block] for block in found]

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Return to the pool the blocks that `pop_blocks_for_free` returned."""
        self._manager.release_popped([block.block_id for block in blocks])

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove the prefix cache keys of these blocks."""
        self._manager.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Remove all keys of the prefix cache, if no request holds a block."""
        return self._manager.reset_prefix_cache()

    def take_events(self) -> list[Any]:
        """Return the cache events since the last call."""
        return self._manager.take_pending_events()


class Manager:
    """A stand-in for vLLM's SingleTypeKVCacheManager of one group, for code that reads its attributes.

    Constants (`FIXED`) are read from the manager that vLLM built; blocks and counts are read from kvplane's allocator,
    which makes every allocation instead of vLLM's manager.
    """

    def __init__(self, manager: Any, group: int, real: Any) -> None:
        self._manager, self._group, self._real = manager, group, real

    @property
    def block_pool(self) -> Pool:
        """The block pool that all groups share."""
        return self._manager.block_pool

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the manager that vLLM built: vLLM's code and tests look for it with isinstance."""
        return type(self._real)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens the token at position `num_computed_tokens` does not attend to."""
        return self._manager.managers[self._group].skipped_tokens(num_computed_tokens)

    FIXED = frozenset(
        (
            "block_size",
            "kv_cache_spec",
            "kv_cache_group_id",
            "use_eagle",
            "max_admission_blocks_per_request",
            "records_new_block_ids",
            "retains_longer_hit",
            "cache_hit_alignment_tokens",
            "dcp_world_size",
            "has_positionally_stable_blocks",
        )
    )

    def __getattr__(self, name: str) -> Any:
        if name in Manager.FIXED:
            return getattr(self._real, name)
        raise AttributeError(f"kvplane does not show {name!r} of vLLM's managers")


class Coordinator:
    """A stand-in for vLLM's KVCacheCoordinator, for code that reads its attributes.

    Constants are read from the coordinator that vLLM built; blocks and counts are read from kvplane's allocator, which
    makes every allocation instead of vLLM's coordinator.
    """

    @classmethod
    def of(cls, manager: Any, real: Any) -> Coordinator:
        """Return a stand-in for `real`, vLLM's coordinator. Its class has the name of `real`'s class, which vLLM's
        tests and logs read.
        """
        named: type[Coordinator] = type(type(real).__name__, (cls,), {})
        return named(manager, real)

    def __init__(self, manager: Any, real: Any) -> None:
        self._manager, self._real = manager, real
        self.single_type_managers = tuple(
            Manager(manager, group, one) for group, one in enumerate(real.single_type_managers)
        )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the coordinator that vLLM built: vLLM's connectors and tests look for it with isinstance."""
        return type(self._real)

    @property
    def block_pool(self) -> Pool:
        """The block pool that all groups share."""
        return self._manager.block_pool

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[Block]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int | None = None,
    ) -> int:
        """Return by how many blocks an allocation with these arguments would reduce the number of free blocks."""
        known = self._manager.known.get(request_id)
        need = Need(
            self._manager.spare_slot if known is None else known.slot,
            num_tokens,
            num_tokens_main_model,
            total_computed_tokens,
            num_local_computed_tokens,
            num_encoder_tokens,
            capped=apply_admission_cap,
        )
        hits = [[block.block_id for block in blocks] for blocks in new_computed_blocks]
        return sum(one.blocks_needed(need, hit) for one, hit in zip(self._manager.managers, hits, strict=True))

    def get_blocks(self, request_id: str) -> Any:
        """Return the blocks of a request, one list per group."""
        return self._manager.get_blocks(request_id).blocks

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_length: int) -> tuple[Any, int, int]:
        """Return the longest cached prefix on which all groups agree: the blocks per group, its length in tokens, and
        the tokens by which the longest hit of a single group exceeds it.
        """
        hit = self._manager.find_hit(block_hashes, max_length)
        blocks = tuple([self._manager.blocks[block] for block in row] for row in hit.blocks)
        return blocks, hit.num_tokens, max(0, hit.single_group_hit - hit.num_tokens)

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[list[Block], ...], tuple[int, ...]]:
        """Return the longest cached prefix of each group by itself: the blocks, and the lengths in tokens."""
        lookup = self._manager.replica.coordinator.lookup
        rows, lengths = lookup.find_each(block_hashes, "", max_cache_hit_length, INSIDE)
        return tuple([self._manager.blocks[block] for block in row] for row in rows), tuple(lengths)

    FIXED = frozenset(
        (
            "attention_groups",
            "drop_eagle_group_ids",
            "eagle_group_ids",
            "enable_partial_hash_hits",
            "full_attention_group_id",
            "hash_block_size",
            "kv_cache_config",
            "max_model_len",
            "num_reprefillable_tokens",
            "retention_interval",
            "scheduler_block_size",
            "_cache_hit_alignment_tokens",
        )
    )

    def __getattr__(self, name: str) -> Any:
        if name in Coordinator.FIXED:
            return getattr(self._real, name)
        raise AttributeError(f"kvplane does not show {name!r} of vLLM's coordinator")
