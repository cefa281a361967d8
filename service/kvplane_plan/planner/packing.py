"""Grouping for the block-outermost layout, where a block has the pages of layers with different page sizes.

Layers that always need blocks for the same tokens are put into one bucket. A bucket whose page sizes have equally many
layers is a repeating pattern (one layer of each size). Patterns are cut so that every group has about the same number
of repeats of its pattern:

    20 x (A + B + C) stays whole, so 43 x D is cut into 22 + 21

States, rings, and windows without a pattern are cut until none of their groups is wider than the other groups. Rules:
vLLM 0.33, vllm/v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.groups import GroupKind
from kvplane.base.layer_spec import ceil_div
from kvplane_plan.planner.formats import Formats, page_sizes, uniform_group
from kvplane_plan.planner.plan import CacheGroup, Layout

_STATES = {GroupKind.MAMBA, GroupKind.RING}
_WINDOWS = {GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA}


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers that always need blocks for the same tokens; their page sizes may differ."""

    formats: Formats

    @property
    def names_by_page(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name, spec in self.formats.items():
            names.setdefault(spec.page_bytes, []).append(name)
        return names

    @property
    def is_pattern(self) -> bool:
        """Whether every page size has equally many layers."""
        return len({len(names) for names in self.names_by_page.values()}) == 1

    @property
    def repeats(self) -> int:
        return max(len(names) for names in self.names_by_page.values())

    @property
    def kind(self) -> GroupKind:
        return next(iter(self.formats.values())).kind

    def widest_bytes(self, num_groups: int) -> int:
        """Return the bytes per block of the widest group, if the bucket is cut into `num_groups` groups."""
        return sum(ceil_div(len(names), num_groups) * page for page, names in self.names_by_page.items())

    def cut(self, num_groups: int) -> list[CacheGroup]:
        """Cut the bucket into groups: each group gets every num_groups-th repeat of the pattern.

        A bucket in which some page size has more layers than another is not a pattern, and stays whole.
        """
        num_groups = min(num_groups, self.repeats)
        if num_groups == 1 or not self.is_pattern:
            return [uniform_group(self.formats)]
        repeats = list(zip(*self.names_by_page.values(), strict=True))
        chosen = ([name for repeat in repeats[i::num_groups] for name in repeat] for i in range(num_groups))
        return [uniform_group({name: self.formats[name] for name in names}) for names in chosen]


def packed_groups(formats: Formats, layout: Layout) -> tuple[CacheGroup, ...]:
    """Return groups for pages of different sizes in the block-outermost layout; () in any other case."""
    if layout is not Layout.BLOCK_OUTERMOST or len(page_sizes(formats)) <= 1:
        return ()
    buckets = _buckets(formats)
    repeats_per_group = _repeats_per_group(buckets)
    cut_to_fit = _STATES if repeats_per_group else _STATES | _WINDOWS
    cuts = [_cuts_by_pattern(bucket, repeats_per_group) for bucket in buckets]
    # Bytes that a block needs even if states are cut as finely as possible; they are then cut to fit into it.
    needed_bytes = max(
        bucket.widest_bytes(len(bucket.formats) if bucket.kind in cut_to_fit else cut)
        for bucket, cut in zip(buckets, cuts, strict=True)
    )
    groups: list[CacheGroup] = []
    for bucket, cut in zip(buckets, cuts, strict=True):
        fitting = _cuts_to_fit(bucket, needed_bytes) if bucket.kind in cut_to_fit else 1
        groups += bucket.cut(max(cut, fitting))
    return tuple(groups)


def _buckets(formats: Formats) -> list[_Bucket]:
    by_type: dict[tuple[object, ...], Formats] = {}
    for name, spec in formats.items():
        by_type.setdefault(spec.uniform_key, {})[name] = spec
    return [_Bucket(members) for members in by_type.values()]


def _repeats_per_group(buckets: list[_Bucket]) -> int:
    """Return how many repeats of its pattern a group has; 0 if no pattern has layers of different page sizes."""
    patterns = [bucket for bucket in buckets if bucket.is_pattern]
    at_least = max((bucket.repeats for bucket in patterns if len(bucket.names_by_page) > 1), default=0)
    return _least_padding([bucket.repeats for bucket in patterns], at_least) if at_least else 0


def _least_padding(counts: list[int], at_least: int) -> int:
    """Return the number, at least `at_least`, to whose multiples the counts can be rounded up with the least padding.

    Of equally good numbers, the largest is returned.
    """
    candidates = range(at_least, max(counts) + 1)
    return min(candidates, key=lambda size: (sum(-count % size for count in counts), -size))


def _cuts_by_pattern(bucket: _Bucket, repeats_per_group: int) -> int:
    if repeats_per_group and bucket.is_pattern:
        return ceil_div(bucket.repeats, repeats_per_group)
    return 1


def _cuts_to_fit(bucket: _Bucket, needed_bytes: int) -> int:
    page_bytes = next(iter(bucket.formats.values())).page_bytes
    return ceil_div(len(bucket.formats), max(needed_bytes // page_bytes, 1))
