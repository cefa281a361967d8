"""Claims equal the hits of vLLM 0.33.0 and of the core."""

from __future__ import annotations

from random import Random

import pytest

from kvplane_fleet.hits import Asked, HitRule, claims
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex
from tests.router.brute import longest_hit
from tests.router.recorded import TRACES, look_ups
from tests.router.tables import drafting, draw_entries, draw_spec


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_claims_equal_the_recorded_hits(path):
    found = [(hit, claim.tokens, follower.unknown) for follower, hit, claim in look_ups(path)]
    assert [claim for _, claim, _ in found] == [hit for hit, _, _ in found]
    assert not any(unknown for _, _, unknown in found)


def new_cell(indexes):
    (cell,) = {index.new_cell() for index in indexes}
    return cell


def claims_of_table(seed, drafts=False):
    """Claims of three places for one prompt, through one index of either kind, and the hits by brute force. The places
    have part of what they have in other cells, and two of them share what is in several more. `drafts`: several classes
    drop a block.
    """
    rng = Random(seed)
    spec, indexes = draw_spec(rng), (Index(), NativeIndex())
    spec = drafting(rng, spec) if drafts else spec
    num_tokens = rng.randrange(1, 120)
    units = num_tokens // spec.hash_block_size
    keys = [rng.getrandbits(64) for _ in range(units)]
    rule, places = HitRule(spec), []
    lent = [draw_entries(rng, units) for _ in spec.groups] if seed % 2 else [set[int]() for _ in spec.groups]
    shared = [[new_cell(indexes) for _ in spec.groups] for _ in range(seed % 5)]
    for lender in shared:
        for has, cell in zip(lent, lender, strict=True):
            for unit in has:
                if lender is shared[unit % len(shared)]:
                    for index in indexes:
                        index.add(cell, [keys[unit - 1]])
    lenders = tuple(cell for lender in shared for cell in lender)
    for number in range(3):
        entries = [draw_entries(rng, units) for _ in spec.groups]
        cells, *others = ([new_cell(indexes) for _ in spec.groups] for _ in range(3))
        for has, *each in zip(entries, cells, *others, strict=True):
            for unit in has:
                for index in indexes:
                    index.add(each[unit % 7 % 3], [keys[unit - 1]])
        loans = lenders if number else ()
        found = [own | (of_others if loans else set()) for own, of_others in zip(entries, lent, strict=True)]
        places.append((Asked(rule, cells, [*others[0], *others[1]], loans), found))
    both = [claims(index, keys, num_tokens, [asked for asked, _ in places]) for index in indexes]
    assert both[0] == both[1], f"seed {seed}: {spec}"
    for (_, entries), claim in zip(places, both[1], strict=True):
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


def test_claims_of_drafters_are_equal_through_either_index():
    """`tests/core/test_hit_rules.py` compares them with the specification."""
    hits = sum(claim.tokens > 0 for seed in range(1000) for claim, _, _ in claims_of_table(seed, drafts=True))
    assert hits > 1000
