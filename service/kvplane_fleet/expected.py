"""What a place will have cached once it has computed the prompts that were sent to it, in cells of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex

MAX_KEYS = 1 << 20  # of a place; a prompt beyond it is not expected


class Expected:
    """The expected entries of one place."""

    def __init__(self, index: Index | NativeIndex) -> None:
        self._index = index
        self._cells: dict[int, int] = {}
        self._prompts: dict[str, Mapping[int, Sequence[int]]] = {}
        self._num_keys = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def cells(self, groups: Sequence[int]) -> list[int]:
        """Return the cells of groups."""
        return [self._cell(group) for group in groups]

    def add(self, name: str, keys: Mapping[int, Sequence[int]]) -> None:
        """Expect the keys of a prompt, by group, unless they are too many or its name is known."""
        number = sum(map(len, keys.values()))
        if name in self._prompts or self._num_keys + number > MAX_KEYS:
            return
        self._prompts[name] = keys
        self._num_keys += number
        for group, each in keys.items():
            self._index.add(self._cell(group), each)

    def forget(self, name: str) -> None:
        """Expect a prompt no longer."""
        for group, each in self._prompts.pop(name, {}).items():
            self._num_keys -= len(each)
            self._index.remove(self._cells[group], each)

    def release(self) -> None:
        """Forget all prompts, and give the cells back to the index."""
        for cell in self._cells.values():
            self._index.release(cell)
        self._cells, self._prompts, self._num_keys = {}, {}, 0

    def _cell(self, group: int) -> int:
        if group not in self._cells:
            self._cells[group] = self._index.new_cell()
        return self._cells[group]
