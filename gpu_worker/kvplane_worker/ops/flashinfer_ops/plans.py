"""What is derived from a batch once and used by every layer of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from kvplane_worker.ops.interface import Batch

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Kept(Generic[Value]):
    """A value with the batch that it was derived from, which cannot be another one's while it is kept."""

    batch: Batch
    value: Value


class PerBatch(Generic[Value]):
    """The values of the batches used last.

    A batch is known by its tensors and how often torch has changed them; what was written to them past torch is not
    seen. Tensors made in inference mode do not count changes: nothing derived from them is kept.
    """

    def __init__(self, most: int, dropped: Callable[[], None] = lambda: None) -> None:
        """Keep at most so many; `dropped` is called before one is let go."""
        self._most = most
        self._dropped = dropped
        self._kept: OrderedDict[Hashable, Kept[Value]] = OrderedDict()

    def of(self, batch: Batch, also: Hashable, make: Callable[[], Value]) -> Value:
        """The value for a batch and whatever else it depends on, made where it is not kept."""
        tensors = [part for part in (batch.block_table, batch.seq_lens, batch.query_start) if part is not None]
        if any(part.is_inference() for part in tensors):
            return make()
        key = (also, batch.query_start is None, *map(version, tensors))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key].value
        while len(self._kept) >= self._most:
            self._dropped()
            self._kept.popitem(last=False)
        value = make()
        self._kept[key] = Kept(batch, value)
        return value


def version(tensor: Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was changed."""
    return id(tensor), tensor._version
