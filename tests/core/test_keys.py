"""Large pools keep their keys in a map of many dicts, which behaves as one dict."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvplane_core.spec import key_maps
from kvplane_core.spec.key_maps import WHOLE_MAP_BLOCKS, Entry, ShardedMap, new_map, parts_of, take_entries
from tests.core.test_page_contents import CACHED_MIXES, run

pytestmark = pytest.mark.specification  # its keys


def test_only_a_large_pool_has_a_sharded_map():
    assert type(new_map(WHOLE_MAP_BLOCKS)) is dict
    assert type(new_map(WHOLE_MAP_BLOCKS + 1)) is ShardedMap


@pytest.mark.parametrize("seed", range(3))
def test_a_sharded_map_behaves_as_a_dict(seed):
    rng, sharded = random.Random(seed), ShardedMap()
    model: dict[bytes, Entry] = {}
    digests = [rng.randbytes(16) for _ in range(600)]
    for number in range(4000):
        digest = rng.choice(digests)
        assert sharded.get(digest) == model.get(digest)
        assert sharded.get(digest, 7) == model.get(digest, 7)
        assert (digest in sharded) == (digest in model)
        if rng.random() < 0.5:
            sharded[digest] = model[digest] = number
        elif digest in model:
            assert sharded[digest] == model[digest]
            del sharded[digest], model[digest]
        else:
            with pytest.raises(KeyError):
                del sharded[digest]
        assert (len(sharded), bool(sharded)) == (len(model), bool(model))
    assert dict(sharded.items()) == model
    asked = rng.sample(digests, 400)
    assert take_entries(sharded, asked) == take_entries(model, asked)
    assert dict(sharded.items()) == model
    parts: list[Any] = parts_of(sharded)
    assert sum(map(len, parts)) == len(model)


@pytest.mark.parametrize("mix", CACHED_MIXES)
def test_pages_hold_what_their_keys_name_with_sharded_maps(monkeypatch, mix):
    monkeypatch.setattr(key_maps, "WHOLE_MAP_BLOCKS", 0)
    for seed in (1, 2):
        run(mix, seed)
