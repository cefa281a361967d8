"""Block tables in the engine, kept up to date from the answers."""

from __future__ import annotations

from kvplane.base.step import Blocks, End, Part, PartResult


class BlockTables:
    """Block ids by slot and group, in token order: what paged kernels read.

    A table only grows while its request runs. Entries that the service released (they left a window, or hold an older
    state) keep their block id; this is safe because no kernel of that kind of layer reads them.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._tables: dict[int, list[list[int]]] = {}
        self._held: set[int] = set()  # slots that ended as held

    def __getitem__(self, slot: int) -> list[list[int]]:
        """The tables of a request by group; KeyError when it holds no blocks."""
        return self._tables[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def update(self, part: Part, result: PartResult) -> None:
        """Apply the result of a part. Both must belong together, and parts must come in the order they were sent."""
        facts = part.facts
        for slot, end in zip(facts.slot, facts.end, strict=False):
            if end in (End.FREE, End.PREEMPTED):
                self._tables.pop(slot, None)
            elif end == End.HELD:
                self._held.add(slot)
        for slot in part.cache.released:
            if slot in self._held:  # otherwise a load into it ended, and the request may still run
                self._held.remove(slot)
                self._tables.pop(slot, None)
        for slot in result.preempted:
            self._tables.pop(slot, None)
        admitted = self._take_whole(part, result.tables)
        self._append(part.run.slot, result.new_blocks, admitted)

    def _take_whole(self, part: Part, tables: Blocks) -> set[int]:
        """Replace the tables that the result states in full; returns their rows."""
        slots = [*part.run.slot, *part.admit.slot]
        by_row = tables.by_row()
        for row, groups in by_row.items():
            self._tables[slots[row]] = [groups.get(group, []) for group in range(self._num_groups)]
        return set(by_row)

    def _append(self, slots: list[int], new: Blocks, whole: set[int]) -> None:
        start = 0
        for row, group, count in zip(new.row, new.group, new.count, strict=True):
            if row not in whole:
                self._tables[slots[row]][group].extend(new.ids[start : start + count])
            start += count
