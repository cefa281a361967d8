"""What only vLLM's own tests read of the inside of its objects: added to the views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from kvplane_vllm import views
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.views import Block, _key_of


class FreeList:
    """The free blocks, as vLLM's free block queue; the next block to be allocated comes first."""

    def __init__(self, manager: InProcessManager) -> None:
        self._manager = manager

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that can be allocated now."""
        return self._manager.pool.num_free

    def get_all_free_blocks(self) -> list[Block]:
        """Return all free blocks, in the order in which they will be allocated."""
        return [self._manager.blocks[block] for block in self._manager.pool.free]

    @property
    def fake_free_list_head(self) -> FreeNode:
        """The sentinel of vLLM's linked list: its next block is the first free one."""
        return FreeNode(self._manager, [-1, *self._manager.pool.free, -1], 0)


class FreeNode:
    """A free block, with a link to the free block after it."""

    def __init__(self, manager: InProcessManager, order: Sequence[int], at: int) -> None:
        self._manager, self._order, self._at = manager, order, at
        self.block_id = order[at]

    @property
    def next_free_block(self) -> FreeNode:
        """The free block that will be allocated after this one."""
        return FreeNode(self._manager, self._order, self._at + 1)

    @property
    def ref_cnt(self) -> int:
        """The number of requests that hold the block: 0, because it is free."""
        return self._manager.pool.references[self.block_id]

    def __eq__(self, other: object) -> bool:
        return getattr(other, "block_id", None) == self.block_id

    def __hash__(self) -> int:
        return hash(self.block_id)


class Index:
    """The keys of the prefix cache, as vLLM's map from a block hash with group suffix to blocks."""

    def __init__(self, manager: InProcessManager) -> None:
        self._manager = manager

    def blocks_of(self, key: bytes) -> list[int]:
        """Return the blocks with this key, which is a block hash with vLLM's group suffix."""
        return self._manager.pool.blocks_of(_key_of(bytes(key[:-4]), int.from_bytes(key[-4:], "big")))

    def get_one_block(self, key: bytes) -> Block | None:
        """Return one of the blocks with this key; None if there is none."""
        found = self.blocks_of(key)
        return self._manager.blocks[found[0]] if found else None

    def contain(self, key: bytes, block_id: int) -> bool:
        """Return whether the block has this key."""
        return block_id in self.blocks_of(key)

    def pop(self, key: bytes, block_id: int | None = None) -> Any:
        """Remove the keys of the given block, or of all blocks with this key if none is given."""
        found = self.blocks_of(key)
        self._manager.evict_blocks({block for block in found if block_id in (None, block)})
        return found

    def __len__(self) -> int:
        return self._manager.pool.count_keys()


class Table(Sequence[Block]):
    """The blocks of a request in one group, as they are whenever they are read: vLLM's own list grows too. Once the
    request has none, those that were read last.
    """

    def __init__(self, manager: InProcessManager, read: Callable[[], list[int]]) -> None:
        self._blocks, self._read, self._last = manager.blocks, read, read()

    def _ids(self) -> list[int]:
        self._last = self._read() or self._last
        return self._last

    def __getitem__(self, index: Any) -> Any:
        found = self._ids()[index]
        return [self._blocks[block] for block in found] if isinstance(found, list) else self._blocks[found]

    def __iter__(self) -> Iterator[Block]:
        return iter(self[:])

    def __len__(self) -> int:
        return len(self._ids())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Tables(Mapping[str, Any]):
    """The blocks of each request in one group, as the mapping `req_to_blocks` of vLLM's manager."""

    def __init__(self, manager: InProcessManager, group: int) -> None:
        self._manager, self._group = manager, group

    def _table(self, request_id: str) -> list[int]:
        known = self._manager.known.get(request_id)
        return [] if known is None else self._manager.tables_of(known.slot)[self._group]

    def __getitem__(self, request_id: str) -> Any:
        return Table(self._manager, lambda: self._table(request_id))

    def get(self, request_id: str, default: Any = None) -> Any:
        """Return the blocks of a request; `default` if the request holds none."""
        return self[request_id] if request_id in self else default  # noqa: SIM401

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and bool(self._table(request_id))

    def __iter__(self) -> Iterator[str]:
        return iter([request_id for request_id in self._manager.known if request_id in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class NumCached(Tables):
    """The number of cached blocks of each request in one group, as `num_cached_block` of vLLM's manager."""

    def __getitem__(self, request_id: str) -> Any:
        return self._manager.managers[self._group].num_cached[self._manager.known[request_id].slot]

    def __contains__(self, request_id: object) -> bool:
        known = self._manager.known.get(request_id) if isinstance(request_id, str) else None
        return known is not None and self._manager.managers[self._group].num_cached[known.slot] >= 0


class PoolInside:
    """What tests do to a pool directly, for requests that no scheduler knows."""

    _manager: InProcessManager

    @property
    def kv_event_queue(self) -> list[Any]:
        """The cache events that `take_events` has not returned yet."""
        return self._manager.pending_events()

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take free blocks."""
        if num_blocks > self._manager.pool.num_free:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        return [self._manager.blocks[block] for block in self._manager.pool.take(num_blocks)]

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block."""
        self._manager.pool.touch([block.block_id for block in blocks])


class ManagerInside:
    """What tests read of the manager of a group."""

    _manager: InProcessManager
    _group: int

    @property
    def _checkpoints(self) -> dict[str, tuple[int, int]]:
        """The states inside the chunks of the last launches, by request: length in tokens, index in the table."""
        manager, requests = self._manager.managers[self._group], self._manager.replica.requests
        made = getattr(manager, "last_checkpoints", {})
        slots = {request_id: known.slot for request_id, known in self._manager.known.items()}
        now = {one: made[slot] for one, slot in slots.items() if slot in made}
        return {one: state[:2] for one, state in now.items() if state[2] == requests.launch_end(slots[one])}


class CoordinatorInside:
    """What tests call of a coordinator."""

    _manager: InProcessManager

    def free(self, request_id: str) -> None:
        """Free the blocks of a request."""
        self._manager.free_id(request_id)


def show_inside() -> None:
    """Add all this to the views, from now on."""
    for view, more in (
        (views.Pool, PoolInside),
        (views.Manager, ManagerInside),
        (views.Coordinator, CoordinatorInside),
    ):
        for name, member in vars(more).items():
            if not name.startswith("__"):
                setattr(view, name, member)
    for name in ("block_hash", "block_hash_num_tokens"):
        setattr(Block, f"_{name}", vars(Block)[name])
    pool_init, manager_init = views.Pool.__init__, views.Manager.__init__

    @wraps(pool_init)
    def of_pool(self: Any, manager: InProcessManager) -> None:
        pool_init(self, manager)
        self.free_block_queue, self.cached_block_hash_to_block = FreeList(manager), Index(manager)

    @wraps(manager_init)
    def of_manager(self: Any, manager: InProcessManager, group: int, real: Any) -> None:
        manager_init(self, manager, group, real)
        self.req_to_blocks, self.num_cached_block = Tables(manager, group), NumCached(manager, group)
        self._null_block = manager.blocks[0]

    views.Pool.__init__, views.Manager.__init__ = of_pool, of_manager  # type: ignore[method-assign]
