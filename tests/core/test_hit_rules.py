"""The rules over columns find the hits of the specification's look-up, whatever is cached."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import UNLIMITED
from kvplane_core.face.hit_rules import HitRules, blocks_kept, blocks_of_hit
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.requests import Requests
from tests.router.tables import drafting, draw_entries, draw_spec


class Cache:
    """Where the specification looks keys up: the columns."""

    def __init__(self, columns):
        self._columns = columns

    def find(self, domain, groups, digest, horizon):
        at = int.from_bytes(digest, "little")
        return [1 for _ in groups] if all(self._columns[group][at] for group in groups) else None


def accounts(seed):
    """What both say of one prompt."""
    rng = Random(seed)
    spec = drafting(rng, draw_spec(rng))
    num_tokens = rng.randrange(1, 120)
    units = num_tokens // spec.hash_block_size
    entries = [draw_entries(rng, units) for _ in spec.groups]
    columns = [bytes(unit + 1 in has for unit in range(units)) for has in entries]
    digests = [unit.to_bytes(8, "little") for unit in range(units)]
    lookup = Coordinator(spec, Requests()).lookup
    lookup.index = Cache(columns)
    hit = lookup.find(digests, "", num_tokens - 1, UNLIMITED)
    alone = lookup.find_each(digests, "", num_tokens - 1, UNLIMITED)[1]
    return hit.num_tokens, tuple(alone), HitRules(spec).explain(columns, num_tokens - 1), spec


@pytest.mark.parametrize("block", range(8))
def test_hits_over_columns_are_those_of_the_specification(block):
    hits = 0
    for seed in range(block * 250, block * 250 + 250):
        hit, alone, found, spec = accounts(seed)
        assert (found.hit, found.alone) == (hit, alone), f"seed {seed}: {spec}"
        assert found.missing is None or found.missing.end > hit or found.wanted > hit
        hits += hit > 0
    assert hits > 100


def kept_of_managers(spec: ReplicaSpec, num_tokens: int, chunk: int) -> list[int]:
    """What the managers of the specification keep of a prompt that is computed in chunks."""
    kept = []
    for manager in Coordinator(spec, Requests()).managers:
        count, size = 0, manager.block_size
        for start in range(0, num_tokens, chunk):
            first, last = start // size, min(start + chunk, num_tokens) // size
            mask = manager.reachable_blocks(first, last, [num_tokens])
            mask = [True] * (last - first) if mask is None else mask
            count += sum(mask[-1:] if manager.spec.kind is GroupKind.MAMBA else mask)
        kept.append(count)
    return kept


def test_what_is_kept_of_a_prompt_is_what_the_specification_keeps():
    sparse = 0
    for seed in range(1500):
        rng = Random(seed)
        spec = drafting(rng, draw_spec(rng))
        unit = spec.scheduler_block_size
        if any(one.kind is not GroupKind.FULL_ATTENTION for one in spec.groups):
            spec = replace(spec, retention_interval=rng.choice([-1, 0, unit, 2 * unit, 5 * unit]))
        num_tokens, chunk = rng.randrange(1, 12) * unit, rng.randrange(1, 5) * unit
        kept = blocks_kept(spec, num_tokens, chunk)
        assert kept == kept_of_managers(spec, num_tokens, chunk), f"seed {seed}: {num_tokens} by {chunk} of {spec}"
        needed = [
            num_tokens // one.block_size - max(one.skipped_tokens(num_tokens), 0) // one.block_size
            for one in Coordinator(spec, Requests()).managers
        ]
        assert blocks_of_hit(spec, num_tokens) == needed, f"seed {seed}"
        sparse += any(0 < count < num_tokens // one.block_size for count, one in zip(kept, spec.groups, strict=True))
    assert sparse > 100
