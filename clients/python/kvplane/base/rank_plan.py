"""The memory layout of one rank: the size of the rank's one allocation, and the offset of each layer's pages in the
allocation.

The service's planner computes the layout, a worker allocates the memory, and an engine creates its tensor views from
the layout. A layout is *opaque* if an engine computes it and only names it: then the worker knows no layer.
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
from kvplane.base.layer_spec import LayerSpec, ceil_div
from kvplane.base.layers import KVSharingLayer

MAX_SIZE_BYTES = 1 << 48
MAX_LAYOUT_CHARS = 64


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The position of some layers of one format in a rank's allocation.

    The page of block b in the l-th layer begins at offset + l * layer_stride + b * block_stride bytes. The memory of
    two groups overlaps: each group begins at byte 0. This is safe because a block belongs to one group at a time.
    The page of a state may have the bytes of several blocks: then only multiples of that number name a state.
    """

    group: int
    layer_names: tuple[str, ...]
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayers:
    """The layers of one KV cache group that a rank holds, in their order in memory. A rank may hold none.

    Attributes:
        layer_names: names of the layers, unique within the model.
        specs: the format of each layer, with the page size and block size of the allocation.
    """

    layer_names: tuple[str, ...]
    specs: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The position of one layer's pages: block b begins offset_bytes + b * block_stride_bytes after the start of the
    allocation, and has spec.page_bytes bytes.
    """

    group: int
    name: str
    spec: LayerSpec
    offset_bytes: int
    block_stride_bytes: int

    @property
    def blocks_per_page(self) -> int:
        """The number of consecutive blocks whose memory a page has; 1 unless it is the page of a state that takes
        several (`ReplicaSpec.blocks_per_state`).
        """
        return max(1, ceil_div(self.spec.page_bytes, max(1, self.block_stride_bytes)))

    def num_pages(self, num_blocks: int) -> int:
        """Return the number of blocks at which a page can begin."""
        return num_blocks - self.blocks_per_page + 1

    def end_bytes(self, num_blocks: int) -> int:
        """Return the offset of the first byte after the last page."""
        return self.offset_bytes + (self.num_pages(num_blocks) - 1) * self.block_stride_bytes + self.spec.page_bytes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory layout of one rank.

    Attributes:
        num_blocks: number of blocks, including the null block; equal on all ranks.
        size_bytes: size of the allocation in bytes.
        bytes_per_block: bytes of the allocation per block, over all layers of the group with the largest blocks.
        groups: the rank's layers of each KV cache group of the model; the index is the group id.
        tensors: positions of the layers of `groups`.
        shared_layers: layers that read the cache of another layer.
        opaque_layout: for an opaque layout, a digest of everything that gives the bytes their meaning; the plan then
            has no groups. "" = the layout is not opaque.
    """

    num_blocks: int
    size_bytes: int
    bytes_per_block: int
    groups: tuple[GroupLayers, ...]
    tensors: tuple[TensorPlacement, ...]
    shared_layers: tuple[KVSharingLayer, ...] = ()
    opaque_layout: str = ""

    @classmethod
    def opaque(cls, num_blocks: int, size_bytes: int, layout: str) -> RankPlan:
        """Return the opaque layout of `size_bytes` bytes with this digest. Raises InvalidArgument, see `validate`."""
        plan = cls(num_blocks, size_bytes, size_bytes // max(1, num_blocks), (), (), opaque_layout=layout)
        plan.validate()
        return plan

    def places(self) -> tuple[LayerPlace, ...]:
        """Return the position of each layer that has a cache, in order of groups. Raises KeyError for a layer without a
        format.
        """
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
        """Return a digest of the layout, 32 hexadecimal digits; equal digests mean equal layouts."""
        groups = [[group.layer_names, [spec_to_dict(spec) for spec in group.specs]] for group in self.groups]
        tensors = [
            [t.group, t.layer_names, t.offset_bytes, t.layer_stride_bytes, t.block_stride_bytes] for t in self.tensors
        ]
        shared = [[layer.name, layer.shares_with] for layer in self.shared_layers]
        sizes = [self.num_blocks, self.size_bytes, self.bytes_per_block]
        parts: list[object] = [sizes, groups, tensors, shared, *([self.opaque_layout] if self.opaque_layout else [])]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def validate(self) -> None:
        """Raise InvalidArgument if the layout is impossible; the error's field names the part that is wrong.

        Every layer must have exactly one position, within the allocation. Two pages may overlap only if they belong to
        the same block and to different groups.
        """
        blocks, size, groups = self.num_blocks, self.size_bytes, len(self.groups)
        _require(1 <= blocks <= MAX_BLOCKS, "num_blocks", f"{blocks} blocks", f"give 1 to {MAX_BLOCKS}")
        _require(1 <= size <= MAX_SIZE_BYTES, "size_bytes", f"{size} bytes", f"give 1 to {MAX_SIZE_BYTES}")
        if self.opaque_layout:
            layout, layers = self.opaque_layout, groups + len(self.tensors) + len(self.shared_layers)
            fits = len(layout) <= MAX_LAYOUT_CHARS
            _require(fits, "opaque_layout", f"{len(layout)} characters", f"give at most {MAX_LAYOUT_CHARS}")
            _require(not layers, "groups", f"an opaque layout with {layers} groups and layers", "give none")
            return
        _require(1 <= groups <= MAX_GROUPS, "groups", f"{groups} groups", f"give 1 to {MAX_GROUPS}")
        for index, group in enumerate(self.groups):
            layers, specs = len(group.layer_names), len(group.specs)
            _require(
                layers == specs,
                f"groups[{index}].specs",
                f"{specs} formats for {layers} layers",
                "give one format per layer",
            )
        placed = sorted((t.group, name) for t in self.tensors for name in t.layer_names)
        owned = sorted((index, name) for index, group in enumerate(self.groups) for name in group.layer_names)
        wrong = sorted({name for _, name in set(placed) ^ set(owned)}) or placed
        _require(placed == owned, "tensors", f"positions of {wrong}", "give every layer of every group one position")
        names = {name for _, name in owned}
        _require(len(names) == len(owned), "groups", f"{sorted(n for _, n in owned)}", "give every layer its own name")
        for shared in self.shared_layers:
            known = shared.shares_with in names and shared.name not in names
            _require(
                known,
                "shared_layers",
                f"{shared.name} shares the cache of {shared.shares_with}",
                "name a layer that has a cache of its own, and list no layer with a cache as shared",
            )
        for problem in self._misplaced():
            raise InvalidArgument(problem, field="tensors", remedy="take the plan from the service's planner")

    def _misplaced(self) -> Iterator[str]:
        """Yield a description of each page that is outside the allocation or overlaps another page of its group."""
        places = self.places()
        for place in places:
            if place.offset_bytes < 0 or place.end_bytes(self.num_blocks) > self.size_bytes:
                end = place.end_bytes(self.num_blocks)
                yield f"the pages of {place.name} are at bytes {place.offset_bytes}..{end} of {self.size_bytes}"
            if place.block_stride_bytes < place.spec.page_bytes and not self._holds_states(place):
                yield (
                    f"pages of {place.name} overlap: they have {place.spec.page_bytes} bytes and begin every "
                    f"{place.block_stride_bytes} bytes"
                )
        sizes = {place.blocks_per_page for place in places if place.spec.is_state}
        if len(sizes) > 1:
            yield f"states of different layers take {sorted(sizes)} blocks"
        yield from _collisions(places, self.num_blocks)

    def _holds_states(self, place: LayerPlace) -> bool:
        """Whether pages of several blocks each are pages of states that fill these blocks."""
        whole = place.spec.page_bytes == place.blocks_per_page * place.block_stride_bytes
        return place.spec.is_state and whole and self.num_blocks % place.blocks_per_page == 0


def _collisions(places: Sequence[LayerPlace], num_blocks: int) -> Iterator[str]:
    """Yield a description of each pair of pages that share a byte, unless they are pages of one block in different
    groups.

    If all layers have the same stride, the memory consists of units of that many bytes, and a page is within one unit,
    at a byte offset in the unit called its *residue*. Two layers whose ranges of bytes within a unit overlap must begin
    in the same unit, or at least num_blocks units apart:

        layer outermost | A0 | A1 | A2 | B0 | B1 | B2 |        block outermost | A0 B0 | A1 B1 | A2 B2 |

    A state of several blocks fills the units of these blocks, and the last state ends with the last unit. So it is
    enough to look at the unit in which it begins.
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
        page_bytes = min(place.spec.page_bytes, stride)
        if residue + page_bytes > stride:
            yield f"pages of {place.name} cross a block boundary"
        if residue >= end:
            yield from _stacked(overlapping, num_blocks, stride)
            overlapping = []
        overlapping.append(place)
        end = max(end, residue + page_bytes)
    yield from _stacked(overlapping, num_blocks, stride)


def _stacked(places: Sequence[LayerPlace], num_blocks: int, stride: int) -> Iterator[str]:
    """Yield a description of each pair of layers whose pages collide, among layers that overlap within a unit.

    A unit has `stride` bytes, and a page is within one unit (see `_collisions`). The byte ranges of these layers within
    a unit overlap. So two of these layers must begin in the same unit and belong to different groups, or begin at least
    num_blocks units apart.
    """
    ordered = sorted(places, key=lambda place: (place.offset_bytes // stride, place.group, place.offset_bytes))
    for before, after in pairwise(ordered):
        distance = after.offset_bytes // stride - before.offset_bytes // stride
        disjoint = before.offset_bytes + before.spec.page_bytes <= after.offset_bytes
        if 0 < distance < num_blocks or (not distance and before.group == after.group and not disjoint):
            yield f"pages of {before.name} and {after.name} overlap"


def _require(holds: bool, field_name: str, found: str, remedy: str) -> None:
    if not holds:
        raise InvalidArgument(f"the memory layout is impossible: {found}", field=field_name, remedy=remedy)
