"""The rules over columns find the hits of the specification's look-up, whatever is cached."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.step import UNLIMITED
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.hit_rules import HitRules
from kvplane_service.core.requests import Requests
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
