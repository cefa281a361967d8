"""What an engine in this process reads of the compiled core: the attributes of `Coordinator`, its managers, `BlockPool`
and `InFlightTracker` that an engine uses. Each read is one call of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from kvplane.base.step import UNLIMITED
from kvplane_core.cpp import _native
from kvplane_core.face.interface import INSIDE, Hit, Need, ReplicaCore
from kvplane_core.face.keys import Key
from kvplane_core.face.native.tiers import unpacker
from kvplane_core.face.setup import hits_end_in_prompt

_of_need = attrgetter(
    "slot", "num_slots", "num_main", "total_computed", "local_computed", "num_encoder"
)  # fmt: skip


class _Entries:
    """A column whose entries are read one by one; None stands for an entry that is not there."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read

    def __getitem__(self, at: int) -> Any:  # noqa: ANN401
        return self._read(at)

    def __contains__(self, at: int) -> bool:
        return self._read(at) is not None

    def get(self, at: int, default: object = None) -> Any:  # noqa: ANN401
        """Return the entry, or `default` if it is not there."""
        found = self._read(at)
        return default if found is None else found


class NativeCoordinator:
    """The attributes of a `Coordinator`."""

    def __init__(self, core: object, replica: ReplicaCore) -> None:
        self._core, self._replica = core, replica
        self.pool = NativePool(core, replica)
        self.lookup = NativeLookup(core)
        self.managers = [NativeManager(core, replica, group) for group in range(len(replica.spec.groups))]
        self.hits_end_in_prompt = hits_end_in_prompt(replica.spec)

    def tables(self, slot: int) -> list[list[int]]:
        """Return copies of the request's block tables, one per group."""
        return _native.read(self._core, "tables", slot)


class NativeManager:
    """The attributes of a group's manager, by slot.

    Attributes:
        table, num_cached, partial_hit: see `GroupManager`.
        has_allocated, last_checkpoints: see `AlignedStateManager`.
    """

    def __init__(self, core: object, replica: ReplicaCore, group: int) -> None:
        self.group, self.spec = group, replica.spec.groups[group]
        self.block_size, self._core = self.spec.block_size, core
        self.table = _Entries(lambda slot: _native.read(core, "tables", slot)[group])
        self.num_cached, self.partial_hit, self.has_allocated, self.last_checkpoints = map(self._column, range(4))

    def _column(self, number: int) -> _Entries:
        return _Entries(lambda slot: _native.read(self._core, "in_group", self.group, slot)[number])

    def skipped_tokens(self, num_computed: int) -> int:
        """Return the number of leading tokens that the token after `num_computed` tokens does not attend to."""
        return _native.read(self._core, "skipped", self.group, num_computed)

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Return by how many blocks the allocation lowers the number of free blocks."""
        return _native.read(self._core, "needed", self.group, _of_need(need), need.capped, hit)


class NativePool:
    """The attributes of a `BlockPool`."""

    def __init__(self, core: object, replica: ReplicaCore) -> None:
        self._core, self._replica = core, replica
        self.num_blocks = replica.spec.num_blocks
        self.stamp, self.key_step, _, self.references = map(self._column, range(4))
        self.key_tokens = _Entries(lambda block: sum(tokens for _, tokens in self._keys(block)[2][:1]))

    def _column(self, number: int) -> _Entries:
        return _Entries(lambda block: self._keys(block)[number])

    def _keys(self, block: int) -> tuple[int, int, list[tuple[tuple[int, bytes], int]], int]:
        return _native.read(self._core, "keys", [block])[0]

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now."""
        return self._replica.free_blocks

    @property
    def free(self) -> list[int]:
        """The free blocks, in the order in which they will be allocated."""
        return _native.read(self._core, "free_order")

    @property
    def epoch(self) -> int:
        """The number of the engine life."""
        return self._replica.epoch

    def key_of(self, block: int) -> Key | None:
        """Return the primary key of a block: domain, group and digest; None if it has none."""
        keys = self._keys(block)[2]
        return unpacker(_native.read(self._core, "domains"), self._replica.spec)(keys[0][0]) if keys else None

    def blocks_of(self, key: Key) -> list[int]:
        """Return all blocks that have this key."""
        return list(self._replica.blocks_of(*key))

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None:
        """Return the first block of each group with this digest, see `BlockPool.find`."""
        return _native.read(self._core, "first_blocks", domain, groups, digest, horizon)

    def count_keys(self) -> int:
        """Count the distinct keys."""
        return self._replica.count_keys()

    def take(self, count: int) -> list[int]:
        """Take free blocks, see `BlockPool.take`."""
        return _native.change(self._core, "take_blocks", count)

    def touch(self, blocks: list[int]) -> None:
        """Add a reference to each block, see `BlockPool.touch`."""
        _native.change(self._core, "touch_blocks", blocks)


class NativeTracker:
    """The attributes of an `InFlightTracker`."""

    def __init__(self, core: object) -> None:
        self.held = _Entries(lambda slot: _native.read(core, "held", slot) or None)


class NativeLookup:
    """The attributes of a `PrefixLookup`."""

    def __init__(self, core: object) -> None:
        self._core = core

    def find(
        self, digests: Sequence[bytes], domain: str, max_tokens: int, horizon: int, longest: int = UNLIMITED
    ) -> Hit:
        """Find the longest cached prefix of at most `longest` tokens, see `PrefixLookup.find`."""
        assert domain == "" and horizon == INSIDE, "an engine reads its own keys"
        tokens, single, blocks = _native.read(self._core, "find_inside", digests, max_tokens, longest)
        return Hit(tokens, single, tuple(blocks))

    def find_each(
        self, digests: Sequence[bytes], domain: str, max_tokens: int, horizon: int
    ) -> tuple[list[list[int]], list[int]]:
        """Find the longest cached prefix of each group by itself, see `PrefixLookup.find_each`."""
        assert domain == "" and horizon == INSIDE, "an engine reads its own keys"
        return _native.read(self._core, "find_each", digests, max_tokens)
