"""The block tables of an engine's requests, updated with each result."""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from functools import cache
from itertools import chain, islice

from kvplane.base.hashing.native import append_blocks
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import Blocks, End, Part, PartResult
from kvplane.base.when_read import PACKED, given_fields

_NONE: Set[int] = frozenset()
_compiled = cache(append_blocks)


class BlockTables:
    """Block ids by slot and group, in token order, as paged attention kernels read them.

        tables[slot][group]                 # an array of u32, which reads like a list
        numpy.asarray(tables[slot][group])  # the same memory, from which a GPU runner copies

    A table only grows while its request runs. If such a view of its memory still exists when it grows, it moves to new
    memory, and the view keeps the earlier entries. An entry whose block the service released (the block left a window,
    or has an older state) keeps its block id. This is safe because no kernel for that kind of layer reads such entries.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._tables: dict[int, list[PackedInts]] = {}
        self._held: set[int] = set()  # slots that ended as held

    def __getitem__(self, slot: int) -> list[PackedInts]:
        """Return the block tables of the request in this slot, one per group. Raises KeyError if the request holds no
        blocks.
        """
        return self._tables[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def update(self, part: Part, result: PartResult) -> None:
        """Apply the result of a part. Call this once for each part, in the order in which the parts were sent."""
        given, done = vars(part), vars(result)  # what is missing is empty
        if "facts" in given and part.facts.end:
            self._end(part.facts.slot, part.facts.end)
        if "cache" in given:
            self._release(part.cache.released)
        for slot in done.get("preempted", ()):
            self._tables.pop(slot, None)
        whole = self._take_whole(part, result.tables) if "tables" in done else _NONE
        if "new_blocks" in done:
            slots = given[PACKED].slots if PACKED in given else part.run.slot
            self._append(slots, result.new_blocks, whole)

    def _end(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        for slot, end in zip(slots, ends, strict=False):
            if end in (End.FREE, End.PREEMPTED):
                self._tables.pop(slot, None)
            elif end == End.HELD:
                self._held.add(slot)

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._held:  # otherwise a load into it ended, and the request may still run
                self._held.remove(slot)
                self._tables.pop(slot, None)

    def _take_whole(self, part: Part, tables: Blocks) -> Set[int]:
        """Replace the tables that the result contains in full, and return the numbers of the result's rows that they
        belong to.
        """
        if not tables.row:
            return _NONE
        given, rows, at = given_fields(part), set(tables.row), 0
        slots = [slot for name in ("run", "admit") if name in given for slot in given[name].slot]
        for row in rows:
            self._tables[slots[row]] = [PackedInts("I") for _ in range(self._num_groups)]
        for row, group, count in zip(tables.row, tables.group, tables.count, strict=True):
            ids = tables.ids[at : at + count]
            self._tables[slots[row]][group] = ids if type(ids) is PackedInts else PackedInts("I", ids)
            at += count
        return rows

    def _append(self, slots: Sequence[int], new: Blocks, whole: Set[int]) -> None:
        append = _compiled()
        columns = (new.row, new.group, new.count, new.ids)
        if (
            append is not None
            and not whole
            and type(slots) is array
            and all(type(one) is PackedInts for one in columns)
        ):
            append(self._tables, slots, *columns)
        else:
            self._append_each(slots, new, whole)

    def _append_each(self, slots: Sequence[int], new: Blocks, whole: Set[int]) -> None:
        tables, ids = self._tables, iter(new.ids)
        for row, group, count in zip(new.row, new.group, new.count, strict=True):
            block = next(ids) if count == 1 else None  # as most entries are
            more = () if count == 1 else list(islice(ids, count))
            if row in whole:
                continue
            groups = tables[slots[row]]
            try:
                if block is not None:
                    groups[group].append(block)
                else:
                    groups[group].extend(more)
            except BufferError:  # a view of the memory exists
                groups[group] = PackedInts("I", chain(groups[group], more if block is None else [block]))
