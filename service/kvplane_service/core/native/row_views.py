"""What an engine in this process reads of the compiled core: the attributes of `Coordinator` and `BlockPool`.

What is read in each step, the core answers. All else is read from a `Replica` with the core's state, which is loaded
when it is first read after a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplane.base.step import UNLIMITED
from kvplane_service.core.lookup import Hit
from kvplane_service.core.native import _native
from kvplane_service.core.pool import INSIDE
from kvplane_service.core.refusals import Refusals

if TYPE_CHECKING:
    from kvplane_service.core.native import NativeReplica


class NativeCoordinator:
    """The attributes of a `Coordinator`."""

    def __init__(self, replica: NativeReplica) -> None:
        self._replica = replica
        reference = replica.reference().coordinator
        self.pool = NativePool(replica)
        self.lookup = NativeLookup(replica)
        self.managers = [NativeManager(replica, manager.group) for manager in reference.managers]
        self.hits_end_in_prompt = reference.hits_end_in_prompt

    def tables(self, slot: int) -> list[list[int]]:
        """Return copies of the request's block tables, one per group."""
        return _native.tables(self._replica.core, slot)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._replica.reference().coordinator, name)


class NativeManager:
    """The attributes of a group's manager."""

    def __init__(self, replica: NativeReplica, group: int) -> None:
        self._replica, self.group, self.spec = replica, group, replica.spec.groups[group]
        self.block_size = self.spec.block_size

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._replica.reference().coordinator.managers[self.group], name)


class NativePool:
    """The attributes of a `BlockPool`."""

    def __init__(self, replica: NativeReplica) -> None:
        self._replica = replica
        self.num_blocks = replica.spec.num_blocks
        self.refusals = Refusals()  # none is stored: the core looks up again in less time

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now."""
        return self._replica.free_blocks

    def take(self, count: int) -> list[int]:
        """Take free blocks, see `BlockPool.take`."""
        return _native.take_blocks(self._replica.changed(), count)

    def touch(self, blocks: list[int]) -> None:
        """Add a reference to each block, see `BlockPool.touch`."""
        _native.touch_blocks(self._replica.changed(), blocks)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._replica.reference().coordinator.pool, name)


class NativeLookup:
    """The attributes of a `PrefixLookup`."""

    def __init__(self, replica: NativeReplica) -> None:
        self._replica = replica

    def find(
        self, digests: Sequence[bytes], domain: str, max_tokens: int, horizon: int, longest: int = UNLIMITED
    ) -> Hit:
        """Find the longest cached prefix of at most `longest` tokens, see `PrefixLookup.find`."""
        assert domain == "" and horizon == INSIDE, "an engine reads its own keys"
        tokens, single, blocks = _native.find_inside(self._replica.core, digests, max_tokens, longest)
        return Hit(tokens, single, tuple(blocks))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._replica.reference().coordinator.lookup, name)
