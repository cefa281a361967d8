"""What a tier with the policy `reuse` may save, checked while random engines run: nothing that was used once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import ReplicaSpec, SavePolicy, TierSpec
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.face.setup import check_spec
from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import Load, Tiers


class SavedTooEarly(AssertionError):
    """A tier saves what its policy leaves out."""


def with_policies(tiers: Sequence[TierSpec], rng: Random) -> tuple[TierSpec, ...]:
    """Return the tiers with a policy each: half of them save behind, and few save only what is used twice."""
    policies = [*[SavePolicy.BEHIND] * 3, *[SavePolicy.THROUGH] * 2, SavePolicy.REUSE]
    return tuple(replace(tier, save=rng.choice(policies)) for tier in tiers)


def with_checkpoints(spec: ReplicaSpec, rng: Random) -> ReplicaSpec:
    """Return the spec, or one that keeps few windows and states, or checkpoints of a percentage, where it can."""
    percent = rng.choice([None, 0, 25, 60, 100])
    if percent is None:
        return spec
    first = replace(spec.tiers[0], checkpoint_percent=percent)
    changed = replace(spec, tiers=(first, *spec.tiers[1:]), retention_interval=0)
    try:
        check_spec(changed)
    except InvalidArgument:
        return spec
    return changed


def with_shares(tiers: Sequence[TierSpec], rng: Random) -> tuple[TierSpec, ...]:
    """Return the tiers with a share of each that an owner may retain: nothing, little, half, or all."""
    return tuple(replace(tier, retained_percent=rng.choice([0, 20, 50, 100])) for tier in tiers)


@contextmanager
def uses_noted() -> Iterator[None]:
    """Count the uses of every key, and check each save and move against them."""
    uses, loaded = Counter[Key](), set[Key]()
    counted, hit, read, begin = Tiers.note_computed, Tiers.note_hit, Tiers.note_loaded, Tiers.begin_write

    def note_computed(self: Tiers, registered: Sequence[tuple[int, Key]]) -> None:
        uses.update(key for _, key in registered)
        counted(self, registered)

    def note_hit(self: Tiers, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        keys = [self._pool.key_of(block) for block in blocks if block != NULL_BLOCK]
        uses.update(key for key in keys if key is not None)
        hit(self, blocks)

    def note_loaded(self: Tiers, load: Load) -> None:
        loaded.update(row.key for row in load.rows)
        read(self, load)

    def begin_write(self: Tiers, tier: Tier, key: Key) -> int | None:
        is_used = (key in loaded if tier.number else uses[key] > 1) or key in self._pool.retained.of_key
        is_used = is_used or (not tier.number and self.has(key))  # a prefetch copies it nearer
        if tier.wanted.policy is SavePolicy.REUSE and not is_used:
            raise SavedTooEarly(f"tier {tier.number} saves {key}, which was used once")
        return begin(self, tier, key)

    changed: dict[str, Callable[..., Any]] = {
        "note_computed": note_computed, "note_hit": note_hit, "note_loaded": note_loaded, "begin_write": begin_write,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, method in changed.items():
            patch.setattr(Tiers, name, method)
        yield
