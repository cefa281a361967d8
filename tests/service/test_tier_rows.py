"""Which rows a hit on a tier loads, in bytes, for models of the catalogue: only what each kind of attention reads."""

from __future__ import annotations

import pytest

from tests.service.tier_rows import rows_of_hit

MIB = 1 << 20
LENGTHS = (4096, 16384, 32768, 131072)
# MiB that every block of every group has, and that the hit loads, by length of the hit.
BYTES: dict[str, list[tuple[float, float]]] = {
    "gpt-oss-20b": [(192, 99), (768, 387), (1536, 771), (6144, 3075)],
    "gpt-oss-120b": [(288, 148.5), (1152, 580.5), (2304, 1156.5), (9216, 4612.5)],
    "gemma-3-27b": [(1984, 736), (7936, 1696), (15872, 2976), (63488, 10656)],
    "llama-4-scout": [(768, 768), (3072, 768), (6144, 1536), (24576, 6144)],
    "qwen3-next-80b": [(357, 127.5), (1530, 420.75), (3060, 803.25), (12240, 3098.25)],
    "jamba-v0.1": [(510, 72.5), (2040, 263.75), (4090, 520), (16380, 2056.25)],
}


def loaded(model, length, on_device=()):
    """MiB of all blocks, and of the rows that an admission loads."""
    rows = rows_of_hit(model, length, on_device)
    return rows.num_bytes(rows.everything) / MIB, rows.num_bytes(rows.needed) / MIB


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("model", BYTES)
def test_a_hit_loads_the_rows_that_it_needs(model, length):
    assert loaded(model, length) == BYTES[model][LENGTHS.index(length)]


def test_a_chunk_that_is_not_full_is_loaded():
    everything, some = loaded("llama-4-scout", 24_560)
    assert everything / some == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("model", "mib"), [("gpt-oss-20b", 3), ("gpt-oss-120b", 4.5), ("gemma-3-27b", 416)])
def test_where_only_windows_left_the_device_only_windows_are_loaded(model, mib):
    assert loaded(model, 131_072, on_device=("full_attention",))[1] == mib


def test_where_only_states_left_the_device_only_one_per_group_is_loaded():
    assert loaded("qwen3-next-80b", 131_072, on_device=("full_attention",))[1] == 38.25
