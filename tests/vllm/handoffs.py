"""The recurrent states that vLLM hands to KV connectors: which block has the state after how many tokens.

A connector cannot read these blocks from a block table: states before the last one leave the table, and the running
state is overwritten. So vLLM's scheduler asks after each step for the states that got a key in it. kvplane's manager
answers nothing, since connectors on models with states are refused; vLLM's own tests ask what it would answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import wraps
from typing import Any, cast

from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.spec.managers.mamba import AlignedStateManager
from kvplane_vllm import manager as managers
from kvplane_vllm.manager import InProcessManager

State = tuple[int, int, int]  # group, block, tokens


class Handoffs:
    """Collects the states of each request that got a key, until the scheduler takes them."""

    def __init__(self, replica: Any) -> None:
        """Read the states of this replica, whose spec must have events."""
        self.replica = replica
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
        pool, running = self.replica.coordinator.pool, self.replica.requests.running
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
        running = self.replica.requests.running
        return {slot: states for slot, states in taken.items() if running[slot]}

    def take_running(self, slot: int, num_computed: int) -> list[State]:
        """Return, once for each request, the running states that no launch overwrote: they have the key of its
        `num_computed` tokens.
        """
        pool, found = self.replica.coordinator.pool, []
        for group, manager in self._managers.items():
            _, block = manager.partial_hit.get(slot, (0, 0))
            if block and block not in self._final.get(slot, ()) and manager.has_allocated[slot]:
                self._final.setdefault(slot, set()).add(block)
                if pool.key_tokens[block] == num_computed:
                    found.append((group, block, num_computed))
        return found


def hand_off() -> None:
    """Let kvplane's manager answer with the states of its requests, from now on."""
    real_spec = vars(managers)["replica_spec"]
    real_take, real_end, real_open = InProcessManager._take, InProcessManager._end, InProcessManager._open

    @wraps(real_spec)
    def with_events(*args: Any, **options: Any) -> Any:
        spec = real_spec(*args, **options)
        return replace(spec, events=spec.events or any(one.kind is GroupKind.MAMBA for one in spec.groups))

    def open_step(self: Any) -> Any:
        if self._step is None and (not hasattr(self, "handoffs") or self.handoffs.replica is not self.replica):
            self.handoffs = Handoffs(self.replica)  # a test makes a manager again, with another interval
        return real_open(self)

    def take(self: Any, results: Any) -> None:
        results = list(results)
        real_take(self, results)
        for result in results if self.handoffs else ():
            self.handoffs.note(result.events)

    def end(self: Any, known: Any, how: Any) -> Any:
        found = real_end(self, known, how)
        if self.handoffs:
            self._flush()
            self.handoffs.forget(known.slot)
        return found

    def take_states(self: Any) -> dict[str, list[State]]:
        self._flush()
        return {self._by_slot[slot].request.request_id: states for slot, states in self.handoffs.take().items()}

    def finalize(self: Any, request: Any) -> list[State]:
        known = self.known.get(request.request_id)
        if known is None or request.num_in_flight_tokens:
            return []
        return cast(list[State], self.handoffs.take_running(known.slot, request.num_computed_tokens))

    changes = {"_open": open_step, "_take": take, "_end": end}
    changes |= {"take_boundary_state_offloads": take_states, "finalize_partial_tail_offloads": finalize}
    for name, method in changes.items():
        setattr(InProcessManager, name, method)
    vars(managers)["replica_spec"] = with_events
