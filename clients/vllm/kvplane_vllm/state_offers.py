"""The recurrent states that steps leave in cached blocks, as vLLM offers them to a connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplane.base.groups import GroupKind
from kvplane_vllm.known import Known


class StateOffers:
    """Finds the states of one replica."""

    def __init__(self, replica: Any) -> None:
        coordinator = replica.coordinator
        self._unit = replica.spec.scheduler_block_size
        self._pool, self._computed = coordinator.pool, replica.requests.computed
        self._managers = [one for one in coordinator.managers if one.spec.kind is GroupKind.MAMBA]

    def take(self, known: Mapping[str, Known]) -> dict[str, list[tuple[int, int, int]]]:
        """Return group, block and end in tokens of the states that requests end with now, by request."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for name, one in known.items() if self._managers else ():
            end = self._computed[one.slot]
            if end % self._unit:
                continue
            for manager in self._managers:
                at, table = end // manager.block_size, manager.table[one.slot]
                if 0 < at <= len(table) and self._pool.key_of(table[at - 1]) is not None:
                    found.setdefault(name, []).append((manager.group, table[at - 1], end))
        return found
