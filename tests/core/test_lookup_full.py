"""The hit of a prompt with full attention: every block of the prefix must be cached."""

from __future__ import annotations

import pytest

from kvplane.base.step import UNLIMITED, ExtraKeys, Facts, Multimodal, News, Part, Peek
from tests.core.builders import GRANTED, REFERENCE, Engine, digests, full, run_rows, tokens

LONG = "aaaabbbbccccd"


def test_a_new_replica_has_no_hits():
    assert Engine(full()).would_hit(LONG).num_tokens == 0


def test_hits_contain_only_full_blocks():
    engine = Engine(full())
    engine.serve(0, "aaaabbbbcc")
    assert engine.would_hit("aaaabbbbccccd").num_tokens == 8


def test_a_repeated_prompt_recomputes_its_last_token_and_block():
    """Every token may be cached, but the last one is computed for its logits; a hit of 8 would leave none."""
    engine = Engine(full())
    engine.serve(0, "aaaabbbb")
    assert engine.would_hit("aaaabbbb").num_tokens == 4
    assert engine.would_hit("aaaabbbbx").num_tokens == 8


def test_a_hit_ends_at_the_first_block_that_differs():
    engine = Engine(full())
    engine.serve(0, LONG)
    assert engine.would_hit("aaaabbbXccccd").num_tokens == 4
    assert engine.would_hit("Xaaabbbbccccd").num_tokens == 0


def test_a_block_behind_another_prefix_is_a_miss():
    """Keys are chained: equal tokens at another place, or after other tokens, are other content."""
    engine = Engine(full())
    engine.serve(0, "aaaabbbb")
    assert engine.would_hit("bbbbx").num_tokens == 0
    assert engine.would_hit("ccccbbbbx").num_tokens == 0


def test_a_missing_block_ends_the_hit():
    engine = Engine(full())
    table = engine.serve(0, LONG).table[0]
    engine.cache(evicted=[table[1]])
    assert engine.would_hit(LONG).num_tokens == 4


def test_decoding_fills_blocks_and_caches_them_when_full():
    engine = Engine(full())
    engine.admit(0, "aaaabb")
    assert engine.keyed() == [1]
    engine.run(0, text="b")
    assert engine.keyed() == [1]
    engine.run(0, text="b")
    assert engine.keyed() == [1, 2]
    assert engine.table(0) == [1, 2]
    engine.run(0, text="c")
    assert engine.table(0) == [1, 2, 3]
    assert engine.would_hit("aaaabbbbccccd").num_tokens == 8


def test_a_prefill_in_chunks_caches_chunk_by_chunk():
    engine = Engine(full())
    engine.admit(0, LONG, cap=6)
    assert engine.keyed() == [1]
    engine.run(0, cap=6)
    assert engine.keyed() == [1, 2, 3]


def test_admission_lists_adopted_and_new_blocks():
    engine = Engine(full())
    engine.serve(0, "aaaabbbbc")
    again = engine.admit(1, "aaaabbbbdd")
    assert again.hit == 8
    assert again.granted == 2
    assert again.table == [[1, 2, 3]]
    assert again.new == [[3]], "freed without a key, so it was next to go"


def test_hits_are_shared_between_running_requests_by_references():
    engine = Engine(full())
    engine.admit(0, LONG)
    engine.admit(1, LONG)
    engine.admit(2, LONG)
    assert [engine.pool.references[block] for block in engine.table(2)] == [3, 3, 3, 1]
    assert engine.num_free == 100 - 3 - 3


def test_a_request_with_skip_reading_still_registers_keys():
    """As with prompt log probabilities, which need every prompt token to be computed."""
    engine = Engine(full())
    engine.serve(0, LONG)
    assert engine.admit(1, LONG, news={"skip_reading": 1}).hit == 0
    engine.end(1)
    engine.cache(evicted=[1, 2, 3])
    assert engine.would_hit(LONG).num_tokens == 12, "by the blocks of the second"


def test_without_prefix_caching_nothing_is_looked_up_or_kept():
    engine = Engine(full(), enable_caching=False)
    first = engine.serve(0, LONG)
    assert engine.keyed() == []
    assert first.result.events == []
    assert engine.admit(1, LONG).hit == 0
    assert engine.outside(LONG) == 0


def test_a_lookup_changes_no_reference_and_no_eviction_order():
    engine = Engine(full(), num_blocks=6)
    engine.serve(0, "aaaabbbbc")
    engine.add(1, "aaaabbbbc")
    before = engine.free_order
    (result,) = engine.step(Part(peek=Peek([1, 1], with_blocks=True)))
    assert result.peek_hit == [8, 8]
    assert result.peek_blocks.by_row()[1] == {0: [1, 2]}
    assert engine.free_order == before
    engine.serve(2, "zzzzyyyyxxxxw")
    assert engine.admit(1).hit < 8, "a hit without an admission may be evicted"


def test_a_peek_without_blocks_returns_lengths_only():
    engine = Engine(full())
    engine.serve(0, LONG)
    engine.add(1, LONG)
    (result,) = engine.step(Part(peek=Peek([1])))
    assert result.peek_hit == [12]
    assert result.peek_blocks.ids == []


# -- what makes content ------------------------------------------------------------------------------------------------

SALTED = ExtraKeys(salt="s")
ADAPTED = ExtraKeys(lora=("adapter", "/adapter"))
PICTURED = ExtraKeys(multimodal=(Multimodal("picture", 5, 2),))


@pytest.mark.parametrize(("extra", "hit"), [(SALTED, 0), (ADAPTED, 0), (PICTURED, 4)])
def test_extra_keys_separate_requests_with_equal_tokens(extra, hit):
    """A salt and an adapter change every block, a picture only from the block that it first touches."""
    engine = Engine(full())
    engine.serve(0, LONG)
    assert engine.would_hit(LONG, extra_keys=extra).num_tokens == hit
    engine.serve(1, LONG, news={"extra_keys": extra})
    assert engine.would_hit(LONG, extra_keys=extra).num_tokens == 12


def test_requests_of_different_domains_share_no_blocks():
    engine = Engine(full())
    engine.serve(0, LONG, news={"domain": "blue"})
    assert engine.would_hit(LONG).num_tokens == 0
    assert engine.would_hit(LONG, domain="green").num_tokens == 0
    assert engine.would_hit(LONG, domain="blue").num_tokens == 12
    assert engine.outside(LONG, domain="blue") == 12


def test_hashes_of_the_engine_hit_blocks_hashed_by_the_service():
    """An engine that hashes by the same scheme may send hashes; requests of both kinds share pages."""
    engine = Engine(full())
    engine.serve(0, LONG)
    made = digests(engine.spec, LONG)
    engine.step(Part(news=News([1], [13], num_hashes=[3], hashes=b"".join(made))))
    assert engine.admit(1).hit == 12


def test_an_engine_that_hashes_sends_each_hash_when_its_block_is_full():
    engine = Engine(full())
    made = digests(engine.spec, "aaaabbbb")
    engine.step(Part(news=News([0], [7], num_hashes=[1], hashes=made[0])))
    engine.admit(0)
    grown = Facts([0], appended=[1], num_hashes=[1], hashes=made[1])
    (result,) = engine.step(Part(facts=grown, run=run_rows(0), with_hashes=True))
    assert (result.num_hashes, result.last_hash) == ([2], [made[1]])
    assert engine.would_hit("aaaabbbbc").num_tokens == 8


def test_the_answer_returns_the_hashes_made_by_the_service():
    engine = Engine(full())
    made = digests(engine.spec, "aaaabbbb")
    result = engine.add(0, "aaaabbb")
    assert (result.num_hashes, result.last_hash) == ([1], [made[0]])
    engine.admit(0)
    grown = Facts([0], appended=[1], tokens=tokens("b"))
    assert engine.step(Part(facts=grown, with_hashes=True))[0].last_hash == [made[1]]
    assert engine.step(Part(facts=Facts([0], appended=[1], tokens=tokens("c"))))[0].last_hash == [], "only when asked"
    assert engine.add(1, "zz").last_hash == [b""]


# -- counts ------------------------------------------------------------------------------------------------------------


def test_hits_are_counted_in_tokens_at_admission():
    engine = Engine(full())
    engine.serve(0, LONG)
    engine.would_hit(LONG)
    engine.serve(1, LONG)
    engine.serve(2, LONG, news={"skip_reading": 1})
    counters = engine.replica.counters
    assert (counters.queried_tokens, counters.hit_tokens) == (26, 12), "peeks and skipped look-ups do not count"
    assert (counters.admitted, counters.ended, counters.granted_tokens) == (3, 3 + 1, 13 + 1 + 13)


def test_group_counters_count_blocks_per_group():
    engine = Engine(full(), num_blocks=5)
    engine.serve(0, "aaaabbbb")
    engine.admit(1, "aaaabbbbc")
    (group,) = engine.replica.group_counters()
    assert (group.used_blocks, group.cached_blocks, group.allocated_blocks, group.hit_blocks) == (3, 2, 3, 2)
    engine.end(1)
    engine.serve(2, "zzzzyyyyxxxx")
    assert engine.replica.group_counters()[0].evicted_blocks == 1


def test_block_map_counts_every_block_by_group_state_and_cell():
    engine = Engine(full(), num_blocks=9)
    assert engine.replica.block_map(9) == [[0] * 9] * 3
    engine.serve(0, "aaaabbbb")
    engine.admit(1, "aaaabbbbc")
    held, cached, other = engine.replica.block_map(9)
    assert (sum(held), sum(cached), sum(other)) == (3, 0, 0)
    assert max(held) == 1, "a block that is in two tables is one block"
    engine.end(1)
    held, cached, other = engine.replica.block_map(9)
    assert (sum(held), sum(cached), sum(other)) == (0, 2, 0)
    for cells in range(1, 10):
        coarse = engine.replica.block_map(cells)
        fine = engine.replica.block_map(9)
        for few, many in zip(coarse, fine, strict=True):
            assert few == [sum(many[at] for at in range(9) if at * cells // 9 == cell) for cell in range(cells)]


def test_block_map_has_the_blocks_that_a_load_of_an_earlier_epoch_holds():
    engine = Engine(full(), num_blocks=9)
    engine.replica.begin_epoch(2, busy=[3, 4])
    held, cached, other = engine.replica.block_map(9)
    assert (held, cached) == ([0] * 9, [0] * 9)
    assert other == [0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_common_prefix_counts_blocks_shared_by_all_running_requests():
    """For cascade attention, which computes a common prefix once."""
    engine = Engine(full())
    assert engine.replica.common_prefix_blocks() == [0]
    engine.admit(0, "aaaabbbbccccd")
    assert engine.replica.common_prefix_blocks() == [4], "one request shares all with itself"
    engine.admit(1, "aaaabbbbeeeef")
    assert engine.replica.common_prefix_blocks() == [2]
    engine.admit(2, "zzzz")
    assert engine.replica.common_prefix_blocks() == [0]


@pytest.mark.parametrize(("limit", "hit"), [(UNLIMITED, 8), (12, 8), (8, 8), (7, 4), (4, 4), (3, 0)])
def test_a_limit_counts_the_tokens_of_the_hit_and_not_the_block_that_a_drafter_computes_again(limit, hit):
    engine = Engine(full(drops_last_block=True))
    engine.serve(0, "aaaabbbbccccdddd")
    engine.add(1, "aaaabbbbcccce")
    assert engine.step(Part(peek=Peek([1], limit=[limit])))[0].peek_hit == [hit]
    admitted = engine.admit(1, hit_limit=[limit], expected_hit=hit)
    assert (admitted.status, admitted.hit) == (GRANTED, hit)


def test_a_limit_inside_a_block_finds_the_part_of_the_block_that_is_within_it():
    """The block has one key, that of its end."""
    engine = Engine(full(8), full(4, lookup_class=5), hash_block_size=4, partial_hits=True)
    engine.serve(0, "aaaabbbbc")
    for slot, limit, hit in (1, 8, 8), (2, 7, 4), (3, 3, 0):
        engine.add(slot, "aaaabbbbc")
        assert engine.step(Part(peek=Peek([slot], limit=[limit])))[0].peek_hit == [hit]


@pytest.mark.parametrize(("limit", "hit"), [(UNLIMITED, 12), (12, 12), (8, 8), (7, 6), (6, 6)])
def test_a_limit_finds_the_hit_where_what_is_left_out_begins_a_block_with_one_key(limit, hit):
    """Behind 8 tokens a drafter leaves out two, which only the key of the block up to 16 proves."""
    drafts = full(8, is_draft=True, drops_last_block=True)
    engine = Engine(drafts, full(4, lookup_class=5), hash_block_size=2, partial_hits=True)
    engine.serve(0, "aabbccddeeffgghhi")
    engine.add(1, "aabbccddeeffgghhi")
    assert engine.step(Part(peek=Peek([1], limit=[limit])))[0].peek_hit == [hit]


def test_the_reference_counts_the_block_that_it_leaves_out_towards_a_limit():
    engine = Engine(full(drops_last_block=True), commit=REFERENCE)
    engine.serve(0, "aaaabbbbccccdddd")
    engine.add(1, "aaaabbbbcccce")
    assert engine.step(Part(peek=Peek([1, 1], limit=[UNLIMITED, 8])))[0].peek_hit == [8, 4]
