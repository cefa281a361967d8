"""Chunked local attention: a token attends to its own chunk, so earlier chunks need no blocks."""

from __future__ import annotations

import pytest

from kvplane.base.step import RowFlag
from tests.core.builders import GRANTED, Engine, chunked, find_in, full


def held(engine, slot, group=0):
    return "".join("." if block == 0 else "x" for block in engine.table(slot, group))


@pytest.mark.parametrize(
    ("computed", "table"),
    [(7, "xx"), (8, "..x"), (12, "..xx"), (15, "..xx"), (16, "....x")],
)
def test_chunked_attention_frees_a_chunk_when_the_next_token_starts_another(computed, table):
    """Chunks of 8: with 8 computed tokens the next one is token 8, which sees nothing before it."""
    engine = Engine(chunked(8))
    engine.admit(0, "a" * computed)
    engine.run(0, text="b")
    assert held(engine, 0) == table


def test_a_chunk_that_ends_inside_a_block_keeps_that_block():
    engine = Engine(chunked(6), enable_caching=False)
    engine.admit(0, "a" * 6)
    engine.run(0, text="b")
    assert held(engine, 0) == ".x", "tokens 6 and 7 of block 1 belong to the second chunk"


def test_chunked_attention_keeps_blocks_of_tokens_in_flight():
    engine = Engine(chunked(8))
    engine.admit(0, "a" * 8)
    engine.run(0, text="b", in_flight=8)
    assert held(engine, 0) == "xxx"


@pytest.mark.parametrize(
    ("cached", "max_tokens", "found"),
    [
        ("xxxx", 16, "0000"),  # position 16 opens a chunk: nothing before it is needed
        ("....", 16, "0000"),
        ("....", 15, "00"),  # block 2 would be in the chunk of position 15
        ("..x.", 15, "00x"),
        ("xx..", 15, "00"),
        ("xx.x", 15, "00"),  # left to right until a miss
        ("x...", 7, "x"),
        (".x..", 7, ""),
    ],
)
def test_chunked_lookup_skips_blocks_of_earlier_chunks(cached, max_tokens, found):
    assert find_in(chunked(8), cached, max_tokens) == found


def test_chunks_with_full_attention_shorten_the_hit_only_within_the_last_chunk():
    engine = Engine(chunked(8), full())
    tables = engine.serve(0, "a" * 17).table
    engine.cache(evicted=[block for block in tables[0] if block])
    assert engine.would_hit("a" * 17).num_tokens == 16
    assert engine.would_hit("a" * 16).num_tokens == 8
    hit = engine.admit(1, "a" * 17)
    assert hit.table[0][:4] == [0, 0, 0, 0]
    assert hit.table[1][:4] == tables[1][:4]


def test_a_long_prompt_is_admitted_when_a_chunk_fits():
    engine = Engine(chunked(8, admission_cap_blocks=4), num_blocks=6)
    assert engine.admit(0, "a" * 100, cap=8, flags=RowFlag.FULL_FIT).status is GRANTED
    while engine.computed(0) < 100:
        assert engine.run(0, cap=8).granted[0] > 0
    assert engine.num_free >= 2
