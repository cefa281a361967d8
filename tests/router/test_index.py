"""The index equals a multiset of (cell, key), through additions, removals, clears and cells that are used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from random import Random

import pytest

import native_build
from kvplane.base.groups import CommitRule, GroupKind, GroupSpec, ReplicaSpec
from kvplane_fleet import native
from kvplane_fleet.hits import Asked, HitRule, claims
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex
from tests.router.fleets import keys_in

INDEXES: dict[str, Callable[[], Index | NativeIndex]] = {"python": Index, "compiled": partial(NativeIndex, sweep_at=8)}


def rule(num_groups: int) -> HitRule:
    """Groups of full attention, with a token in each block, that are looked up apart."""
    groups = tuple(GroupSpec(GroupKind.FULL_ATTENTION, 1, lookup_class=number) for number in range(num_groups))
    return HitRule(ReplicaSpec(groups, 16, 1 << 20, 1, 1, 1, commit=CommitRule.REFERENCE))


RULES = {num_groups: rule(num_groups) for num_groups in (1, 2)}


def leading(held: Iterable[bool]) -> int:
    """How many of them are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, held))


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize("seed", range(60))
def test_the_index_equals_a_multiset(seed, kind):
    rng, index = Random(seed), INDEXES[kind]()
    model = {index.new_cell(): Counter[int]() for _ in range(rng.choice([1, 3, 70]))}
    runs = [[rng.getrandbits(width) for _ in range(rng.randrange(1, 12))] for width in (64, 128) for _ in range(10)]
    runs += [[key ^ 1 << 64 + at for at, key in enumerate(run)] for run in runs]  # the same last 64 bits
    runs.append([*runs[0], *runs[-1], 0, 1, (1 << 64) - 1, 1 << 64, (1 << 128) - 1])
    for _ in range(300):
        cell, run = rng.choice(list(model)), rng.choice(runs)
        keys = run[: rng.randrange(len(run) + 1)]
        action = rng.random()
        if action < 0.55:
            index.add(cell, keys)
            model[cell].update(keys)
        elif action < 0.95:
            unknown = index.remove(cell, keys)
            assert unknown == sum(not model[cell][key] for key in keys)
            model[cell] = +(model[cell] - Counter(keys))
        elif action < 0.98:
            index.clear(cell)
            model[cell].clear()
        else:
            index.release(cell)
            del model[cell]
            model[index.new_cell()] = Counter()
        assert all(index.size(one) == len(keys) for one, keys in model.items())
    for cell, counts in model.items():
        assert keys_in(index, cell) == counts
        for size in (8, 16):
            packed, ends = index.packed_keys(cell, size), Counter(key % (1 << 8 * size) for key in counts.elements())
            ends_found = Counter(packed[at : at + size] for at in range(0, len(packed), size))
            assert ends_found == {end.to_bytes(size, "big"): count for end, count in ends.items()}
        assert index.digest(cell) == (counts.total(), sum(counts.elements()) % (1 << 128))
    for run in runs:
        pair = rng.sample(list(model), min(2, len(model)))
        asked = [*([cell] for cell in model), pair]
        found = claims(index, run, len(run) + 1, [Asked(RULES[len(cells)], cells) for cells in asked])
        for cells, claim in zip(asked, found, strict=True):
            assert claim.tokens == leading(key in model[cell] for key in run for cell in cells) // len(cells)
            assert claim.alone == tuple(leading(key in model[cell] for key in run) for cell in cells)
    assert index.num_keys <= len({key for counts in model.values() for key in counts}) * 2 + 8


@pytest.mark.parametrize("kind", INDEXES)
def test_keys_without_cells_do_not_pile_up(kind):
    index, rng = INDEXES[kind](), Random(1)
    cells = [index.new_cell() for _ in range(16)]
    prompts = [[rng.getrandbits(64) for _ in range(100)] for _ in range(30)]
    for round_number in range(20):
        for prompt in prompts:
            index.add(cells[round_number % 16], prompt)
        for prompt in prompts:
            index.remove(cells[round_number % 16], prompt)
    assert index.num_keys == 0


def test_the_compiled_index_is_that_of_the_sources():
    assert native_build.digest_of_sources(native_build.INDEX) == native.sources(), "run `make`: the library is stale"
