"""A cache of values that are computed from a batch once and used by every layer of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from kvplane_kernels.interface import Batch

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Kept(Generic[Value]):
    """A cached value and its batch. The reference to the batch keeps Python from reusing the ids of the batch's
    tensors.
    """

    batch: Batch
    value: Value


class PerBatch(Generic[Value]):
    """A cache of the values of the most recently used batches.

    The key of a batch is its tensors with their version counters; writes that bypass PyTorch are not detected. Tensors
    created in inference mode have no version counter, so values of such batches are not cached.
    """

    def __init__(self, most: int) -> None:
        """Cache at most `most` values."""
        self._most = most
        self._kept: OrderedDict[Hashable, Kept[Value]] = OrderedDict()

    def of(self, batch: Batch, also: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value for a batch and a second key `also`. If the value is not cached, compute it with `make`."""
        tensors = [part for part in tensors_of(batch) if part is not None]
        if any(part.is_inference() for part in tensors):
            return make()
        key = (also, *map(version, tensors))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key].value
        while len(self._kept) >= self._most:
            self._kept.popitem(last=False)
        value = make()
        self._kept[key] = Kept(batch, value)
        return value


def tensors_of(batch: Batch) -> tuple[Tensor | None, ...]:
    """Return the tensors of a batch, on the device and on the host."""
    host = batch.host
    on_host = (host.block_table, host.seq_lens, host.query_start) if host else ()
    return (batch.block_table, batch.seq_lens, batch.query_start, batch.tree, *on_host)


def version(tensor: Tensor) -> tuple[int, int]:
    """Return the identity and the version counter of a tensor."""
    return id(tensor), tensor._version
