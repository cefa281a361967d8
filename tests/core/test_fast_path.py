"""The fast path of the compiled core: it asks no manager about a row below the bounds of its request. The specification
asks about every row, so each step here compares the two.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.step import Admit, Facts, News, OnRefusal, Part, Run
from tests.core.builders import Engine, digests, full, replica_spec, state, tokens, window
from tests.core.test_page_contents import ENDS_INSIDE, run
from tests.core.test_page_contents import MIXES as ENGINES
from tests.core.test_step_law import MIXES, Sender, Writer


def test_decode_rows_leave_the_fast_path_where_a_block_starts_or_fills():
    engine = Engine(full(), full(lookup_class=1))
    engine.admit(0, "aaaabb")
    found = [engine.run(0, text="b").new for _ in range(12)]
    assert [at for at, new in enumerate(found, 7) if new] == [9, 13, 17], "a block starts behind 8, 12 and 16 tokens"
    assert len(engine.keyed()) == 8


@pytest.mark.parametrize("behind", [0, 3])
def test_decode_rows_leave_the_fast_path_where_a_block_leaves_the_window(behind):
    """`behind`: steps in flight, whose launches may still read the window."""
    engine = Engine(window(6), enable_caching=False, num_blocks=30)
    engine.admit(0, "a" * 6)
    released = []
    for _ in range(14):
        engine.executed, before = max(0, engine.seq - behind), engine.replica.group_blocks(0)[0]
        new = engine.run(0, text="b").new
        if before + bool(new) > engine.replica.group_blocks(0)[0]:
            released.append(engine.computed(0))
    assert released == ([10, 14, 18] if not behind else [13, 17])


@pytest.mark.parametrize("move", ["fact", "commit", "refusal", "preemption"])
def test_table_changes_end_the_fast_path(move):
    engine = Engine(full(), num_blocks=6)
    engine.admit(0, "aaaab")
    engine.run(0, text="b")
    if move == "fact":
        engine.fact(0, computed=5)
    elif move == "commit":
        engine.fact(0, commit=5)
    elif move == "refusal":
        engine.extend(0, "b" * 90)
    else:
        engine.preempt(0)
    engine.step(Part(run=Run([0])))


def test_a_full_block_leaves_the_fast_path_only_when_its_hash_is_known():
    """The engine hashes, and sends the hash of the second block two steps late."""
    made = digests(replica_spec(full()), "aaaabbbb")
    news = News([0], [5], num_hashes=[1], hashes=made[0])
    keyed, engine = [], Engine(full())
    engine.step(Part(news=news, admit=Admit([0])))
    for tokens_known in range(6, 13):
        sent = made[1:] if tokens_known == 11 else []
        facts = Facts([0], appended=[1], num_hashes=[len(sent)], hashes=b"".join(sent))
        engine.step(Part(facts=facts, run=Run([0])))
        keyed.append(len(engine.keyed()))
    assert keyed == [1, 1, 1, 1, 1, 2, 2]


def test_a_prefill_has_no_fast_path():
    """Its boundaries matter to retention; chunks are few."""
    engine = Engine(state(), full(), num_blocks=30)
    engine.admit(0, "a" * 20, cap=3)
    while engine.computed(0) < 20:
        engine.step(Part(run=Run([0], cap=[3])))


def decode_step(replica, letter):
    """One more token for each running request whose load, if it has one, may have ended."""
    requests, executed = replica.requests, replica.executed_through
    running = [slot for slot in requests.slots() if requests.running[slot] and requests.num_tokens[slot] < 100]
    slots = [slot for slot in running if slot not in requests.loading or requests.load_after[slot] <= executed]
    computed = [min(requests.computed[slot], requests.num_tokens[slot]) for slot in slots]
    facts = Facts(slots, computed, [1] * len(slots), tokens(letter) * len(slots))
    return Part(facts=facts, run=Run(slots, on_refusal=OnRefusal.SKIP))


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=20)
@given(data=st.data())
def test_the_fast_path_changes_no_decision(mix, data):
    (groups, changes), rng = MIXES[mix], data.draw(st.randoms(use_true_random=False))
    sender = Sender(replica_spec(*groups, num_blocks=data.draw(st.integers(8, 60)), **changes), by_rows=False)

    def send(part):
        executed = max(0, sender.seq - data.draw(st.integers(0, 2)))
        sender.send(part, max(executed, sender.replica.executed_through))

    for _ in range(data.draw(st.integers(1, 5))):
        send(Writer(rng, sender.replica, sender.replica.executed_through).step())
        for letter in data.draw(st.text("ab", max_size=8)):
            send(decode_step(sender.replica, letter))


@pytest.mark.parametrize(("mix", "seed"), [*((mix, 2) for mix in ENGINES), *ENDS_INSIDE])
def test_random_engines_get_equal_answers_with_and_without_it(mix, seed):
    run(mix, seed)
