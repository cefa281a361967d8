"""Claims equal the hits of vLLM 0.33.0 and of the core."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from kvplane_fleet.hits import HitRule
from kvplane_fleet.index import Index
from tests.router.brute import longest_hit
from tests.router.recorded import TRACES, look_ups
from tests.router.tables import draw_entries, draw_spec


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_claims_equal_the_recorded_hits(path):
    found = [(hit, claim.tokens, follower.unknown) for follower, hit, claim in look_ups(path)]
    assert [claim for _, claim, _ in found] == [hit for hit, _, _ in found]
    assert not any(unknown for _, _, unknown in found)


def columns(found, cells, groups):
    return found.has([cells[group] for group in groups])


def claims_of_table(seed):
    """Claims of three places for one prompt, through one index, and the hits by brute force."""
    rng = Random(seed)
    spec, index = draw_spec(rng), Index()
    num_tokens = rng.randrange(1, 120)
    units = num_tokens // spec.hash_block_size
    keys = [rng.getrandbits(64) for _ in range(units)]
    places = []
    for _ in range(3):
        entries = [draw_entries(rng, units) for _ in spec.groups]
        cells = [index.new_cell() for _ in spec.groups]
        for cell, has in zip(cells, entries, strict=True):
            index.add(cell, [keys[unit - 1] for unit in has])
        places.append((cells, entries))
    found, rule = index.find(keys), HitRule(spec)
    for cells, entries in places:
        claim = rule.claim(partial(columns, found, cells), units, num_tokens)
        yield claim, longest_hit(spec, [one.__contains__ for one in entries], num_tokens), spec


@pytest.mark.parametrize("block", range(10))
def test_claims_equal_brute_force(block):
    hits = 0
    for seed in range(block * 1000, block * 1000 + 1000):
        for claim, longest, spec in claims_of_table(seed):
            assert claim.tokens == longest, f"seed {seed}: {spec}"
            assert claim.tokens <= max(claim.alone)
            hits += longest > 0
    assert hits > 1000
