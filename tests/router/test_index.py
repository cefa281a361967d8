"""The index equals a multiset of (cell, key), through additions, removals, clears and cells that are used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

import native_build
from kvplane_fleet import index as index_module
from kvplane_fleet import native
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex

INDEXES: dict[str, Callable[[], Index | NativeIndex]] = {"python": Index, "compiled": partial(NativeIndex, sweep_at=8)}


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize("seed", range(60))
def test_the_index_equals_a_multiset(seed, kind, monkeypatch):
    monkeypatch.setattr(index_module, "SWEEP_AT", 8)
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
        assert index.keys_of(cell) == counts
        for size in (8, 16):
            packed, ends = index.packed_keys(cell, size), Counter(key % (1 << 8 * size) for key in counts.elements())
            ends_found = Counter(packed[at : at + size] for at in range(0, len(packed), size))
            assert ends_found == {end.to_bytes(size, "big"): count for end, count in ends.items()}
        assert index.digest(cell) == (counts.total(), sum(counts.elements()) % (1 << 128))
    for run in runs:
        found = index.find(run)
        for cells in ([cell] for cell in model):
            assert found.has(cells).tolist() == [all(key in model[cell] for cell in cells) for key in run]
        pair = rng.sample(list(model), min(2, len(model)))
        assert found.has(pair).tolist() == [all(key in model[cell] for cell in pair) for key in run]
    assert index.num_keys <= len({key for counts in model.values() for key in counts}) * 2 + 8


@pytest.mark.parametrize("kind", INDEXES)
def test_sets_are_few_and_do_not_pile_up(kind):
    index, rng = INDEXES[kind](), Random(1)
    cells = [index.new_cell() for _ in range(16)]
    prompts = [[rng.getrandbits(64) for _ in range(100)] for _ in range(30)]
    for round_number in range(20):
        for prompt in prompts:
            index.add(cells[round_number % 16], prompt)
        for prompt in prompts:
            index.remove(cells[round_number % 16], prompt)
    assert index.num_keys == 0
    assert index.num_sets <= 3


def test_the_compiled_index_is_that_of_the_sources():
    assert native_build.digest_of_sources(native_build.INDEX) == native.sources(), "run `make`: the library is stale"
