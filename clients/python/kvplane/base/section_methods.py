"""Methods of the generated types of `kvplane.base.sections`."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence


class RowsMethods:
    """Methods of columns that are filled row by row."""

    __slots__: tuple[str, ...] = ()

    def add(self, *values: int) -> None:
        """Append a row: its entries, in the order of the columns."""
        for name, value in zip(self.__slots__, values, strict=False):
            getattr(self, name).append(int(value))


class BlocksMethods:
    """Methods of `Blocks`: entry k has `count[k]` ids of group `group[k]` of row `row[k]`."""

    __slots__ = ()
    row: MutableSequence[int]
    group: MutableSequence[int]
    count: MutableSequence[int]
    ids: MutableSequence[int]

    def add(self, row: int, group: int, ids: Sequence[int]) -> None:
        """Append an entry: block ids of one group of one row."""
        self.row.append(row)
        self.group.append(group)
        self.count.append(len(ids))
        self.ids.extend(ids)

    def by_row(self) -> dict[int, dict[int, list[int]]]:
        """Return the block ids as {row: {group: ids}}. The result is a copy."""
        out: dict[int, dict[int, list[int]]] = {}
        start = 0
        for row, group, count in zip(self.row, self.group, self.count, strict=True):
            out.setdefault(row, {})[group] = list(self.ids[start : start + count])
            start += count
        return out


class RetainMethods:
    """Methods of `Retain`."""

    __slots__ = ()
    now_ns: MutableSequence[int]

    @property
    def time_ns(self) -> int:
        """The time of the part."""
        return self.now_ns[0] if self.now_ns else 0
