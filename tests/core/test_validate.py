"""Invalid steps and specs: each refusal names its field and changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvplane_core
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import MAX_BLOCKS, MAX_TOKENS, HashAlgorithm, MambaMode, ReplicaSpec
from kvplane.base.step import (
    UNLIMITED,
    Admit,
    AdmitStatus,
    Budget,
    Cache,
    End,
    ExtraKeys,
    Facts,
    News,
    OnRefusal,
    Part,
    Peek,
    Run,
    Step,
)
from kvplane.base.values import MAX_LOOKAHEAD
from kvplane_core.face.interface import MAX_SLOTS
from kvplane_core.face.reasons import TEXTS
from kvplane_core.face.setup import check_spec
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.replica import Replica
from tests.core.builders import (
    BLOCK,
    Engine,
    admit_row,
    chunked,
    cross,
    full,
    replica_spec,
    ring,
    run_rows,
    sinks,
    state,
    tokens,
    window,
)
from tests.core.specification import specification_of

try:
    from kvplane_core.face import native
except ImportError:  # it is not compiled
    native = None  # type: ignore[assignment]

MOST = 64  # max_model_len of the engine below
TOKENS, HASHES, HELD, WAITING, FREE_SLOT = range(5)


@pytest.fixture
def engine():
    """Slots: a running request hashed by the service (at most 12 tokens), one that came with hashes, one held, one
    waiting. Step 5 is next; 2 steps are executed.
    """
    engine = Engine(full(), num_blocks=21, max_model_len=MOST)
    engine.admit(TOKENS, "aaaabbbb", news={"max_tokens": 12})
    engine.admit(HELD, "cccc")
    engine.executed = 2
    hashed = News([HASHES], [9], num_hashes=[1], hashes=b"h" * 32)
    engine.step(Part(news=hashed, admit=admit_row(HASHES)))
    engine.step(Part(facts=Facts([HELD], end=[End.HELD]), news=engine.news(WAITING, "ddddee")))
    return engine


def refusal(engine, *parts, **fields):
    """The error of the step, on both cores, after which the replica is as before and takes the next good step."""
    before = engine.digest
    step = Step(0, engine.seq + 1, list(parts), **{"executed_through": 2, **fields})
    with pytest.raises(InvalidArgument) as caught:
        engine.replica.apply(step)
    assert engine.digest == before
    same_on_compiled(specification_of(engine.replica), lambda core: core.apply(step), caught.value)
    engine.idle()
    return caught.value


def same_on_compiled(replica, refused, error):
    """A compiled core in the same state refuses with the same words, and is as before."""
    if native is None:
        return
    core = native.NativeReplica.of(replica)
    before = state_digest(core)
    with pytest.raises(InvalidArgument) as caught:
        refused(core)
    assert named(caught.value) == named(error)
    assert state_digest(core) == before


def named(error):
    return error.message, error.field, error.remedy


ROWS = {  # field -> parts that are refused for it
    # facts
    "facts.computed": [Part(facts=Facts([TOKENS], computed=[1, 2]))],
    "facts.appended": [Part(facts=Facts([TOKENS], appended=[1, 2]))],
    "facts.num_hashes": [
        Part(facts=Facts([HASHES], num_hashes=[1, 2])),
        Part(facts=Facts([HASHES], appended=[4], num_hashes=[-1])),
    ],
    "facts.commit": [Part(facts=Facts([TOKENS], commit=[1, 2]))],
    "facts.end": [Part(facts=Facts([TOKENS], end=[1, 1]))],
    "facts.fence": [Part(facts=Facts([TOKENS], fence=[1, 1]))],
    "facts.tokens": [
        Part(facts=Facts([TOKENS], appended=[1], tokens=[1, 2])),
        Part(facts=Facts([TOKENS], tokens=[1])),
        Part(facts=Facts([TOKENS], appended=[1], tokens=[1 << 32])),
        Part(facts=Facts([TOKENS], appended=[1], tokens=[-1])),
    ],
    "facts.tokens[0]": [
        Part(facts=Facts([TOKENS], appended=[1])),
        Part(facts=Facts([HASHES], appended=[1], tokens=[7])),
    ],
    "facts.hashes": [
        Part(facts=Facts([HASHES], appended=[3], num_hashes=[1])),
        Part(facts=Facts([HASHES], appended=[3], num_hashes=[1], hashes=b"h" * 31)),
        Part(facts=Facts([HASHES], appended=[3], num_hashes=[1], hashes=b"h" * 16)),
        Part(facts=Facts([HASHES], appended=[3], hashes=b"h" * 32)),
    ],
    "facts.slot[0]": [
        Part(facts=Facts([FREE_SLOT])),
        Part(facts=Facts([-1])),
        Part(facts=Facts([1 << 40])),
        Part(facts=Facts([HELD], end=[End.FREE])),
    ],
    "facts.slot[1]": [Part(facts=Facts([TOKENS, TOKENS], end=[End.FREE, End.FREE]))],
    "facts.appended[0]": [
        Part(facts=Facts([TOKENS], appended=[5], tokens=tokens("bbbbb"))),  # 8 + 5 > max_tokens 12
        Part(facts=Facts([WAITING], appended=[59], tokens=tokens("e" * 59))),  # 6 + 59 > max_model_len 64
        Part(facts=Facts([HASHES], appended=[-1])),
    ],
    "facts.appended[1]": [Part(facts=Facts([TOKENS, TOKENS], appended=[2, 3], tokens=tokens("bbccc")))],
    "facts.computed[0]": [
        Part(facts=Facts([TOKENS], computed=[-2])),
        Part(facts=Facts([TOKENS], computed=[MOST + 1])),
    ],
    "facts.commit[0]": [
        Part(facts=Facts([TOKENS], commit=[-2])),
        Part(facts=Facts([TOKENS], commit=[MOST + 1])),
    ],
    "facts.num_hashes[0]": [
        Part(facts=Facts([TOKENS], num_hashes=[1], hashes=b"h" * 32)),
        Part(facts=Facts([HASHES], num_hashes=[2], hashes=b"h" * 64)),  # 3 hashes for 9 tokens
    ],
    "facts.end[0]": [Part(facts=Facts([TOKENS], end=[4])), Part(facts=Facts([TOKENS], end=[-1]))],
    "facts.fence[0]": [Part(facts=Facts([TOKENS], fence=[-1])), Part(facts=Facts([TOKENS], fence=[6]))],
    # cache
    "cache.failed_steps[0]": [
        Part(cache=Cache(failed_steps=[0])),
        Part(cache=Cache(failed_steps=[5])),
        Part(cache=Cache(failed_steps=[2])),  # executed
    ],
    "cache.evicted[0]": [Part(cache=Cache(evicted=[0])), Part(cache=Cache(evicted=[21]))],
    "cache.evicted[1]": [Part(cache=Cache(evicted=[1, -1]))],
    "cache.released[0]": [
        Part(cache=Cache(released=[FREE_SLOT])),
        Part(cache=Cache(released=[TOKENS])),
    ],
    "cache.released[1]": [Part(cache=Cache(released=[HELD, HELD]))],
    # news
    "news.num_tokens": [
        Part(news=News([FREE_SLOT], [1, 2], tokens=[1, 2, 3])),
        Part(news=News([FREE_SLOT], [], tokens=[])),
    ],
    "news.num_hashes": [
        Part(news=News([FREE_SLOT], [9], num_hashes=[1, 1], hashes=b"h" * 64)),
        Part(news=News([4, 5], [9, 9], num_hashes=[-1, 1])),
    ],
    "news.request_id": [Part(news=News([FREE_SLOT], [1], [1], request_id=["a", "b"]))],
    "news.domain": [Part(news=News([FREE_SLOT], [1], [1], domain=["a", "b"]))],
    "news.extra_keys": [Part(news=News([FREE_SLOT], [1], [1], extra_keys=[ExtraKeys()] * 2))],
    "news.skip_reading": [Part(news=News([FREE_SLOT], [1], [1], skip_reading=[1, 1]))],
    "news.max_tokens": [Part(news=News([FREE_SLOT], [1], [1], max_tokens=[1, 1]))],
    "news.tokens": [
        Part(news=News([FREE_SLOT], [2], [1])),
        Part(news=News([FREE_SLOT], [1], [1 << 32])),
    ],
    "news.hashes": [
        Part(news=News([FREE_SLOT], [4], tokens("aaaa"), num_hashes=[1], hashes=b"h" * 32)),  # tokens and hashes
        Part(news=News([FREE_SLOT], [4], num_hashes=[1])),
        Part(news=News([FREE_SLOT], [4], hashes=b"h" * 32)),
        Part(news=News([FREE_SLOT], [4], num_hashes=[1], hashes=b"h" * 20)),
        Part(news=News([FREE_SLOT], [4], num_hashes=[1], hashes=b"h" * 16)),  # as for xxhash
        Part(news=News([FREE_SLOT], [8], num_hashes=[2], hashes=b"h" * 33)),
    ],
    "news.slot[0]": [
        Part(news=News([-1], [1], [1])),
        Part(news=News([MAX_SLOTS], [1], [1])),
        Part(news=News([TOKENS], [1], [1])),
        Part(news=News([HELD], [1], [1])),
    ],
    "news.slot[1]": [Part(news=News([4, 4], [1, 1], [1, 1]))],
    "news.max_tokens[0]": [
        Part(news=News([FREE_SLOT], [1], [1], max_tokens=[-1])),
        Part(news=News([FREE_SLOT], [1], [1], max_tokens=[MAX_TOKENS + 1])),
    ],
    "news.num_tokens[0]": [
        Part(news=News([FREE_SLOT], [0])),
        Part(news=News([FREE_SLOT], [MOST + 1])),
        Part(news=News([FREE_SLOT], [5], tokens("aaaab"), max_tokens=[4])),
    ],
    "news.num_hashes[0]": [Part(news=News([FREE_SLOT], [7], num_hashes=[2], hashes=b"h" * 64))],
    # run
    "run.extra": [Part(run=Run([TOKENS], extra=[1, 1])), Part(run=Run([TOKENS], extra=[MAX_TOKENS + 1]))],
    "run.cap": [Part(run=Run([TOKENS], cap=[1, 1])), Part(run=Run([TOKENS], cap=[-1]))],
    "run.lookahead": [
        Part(run=Run([TOKENS], lookahead=[1, 1])),
        Part(run=Run([TOKENS], lookahead=[-1])),
        Part(run=Run([TOKENS], lookahead=[MAX_LOOKAHEAD + 1])),
    ],
    "run.in_flight": [Part(run=Run([TOKENS], in_flight=[1, 1])), Part(run=Run([TOKENS], in_flight=[-2]))],
    "run.flags": [Part(run=Run([TOKENS], flags=flags)) for flags in ([2, 2], [8], [32], [64], [-1])],
    "run.slot": [Part(run=Run([TOKENS, HASHES, TOKENS]))],
    "run.slot[1]": [Part(run=Run([TOKENS, FREE_SLOT])), Part(run=Run([TOKENS, -1]))],
    "run.victims[0]": [Part(run=Run([TOKENS], victims=[FREE_SLOT]))],
    # admit
    "admit.extra": [Part(admit=Admit([WAITING], extra=[1, 1])), Part(admit=Admit([WAITING], extra=[-MAX_TOKENS - 1]))],
    "admit.cap": [Part(admit=Admit([WAITING], cap=[1, 1])), Part(admit=Admit([WAITING], cap=[UNLIMITED + 1]))],
    "admit.lookahead": [Part(admit=Admit([WAITING], lookahead=[MAX_LOOKAHEAD + 1]))],
    "admit.external": [Part(admit=Admit([WAITING], external=[-1])), Part(admit=Admit([WAITING], external=[MOST + 1]))],
    "admit.expected_hit": [
        Part(admit=Admit([WAITING], expected_hit=[-2])),
        Part(admit=Admit([WAITING], expected_hit=[MOST + 1])),
    ],
    "admit.encoder_tokens": [Part(admit=Admit([WAITING], encoder_tokens=[-1]))],
    "admit.reserved": [Part(admit=Admit([WAITING], reserved=[22]))],
    "admit.watermark": [Part(admit=Admit([WAITING], watermark=[3]))],
    "admit.flags": [Part(admit=Admit([WAITING], flags=[bit])) for bit in (32, 64, -1)],
    "admit.max_running": [Part(admit=Admit([WAITING], max_running=-1))],
    "admit.on_refusal": [Part(admit=Admit([WAITING], on_refusal=OnRefusal.PREEMPT))],
    "admit.slot": [Part(admit=Admit([WAITING, WAITING]))],
    "admit.slot[0]": [Part(admit=Admit([FREE_SLOT]))],
    # peek, budget
    "peek.slot[0]": [Part(peek=Peek([FREE_SLOT]))],
    "budget.tokens": [Part(budget=Budget(tokens=-1))],
    "budget.input": [Part(budget=Budget(input=UNLIMITED + 1))],
    "budget.overhead": [Part(budget=Budget(overhead=-1))],
}
CASES = [(field, part) for field, parts in ROWS.items() for part in parts]


@pytest.mark.parametrize(("field", "part"), CASES, ids=[f"{field}-{n}" for n, (field, _) in enumerate(CASES)])
def test_an_invalid_part_is_refused_by_field(engine, field, part):
    assert refusal(engine, part).field == f"parts[0].{field}"


def test_row_flag_bits_without_a_meaning_are_ignored_or_refused(engine):
    """Bit 1 was asked for alignment once and means nothing; 32 is refused by its name where there are no tiers."""
    named = refusal(engine, Part(admit=Admit([WAITING], flags=[1 | 32])))
    assert named.message == "bit 32 is not a flag of these rows: LOAD is for admit rows of a replica with tiers"
    engine.step(Part(run=Run([TOKENS], flags=[1]), admit=Admit([WAITING], flags=[1])))


def test_an_invalid_part_is_named_and_no_earlier_part_is_applied(engine):
    good = Part(facts=Facts([TOKENS], end=[End.FREE]))
    assert refusal(engine, good, Part(run=Run([TOKENS]))).field == "parts[1].run.slot[0]"


@pytest.mark.parametrize("executed", [-1, 5, 10**9])
def test_executed_through_beyond_the_sent_steps_is_refused(engine, executed):
    assert refusal(engine, Part(), executed_through=executed).field == "executed_through"


def test_a_step_without_parts_is_refused(engine):
    assert refusal(engine).field == "parts"


def test_a_failed_step_at_or_below_executed_through_is_refused(engine):
    assert refusal(engine, Part(cache=Cache(failed_steps=[4])), executed_through=4).field.endswith("failed_steps[0]")


def test_refusal_messages_name_the_value(engine):
    error = refusal(engine, Part(facts=Facts([TOKENS], appended=[5], tokens=tokens("bbbbb"))))
    assert str(error) == "parts[0].facts.appended[0]: the request would have 13 tokens, its limit is 12"


@pytest.mark.parametrize("number", [1 << 64, 1 << 70, -(1 << 70)])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: Part(run=Run([TOKENS], cap=[number])),
        lambda number: Part(admit=Admit([WAITING], expected_hit=[number])),
        lambda number: Part(facts=Facts([TOKENS], computed=[number])),
        lambda number: Part(budget=Budget(tokens=number)),
    ],
    ids=["run.cap", "admit.expected_hit", "facts.computed", "budget.tokens"],
)
def test_numbers_beyond_all_types_are_refused_as_those_beyond_the_limit(engine, make, number):
    """The compiled core reads such a number as the nearest that it has."""
    found, near = refusal(engine, make(number)), refusal(engine, make(1 << 40 if number > 0 else -(1 << 40)))
    assert found.field == near.field
    assert re.sub(r"-?\d{9,}", "N", found.message) == re.sub(r"-?\d{9,}", "N", near.message)


def test_validation_counts_changes_of_earlier_rows(engine):
    ended = Facts([TOKENS, HASHES], end=[End.FREE, End.PREEMPTED])
    engine.step(
        Part(facts=ended, cache=Cache(released=[HELD]), news=engine.news(TOKENS, "zzzz"), run=run_rows(TOKENS, HASHES)),
        Part(facts=Facts([TOKENS], appended=[2], tokens=tokens("zz"))),
        Part(news=engine.news(HELD, "y"), peek=Peek([HELD])),
    )
    assert engine.replica.requests.num_tokens[TOKENS] == 6


def test_rows_for_requests_in_another_state_are_not_invalid(engine):
    """Running, waiting, held: an engine cannot know all of it when it writes the step, so such rows get nothing."""
    (result,) = engine.step(
        Part(
            facts=Facts([WAITING], computed=[3], commit=[3], end=[End.PREEMPTED]),
            run=run_rows(WAITING, HELD),
            admit=admit_row(TOKENS, HELD),
        )
    )
    assert (result.granted, result.admit_status, result.preempted) == ([0, 0], [AdmitStatus.NOT_WAITING] * 2, [])


def test_content_of_a_lookup_is_validated_like_a_new_request(engine):
    with pytest.raises(InvalidArgument) as caught:
        engine.replica.digests_of(News([0], [2], [1]))
    assert caught.value.field == "parts[0].news.tokens"
    same_on_compiled(specification_of(engine.replica), lambda core: core.digests_of(News([0], [2], [1])), caught.value)
    alone = Part(news=News([TOKENS], [1], [1]), admit=Admit([TOKENS]), cache=Cache(jobs_done=[1]))
    with pytest.raises(InvalidArgument, match="job 1 was not ordered") as caught:
        engine.replica.check_alone(alone)
    same_on_compiled(specification_of(engine.replica), lambda core: core.check_alone(alone), caught.value)


REFUSES = re.compile(r'(?:[Rr]efuse\((?:[^"()]*\? )?|Refused\{\{)"([a-z ]+)"')


def test_both_cores_give_the_reasons_that_have_texts():
    """And no others: a reason without a text would be no error for people."""
    folder = Path(kvplane_core.__file__).parent
    files = {"validate.py", "open_step.py", "resume.py"}
    of_python = "".join((folder / "spec" / name).read_text() for name in files)
    headers = sorted((folder / "cpp").glob("*.h"))
    of_compiled = "".join(path.read_text() for path in headers if path.name not in ("image.h", "bind_walks.h"))
    assert not [reason for reason in TEXTS if f'"{reason}"' not in of_python]
    assert not [reason for reason in TEXTS if f'"{reason}"' not in of_compiled]
    given = set(REFUSES.findall(re.sub(r"\s+", " ", of_compiled)))
    assert given <= set(TEXTS)
    assert len(given) > len(TEXTS) * 0.9


# -- specs -------------------------------------------------------------------------------------------------------------


SPECS: dict[str, Any] = {  # field -> specs that are refused for it
    # one field alone
    "groups": [([full()] * 65, {})],
    "num_blocks": [
        ([full()], {"num_blocks": 1}),
        ([full()], {"num_blocks": MAX_BLOCKS + 1}),
        ([sinks(36)], {"num_blocks": 10}),
    ],
    "max_model_len": [([full()], {"max_model_len": 0}), ([full()], {"max_model_len": MAX_TOKENS + 1})],
    "max_in_flight_tokens": [([full()], {"max_in_flight_tokens": 0})],
    "watermark_blocks": [([full()], {"watermark_blocks": -1}), ([full()], {"watermark_blocks": 101})],
    "hash_lookahead_tokens": [([full()], {"hash_lookahead_tokens": -1})],
    "prefill_lookahead": [([full()], {"prefill_lookahead": -1})],
    "groups[0].block_size": [
        ([full(0)], {"hash_block_size": 1, "scheduler_block_size": 1}),
        ([full(4)], {"hash_block_size": 3, "scheduler_block_size": 6}),  # does not divide
        ([full(6), full(4)], {"hash_block_size": 4, "scheduler_block_size": 12}),  # no whole hashes
        ([chunked(8, 4), full(8)], {}),  # hits end at 8, so blocks of 4 cannot say where
    ],
    "groups[0].window": [([window(0)], {}), ([full(window=4)], {})],
    "groups[0].chunk": [([chunked(0)], {}), ([full(chunk=4)], {})],
    "groups[0].sink_tokens": [([sinks(0)], {}), ([sinks(6)], {}), ([full(sink_tokens=4)], {})],
    "groups[0].speculative_blocks": [([state(speculative_blocks=-1), full()], {})],
    "groups[0].admission_cap_blocks": [([full(admission_cap_blocks=-1)], {})],
    "groups[0].extra_retained_tokens": [([window(4, extra_retained_tokens=-1)], {})],
    "groups[0].checkpoint_alignment": [
        ([full(checkpoint_alignment=1)], {}),
        ([state(checkpoint_alignment=-1), full()], {}),
        ([state(mamba_mode=MambaMode.NONE, checkpoint_alignment=1), full()], {"enable_caching": False}),
    ],
    "groups[0].checkpoints_single_group_hits": [
        ([full(checkpoints_single_group_hits=True)], {}),
        ([state(8, checkpoints_single_group_hits=True), full(8)], {"hash_block_size": 4, "partial_hits": True}),
        ([state(checkpoints_single_group_hits=True), full(drops_last_block=True)], {}),
    ],
    # fields that contradict each other
    "scheduler_block_size": [
        ([full()], {"scheduler_block_size": 0}),
        ([full()], {"scheduler_block_size": 6}),
        ([full(drops_last_block=True)], {"prefill_lookahead": 5}),
    ],
    "hash_block_size": [
        ([full()], {"hash_block_size": 0}),
        ([full(4)], {"hash_block_size": 2}),  # one group has no finer hashes
    ],
    "groups[1].kind": [([full(), cross()], {})],
    "groups[1].mamba_mode": [([full(), state(mamba_mode=MambaMode.NONE)], {})],
    "groups[0].drops_last_block": [([chunked(8, drops_last_block=True), full()], {})],
    "partial_hits": [([window(8, 4), full(8)], {"partial_hits": True, "hash_block_size": 2})],
    "retention_interval": [
        ([full()], {"retention_interval": -2}),
        ([full()], {"retention_interval": 8}),  # nothing to thin out
        ([window(8), full()], {"retention_interval": 6}),
    ],
    "hash_seed": [([full()], {"hash_algorithm": HashAlgorithm.XXHASH})],
}
BAD_SPECS = [(field, groups, changes) for field, cases in SPECS.items() for groups, changes in cases]


@pytest.mark.parametrize(
    ("field", "groups", "changes"), BAD_SPECS, ids=[f"{case[0]}-{n}" for n, case in enumerate(BAD_SPECS)]
)
def test_an_invalid_replica_spec_is_refused_by_field(field, groups, changes):
    with pytest.raises(InvalidArgument) as caught:
        Replica(replica_spec(*groups, **changes))
    assert caught.value.field == field


def test_a_replica_without_groups_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        Replica(ReplicaSpec((), 10, MOST, BLOCK, BLOCK, MOST))
    assert caught.value.field == "groups"


@pytest.mark.parametrize(
    ("groups", "changes"),
    [
        ([full(), ring(3)], {"hash_block_size": 4, "scheduler_block_size": 4}),  # scratch needs no common multiple
        ([full(), cross(6)], {"enable_caching": False, "hash_block_size": 4, "scheduler_block_size": 4}),
        ([full(), state(64, mamba_mode=MambaMode.NONE)], {"enable_caching": False, "scheduler_block_size": 4}),
        ([sinks(32)], {"num_blocks": 10}),
        ([full(drops_last_block=True)], {"prefill_lookahead": 4}),
        ([window(8), full()], {"retention_interval": 8}),
        ([full()], {"retention_interval": 0}),
        ([window(8, 4), full(8)], {"partial_hits": True, "hash_block_size": 4}),
        ([full()], {"hash_algorithm": HashAlgorithm.XXHASH, "hash_seed": "secret"}),
    ],
)
def test_valid_neighbours_of_invalid_replica_specs_are_accepted(groups, changes):
    check_spec(replica_spec(*groups, **changes))


def test_a_hash_algorithm_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(FailedPrecondition):
        check_spec(replica_spec(full(), hash_algorithm=HashAlgorithm.XXHASH, hash_seed="secret"))
