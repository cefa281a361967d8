"""The recurrent states that vLLM hands to KV connectors: which block has the state after how many tokens.

A connector cannot read these blocks from a block table: states before the last one leave the table, and the running
state is overwritten. So vLLM's scheduler asks after each step for the states that got a key in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvplane.base.groups import MambaMode
from kvplane.base.step import CacheEvent, EventKind
from kvplane_service.core.managers.mamba import AlignedStateManager
from kvplane_service.core.replica import Replica

State = tuple[int, int, int]  # group, block, tokens


class Handoffs:
    """Collects the states of each request that got a key, until the scheduler takes them."""

    def __init__(self, replica: Replica) -> None:
        """Read the states of this replica, whose spec must have events."""
        self._replica = replica
        managers = replica.coordinator.managers
        states = [one for one in managers if one.spec.mamba_mode is MambaMode.ALIGN]
        self._managers = {one.group: cast(AlignedStateManager, one) for one in states}
        self._pending: dict[int, list[State]] = {}  # by slot
        self._final: dict[int, set[int]] = {}  # by slot: blocks that `take_running` considered

    def __bool__(self) -> bool:
        """Whether a group has such states."""
        return bool(self._managers)

    def note(self, events: Iterable[CacheEvent]) -> None:
        """Record the states of the STORED events, before a later row of their requests is applied.

        A running state that ends inside a block is left out: the request overwrites it. Its copy, which gets the key
        before that, has an event of its own; `take_running` returns the state of a request that ends before.
        """
        pool, running = self._replica.coordinator.pool, self._replica.requests.running
        for event in events:
            manager = self._managers.get(event.group)
            if manager is None or event.kind is not EventKind.STORED or not running[event.slot]:
                continue
            _, overwritten = manager.partial_hit.get(event.slot, (0, 0))
            states = [
                (event.group, block, pool.key_tokens[block])
                for block in event.blocks
                if block not in (0, overwritten) and pool.key_of(block) is not None
            ]
            if states:
                self._pending.setdefault(event.slot, []).extend(states)

    def forget(self, slot: int) -> None:
        """Forget the states of a request whose blocks return to the pool."""
        self._pending.pop(slot, None)
        self._final.pop(slot, None)

    def take(self) -> dict[int, list[State]]:
        """Return the states by slot, and forget them. The states of requests that ended are left out: their blocks may
        belong to other requests.
        """
        taken, self._pending = self._pending, {}
        running = self._replica.requests.running
        return {slot: states for slot, states in taken.items() if running[slot]}

    def take_running(self, slot: int, num_computed: int) -> list[State]:
        """Return, once for each request, the running states that no launch overwrote: they have the key of its
        `num_computed` tokens.
        """
        pool, found = self._replica.coordinator.pool, []
        for group, manager in self._managers.items():
            _, block = manager.partial_hit.get(slot, (0, 0))
            if block and block not in self._final.get(slot, ()) and manager.has_allocated[slot]:
                self._final.setdefault(slot, set()).add(block)
                if pool.key_tokens[block] == num_computed:
                    found.append((group, block, num_computed))
        return found
