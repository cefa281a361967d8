"""The fast path: a row that changes no table calls no manager; only its tokens are counted.

It is only a shortcut: a replica that leaves the fast path before every step decides the same.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.step import Admit, Facts, News, OnRefusal, Part, Run
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.full import FullAttentionManager
from kvplane_core.spec.replica import Replica
from tests.core.builders import Engine, digests, full, replica_spec, state, tokens, window
from tests.core.compared import CoresDiffer, compares, reason
from tests.core.test_page_contents import ENDS_INSIDE, run
from tests.core.test_page_contents import MIXES as ENGINES
from tests.core.test_step_law import MIXES, Sender, Writer


def asked(engine):
    """The slots whose managers are asked from now on, one entry per call."""
    seen = []
    coordinator = engine.replica.coordinator
    extend = coordinator.extend

    def noting(slot, *rest):
        seen.append(slot)
        return extend(slot, *rest)

    coordinator.extend = noting
    return seen


def test_decode_rows_leave_the_fast_path_where_a_block_starts_or_fills():
    engine = Engine(full(), full(lookup_class=1))
    engine.admit(0, "aaaabb")
    seen = asked(engine)
    asked_at = []
    for _ in range(12):
        engine.run(0, text="b")
        if seen:
            asked_at.append(engine.computed(0))
            seen.clear()
    assert asked_at == [7, 8, 9, 12, 13, 16, 17], "the first call after an admission always asks"


def test_decode_rows_leave_the_fast_path_where_a_block_leaves_the_window():
    engine = Engine(window(6), enable_caching=False)
    engine.admit(0, "a" * 6)
    seen = asked(engine)
    asked_at = []
    for _ in range(12):
        engine.run(0, text="b")
        if seen:
            asked_at.append(engine.computed(0))
            seen.clear()
    assert asked_at == [7, 9, 10, 13, 14, 17, 18], "a block starts at 8, 12, 16; one leaves with 9, 13, 17 computed"


@pytest.mark.parametrize("move", ["fact", "commit", "refusal", "preemption"])
def test_table_changes_end_the_fast_path(move):
    engine = Engine(full(), num_blocks=6)
    engine.admit(0, "aaaab")
    engine.run(0, text="b")
    assert engine.replica.requests.fast_path_until[0] == 8, "its block has 8 slots"
    if move == "fact":
        engine.fact(0, computed=5)
    elif move == "commit":
        engine.fact(0, commit=5)
    elif move == "refusal":
        engine.extend(0, "b" * 90)
    else:
        engine.preempt(0)
    assert engine.replica.requests.fast_path_until[0] == 0


def test_a_full_block_leaves_the_fast_path_only_when_its_hash_is_known():
    """The engine hashes, and sends the hash of the second block two steps late."""
    made = digests(replica_spec(full()), "aaaabbbb")
    news = News([0], [5], num_hashes=[1], hashes=made[0])
    asked_at, engine = [], Engine(full())
    engine.step(Part(news=news, admit=Admit([0])))
    seen = asked(engine)
    for tokens_known in range(6, 13):
        sent = made[1:] if tokens_known == 11 else []
        facts = Facts([0], appended=[1], num_hashes=[len(sent)], hashes=b"".join(sent))
        engine.step(Part(facts=facts, run=Run([0])))
        if seen:
            asked_at.append(tokens_known)
            seen.clear()
    assert asked_at == [6, 9, 11], "after the admission, for a block, for the hash"
    assert len(engine.keyed()) == 2


def grown(engine):
    """The slots whose tables are looked at for blocks from now on, one entry per call."""
    seen, coordinator = [], engine.replica.coordinator

    def noting(grow):
        def note(slot, *rest):
            seen.append(slot)
            return grow(slot, *rest)

        return note

    for name in ("_grow_tables", "_append_blocks"):
        setattr(coordinator, name, noting(getattr(coordinator, name)))
    return seen


def test_steps_in_flight_delay_the_end_of_the_fast_path_of_a_window():
    engine = Engine(window(6), enable_caching=False)
    engine.admit(0, "a" * 6)
    looked_at, seen = [], grown(engine)
    for _ in range(14):
        engine.executed = max(0, engine.seq - 3)
        engine.run(0, text="b")
        if seen:
            looked_at.append(engine.computed(0))
            seen.clear()
    assert looked_at == [7, 9, 13, 17], "blocks start with 9, 13, 17; one leaves with 9 processed, 12 computed before"


def test_a_new_hash_allocates_no_block():
    """Rows in phase: all fill their blocks in one step."""
    engine = Engine(full(), window(6))
    engine.admit(0, "aaaabb")
    engine.run(0, text="b")
    looked = grown(engine)
    seen, keyed = asked(engine), len(engine.keyed())
    engine.run(0, text="b")
    assert (seen, looked, len(engine.keyed())) == ([0], [], keyed + 2), "the block is full and named in both groups"
    engine.run(0, text="b")
    assert (seen, looked) == ([0, 0], [0]), "the next token needs a block"


def test_a_prefill_has_no_fast_path():
    """Its boundaries matter to retention; chunks are few."""
    engine = Engine(state(), full(), num_blocks=30)
    engine.admit(0, "a" * 20, cap=3)
    assert engine.replica.requests.fast_path_until[0] == 0


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
def test_invalidating_the_fast_path_changes_no_decision(mix, data):
    (groups, changes), rng = MIXES[mix], data.draw(st.randoms(use_true_random=False))
    spec = replica_spec(*groups, num_blocks=data.draw(st.integers(8, 60)), **changes)
    quiet, awake = Sender(spec, by_rows=False), Sender(spec, by_rows=False)

    def send(part):
        executed = max(0, quiet.seq - data.draw(st.integers(0, 2)))
        executed = max(executed, quiet.replica.executed_through)
        for slot in awake.replica.requests.slots():
            awake.replica.requests.invalidate_fast_path(slot)
        assert quiet.send(part, executed) == awake.send(part, executed)
        assert state_digest(quiet.replica) == state_digest(awake.replica)

    for _ in range(data.draw(st.integers(1, 5))):
        send(Writer(rng, quiet.replica, quiet.replica.executed_through).step())
        for letter in data.draw(st.text("ab", max_size=8)):
            send(decode_step(quiet.replica, letter))


@pytest.mark.parametrize(("mix", "seed"), [*((mix, 2) for mix in ENGINES), *ENDS_INSIDE])
def test_random_engines_get_equal_answers_without_fast_paths(mix, seed, monkeypatch):
    """The specification leaves all of them before each step, the compiled core takes its own."""
    real = Replica.apply

    def apply(replica, step):
        replica.requests.invalidate_all_fast_paths()
        return real(replica, step)

    monkeypatch.setattr(Replica, "apply", apply)
    run(mix, seed)


@pytest.mark.skipif(not compares(), reason=reason())
@pytest.mark.parametrize(("mix", "seed"), ENDS_INSIDE)
def test_a_bound_that_forgets_the_end_of_a_prompt_is_caught(monkeypatch, mix, seed):
    monkeypatch.setattr(FullAttentionManager, "register_bound", GroupManager.register_bound)
    with pytest.raises(CoresDiffer):
        run(mix, seed)
