"""The memory layout of one rank: one allocation, and the position of each layer's pages in it.

The service's planner computes it, a worker allocates it, an engine creates its views from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MAX_BLOCKS, MAX_GROUPS
from kvplane.base.layer_json import spec_to_dict
from kvplane.base.layer_spec import LayerSpec
from kvplane.base.layers import KVSharingLayer

MAX_SIZE_BYTES = 1 << 48


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Layers of one format within a rank's one allocation.

    The page of block b in the l-th layer begins at offset + l * layer_stride + b * block_stride. Groups overlap, each
    from byte 0: this is safe because a block belongs to one group at a time.
    """

    group: int
    layer_names: tuple[str, ...]
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayers:
    """The layers of one KV cache group that a rank holds, in their order in memory; may be none.

    Attributes:
        layer_names: unique within the model.
        specs: the format of each layer, as it is allocated.
    """

    layer_names: tuple[str, ...]
    specs: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Pages of one layer: block b begins at offset_bytes + b * block_stride_bytes and has spec.page_bytes."""

    group: int
    name: str
    spec: LayerSpec
    offset_bytes: int
    block_stride_bytes: int

    def end_bytes(self, num_blocks: int) -> int:
        """The byte after the last page."""
        return self.offset_bytes + (num_blocks - 1) * self.block_stride_bytes + self.spec.page_bytes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share of a cache plan.

    Attributes:
        num_blocks: number of blocks, including the null block; equal on all ranks.
        size_bytes: size of the allocation.
        bytes_per_block: bytes of the allocation per block, over all layers of the widest group.
        groups: one per KV cache group of the model; the index is the group id.
        tensors: positions of the layers of `groups`.
        shared_layers: layers without a cache of their own.
    """

    num_blocks: int
    size_bytes: int
    bytes_per_block: int
    groups: tuple[GroupLayers, ...]
    tensors: tuple[TensorPlacement, ...]
    shared_layers: tuple[KVSharingLayer, ...] = ()

    def places(self) -> tuple[LayerPlace, ...]:
        """The position of each layer that owns a cache, group by group. Raises KeyError for a layer without format."""
        specs = {name: spec for group in self.groups for name, spec in zip(group.layer_names, group.specs, strict=True)}
        return tuple(
            LayerPlace(
                tensor.group,
                name,
                specs[name],
                tensor.offset_bytes + index * tensor.layer_stride_bytes,
                tensor.block_stride_bytes,
            )
            for tensor in self.tensors
            for index, name in enumerate(tensor.layer_names)
        )

    def digest(self) -> str:
        """A digest of the plan: equal digests mean equal plans."""
        groups = [[group.layer_names, [spec_to_dict(spec) for spec in group.specs]] for group in self.groups]
        tensors = [
            [t.group, t.layer_names, t.offset_bytes, t.layer_stride_bytes, t.block_stride_bytes] for t in self.tensors
        ]
        shared = [[layer.name, layer.shares_with] for layer in self.shared_layers]
        sizes = [self.num_blocks, self.size_bytes, self.bytes_per_block]
        text = json.dumps([sizes, groups, tensors, shared], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def validate(self) -> None:
        """Raise InvalidArgument, naming the field, for an impossible plan.

        Every layer is placed once, within the allocation. Pages overlap only where they are one block's, in different
        groups.
        """
        _require(1 <= self.num_blocks <= MAX_BLOCKS, "num_blocks", f"give 1 to {MAX_BLOCKS}")
        _require(1 <= self.size_bytes <= MAX_SIZE_BYTES, "size_bytes", f"give 1 to {MAX_SIZE_BYTES}")
        _require(1 <= len(self.groups) <= MAX_GROUPS, "groups", f"give 1 to {MAX_GROUPS}")
        for index, group in enumerate(self.groups):
            paired = len(group.layer_names) == len(group.specs)
            _require(paired, f"groups[{index}].specs", "give one format per layer")
        placed = sorted((t.group, name) for t in self.tensors for name in t.layer_names)
        owned = sorted((index, name) for index, group in enumerate(self.groups) for name in group.layer_names)
        _require(placed == owned, "tensors", "place every layer of every group once")
        names = {name for _, name in owned}
        _require(len(names) == len(owned), "groups", "name every layer once")
        for shared in self.shared_layers:
            known = shared.shares_with in names and shared.name not in names
            _require(known, "shared_layers", f"{shared.name} must share with a layer that has a cache")
        for problem in self._misplaced():
            raise InvalidArgument(problem, field="tensors", remedy="take the plan from the service's planner")

    def _misplaced(self) -> Iterator[str]:
        """Pages outside the allocation, and pages of one group that overlap."""
        places = self.places()
        for place in places:
            if place.offset_bytes < 0 or place.end_bytes(self.num_blocks) > self.size_bytes:
                yield f"{place.name} ends at byte {place.end_bytes(self.num_blocks)} of {self.size_bytes}"
            if place.block_stride_bytes < place.spec.page_bytes:
                yield f"pages of {place.name} overlap"
        yield from _collisions(places, self.num_blocks)


def _collisions(places: Sequence[LayerPlace], num_blocks: int) -> Iterator[str]:
    """Pages of different blocks, or of one group, that share a byte.

    With one stride, a page is within one unit of that length, at an offset called its *residue*. Layers whose residues
    overlap must begin in the same unit, or at least num_blocks units apart:

        layer outermost | A0 | A1 | A2 | B0 | B1 | B2 |        block outermost | A0 B0 | A1 B1 | A2 B2 |
    """
    strides = {place.block_stride_bytes for place in places}
    if len(strides) > 1:
        for before, after in pairwise(sorted(places, key=lambda place: place.offset_bytes)):
            if before.end_bytes(num_blocks) > after.offset_bytes:
                yield f"pages of {before.name} and {after.name} overlap with different strides"
        return
    stride = max(strides, default=1)
    overlapping: list[LayerPlace] = []
    end = 0
    for place in sorted(places, key=lambda place: place.offset_bytes % stride):
        residue = place.offset_bytes % stride
        if residue + place.spec.page_bytes > stride:
            yield f"pages of {place.name} cross a block boundary"
        if residue >= end:
            yield from _stacked(overlapping, num_blocks, stride)
            overlapping = []
        overlapping.append(place)
        end = max(end, residue + place.spec.page_bytes)
    yield from _stacked(overlapping, num_blocks, stride)


def _stacked(places: Sequence[LayerPlace], num_blocks: int, stride: int) -> Iterator[str]:
    """Overlapping pages among layers whose residues overlap."""
    ordered = sorted(places, key=lambda place: (place.offset_bytes // stride, place.group, place.offset_bytes))
    for before, after in pairwise(ordered):
        distance = after.offset_bytes // stride - before.offset_bytes // stride
        disjoint = before.offset_bytes + before.spec.page_bytes <= after.offset_bytes
        if 0 < distance < num_blocks or (not distance and before.group == after.group and not disjoint):
            yield f"pages of {before.name} and {after.name} overlap"


def _require(holds: bool, field_name: str, remedy: str) -> None:
    if not holds:
        raise InvalidArgument("the plan contradicts itself", field=field_name, remedy=remedy)
