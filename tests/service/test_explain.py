"""Explanations: each cause is produced and reported exactly; beyond the log, "not recorded"."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplane.base.errors import NotFound
from kvplane.base.groups import CommitRule, EvictionPolicy, ReplicaSpec, TierKind, TierSpec
from kvplane.base.hashing import split_hashes
from kvplane.base.step import (
    NO_EXTRA_KEYS,
    Admit,
    AdmitStatus,
    Cache,
    End,
    ExtraKeys,
    Facts,
    Multimodal,
    News,
    Part,
    RowFlag,
    Run,
)
from kvplane.v1 import admin_pb2 as pb
from kvplane.v1.allocation_pb2 import RequestContent
from kvplane_core.spec.tiers import loads
from kvplane_service.config import Config
from kvplane_service.explain.causes import Cause
from kvplane_service.explain.service import Explanation, Prompt, explain_prompt, explain_request
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns
from kvplane_service.unary.hashing import hash_tokens
from tests.core.builders import chunked, digests, full, replica_spec, state, window
from tests.core.specification import specification_of
from tests.service.hosts import HostWorld
from tests.service.rig import Stream, column, running

SEEN: set[Cause] = set()  # by the scenarios below

FULL = replica_spec(full(), num_blocks=9, max_in_flight_tokens=64)
SPARSE = {"retention_interval": 0}


class Desk:
    """A replica with blocks of 4 tokens, an engine, and questions; a prompt is a string, one token per character."""

    def __init__(self, spec: ReplicaSpec = FULL, config: Config | None = None) -> None:
        self.world = HostWorld(config, spec)
        self.engine = self.world.open()
        self._slots: dict[str, int] = {}

    def step(self, *parts: Part, **fields):
        self.world.now_ns += 1_000_000_000
        return self.engine.step(*parts, **fields)

    def admit(self, name: str, text: str, **row) -> None:
        """A new request, admitted at once."""
        self._slots[name] = len(self._slots)
        self.step(self.admission(name, text, **row))

    def admission(self, name: str, text: str, flags: RowFlag = RowFlag.NONE, **row) -> Part:
        """The part that admits it."""
        slot = self._slots[name]
        news = News(slot=[slot], num_tokens=[len(text)], tokens=[ord(letter) for letter in text], request_id=[name])
        for column_name, value in row.items():
            setattr(news, column_name, [value])
        return Part(news=news, admit=Admit(slot=[slot], flags=[int(flags)]))

    def again(self, name: str) -> None:
        self.step(Part(admit=Admit(slot=[self._slots[name]])))

    def free(self, *names: str, end: End = End.FREE) -> None:
        slots = [self._slots[name] for name in names]
        self.step(Part(facts=Facts(slot=slots, end=[end] * len(slots))))

    def serve(self, name: str, text: str, **row) -> None:
        self.admit(name, text, **row)
        self.free(name)

    def why(self, text: str, domain: str = "", keys: ExtraKeys = NO_EXTRA_KEYS) -> Explanation:
        """Of a prompt, now."""
        before = self.world.digest
        found = self.explain(text, domain, keys)
        assert self.world.digest == before
        SEEN.add(found.why.cause)
        return found

    def explain(self, text: str, domain: str, keys: ExtraKeys) -> Explanation:
        async def hash_with(other: ExtraKeys) -> list[bytes]:
            return self.digests(text, other)

        prompt = Prompt(self.digests(text, keys), len(text), domain, keys, hash_with)
        return asyncio.run(explain_prompt(self.world.host, prompt, Executor("explanations")))

    def digests(self, text: str, keys: ExtraKeys) -> list[bytes]:
        """Of the full blocks."""
        scheme, tokens = self.world.host.scheme, [ord(letter) for letter in text]
        return split_hashes(hash_tokens(scheme, tokens, keys, None).hashes, scheme.digest.size)

    def why_request(self, name: str) -> Explanation:
        found = asyncio.run(explain_request(self.world.host, name, Turns("explanations", 0), Executor("explanations")))
        SEEN.add(found.why.cause)
        return found


def summary(explanation: Explanation) -> tuple[object, ...]:
    """Cause, hit, limiting groups, which tokens, by which request, in which step."""
    account, why = explanation.account, explanation.why
    return why.cause, account.hit, account.cut_by, (why.start, why.end), why.by, why.seq


NO_STEP = ("", 0)


def test_explain_whole_hit_has_no_cause():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    assert summary(desk.why("aaaabbbbc")) == (Cause.NOTHING, 8, (), (0, 0), *NO_STEP)
    assert summary(desk.why("aaaabbbb")) == (Cause.NOTHING, 4, (), (0, 0), *NO_STEP)


def test_explain_evicted_names_step_and_request():
    desk = Desk()
    desk.serve("old", "aaaabbbbcccc")
    desk.admit("big", "1111222233334444555566667777")  # all but one block; the tail of "old" goes first
    desk.world.now_ns += 5_000_000_000
    explanation = desk.why("aaaabbbbccccd")
    assert summary(explanation) == (Cause.EVICTED, 4, (0,), (4, 8), "big", 3)
    assert desk.world.host.age_ns(explanation.why.at_ns) == 5_000_000_000


def test_explain_left_window_names_the_policy_s_choice():
    """The window of "long" goes before that of "old", which is older; so a prompt that leaves "long" hits less."""
    spec = replica_spec(window(4), full(), num_blocks=23, max_in_flight_tokens=64, eviction=EvictionPolicy.WINDOW_TAIL)
    desk = Desk(spec)
    desk.serve("old", "zzzzyyyyx")
    desk.admit("long", "aaaabbbbccccddddeeeeffff")
    desk.step(Part(facts=Facts(slot=[1], appended=[1], tokens=[ord("g")]), run=Run(slot=[1])))
    desk.admit("big", "o" * 12)
    assert summary(desk.why("aaaabbbb?")) == (Cause.LEFT_WINDOW, 4, (0,), (4, 8), "big", 5)
    assert summary(desk.why("zzzzyyyyx")) == (Cause.NOTHING, 8, (), (0, 0), *NO_STEP)


def test_explain_dropped_by_the_engine():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.step(Part(cache=Cache(evicted=[2])))
    assert summary(desk.why("aaaabbbbc")) == (Cause.DROPPED, 4, (0,), (4, 8), "", 3)


def test_explain_withdrawn_with_its_step():
    desk = Desk()
    desk.admit("a", "aaaabbbbc")
    desk.step(Part(cache=Cache(failed_steps=[1])), executed_through=0)
    assert summary(desk.why("aaaabbbbc")) == (Cause.WITHDRAWN, 0, (0,), (0, 4), "", 2)


def test_explain_tentative_until_its_step_is_executed():
    desk = Desk()
    desk.admit("a", "aaaabbbbc")
    assert summary(desk.why("aaaabbbbc")) == (Cause.TENTATIVE, 0, (0,), (0, 4), "", 1)
    desk.step()
    assert desk.why("aaaabbbbc").why.cause is Cause.NOTHING


def test_explain_reset():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.step(Part(cache=Cache(reset=True)))
    assert summary(desk.why("aaaabbbbc")) == (Cause.RESET, 0, (0,), (0, 4), "", 3)


def test_explain_eviction_before_a_reset_is_evicted():
    desk = Desk()
    desk.serve("old", "aaaabbbbcccc")
    desk.serve("big", "1111222233334444555566667777")
    desk.step(Part(cache=Cache(reset=True)))
    assert summary(desk.why("aaaabbbbccccd")) == (Cause.RESET, 0, (0,), (0, 4), "", 5)
    desk.serve("again", "aaaa")
    assert summary(desk.why("aaaabbbbccccd")) == (Cause.EVICTED, 4, (0,), (4, 8), "big", 3)


def test_explain_engine_life_without_stamps():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.engine = desk.world.open()
    explanation = desk.why("aaaabbbbc")
    assert summary(explanation) == (Cause.WITHOUT_STAMPS, 0, (0,), (0, 4), "", 0)
    assert explanation.why.epoch == desk.engine.opened.epoch


def test_explain_unverified_where_the_memory_has_other_stamps():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.engine = desk.world.open(stamp_table=(0,) * 9)
    explanation = desk.why("aaaabbbbc")
    assert summary(explanation) == (Cause.UNVERIFIED, 0, (0,), (0, 4), "", 0)
    assert explanation.why.epoch == desk.engine.opened.epoch


def test_explain_eviction_before_a_life_without_stamps_names_that_life():
    """In step 1 of life 2 an eviction "in step 3" would read as if it were in the future; and that life dropped
    all keys.
    """
    desk = Desk()
    desk.serve("old", "aaaabbbbcccc")
    desk.serve("big", "1111222233334444555566667777")
    evicted = desk.why("aaaabbbbccccd")
    assert (evicted.why.cause, evicted.why.epoch, evicted.why.seq) == (Cause.EVICTED, desk.engine.opened.epoch, 3)
    desk.engine = desk.world.open()
    desk.admit("late", "aaaabbbbccccd")
    explanation, life = desk.why_request("late"), desk.engine.opened.epoch
    assert (explanation.why.cause, explanation.why.epoch, explanation.why.seq) == (Cause.WITHOUT_STAMPS, life, 0)
    assert (explanation.epoch, explanation.seq) == (life, 1)


def test_explain_eviction_in_an_earlier_life_names_that_life():
    desk = Desk()
    desk.serve("old", "aaaabbbbcccc")
    desk.serve("big", "1111222233334444555566667777")
    desk.step()
    life = desk.engine.opened.epoch
    desk.engine = desk.world.open(stamp_table=tuple(specification_of(desk.world.host.replica).coordinator.pool.stamp))
    explanation = desk.why("aaaabbbbccccd")
    assert (explanation.why.cause, explanation.why.epoch, explanation.why.seq) == (Cause.EVICTED, life, 3)


def test_explain_partial_key_is_found_after_its_block_s_longer_key():
    spec = replica_spec(full(8), full(4, lookup_class=1), num_blocks=40, hash_block_size=4, partial_hits=True)
    desk = Desk(spec)
    desk.serve("a", "aaaabbbbcccc1")  # the prompt's last hash boundary is inside its second block
    assert summary(desk.why("aaaabbbbccccX")) == (Cause.NOTHING, 12, (), (0, 0), *NO_STEP)
    assert summary(desk.why("aaaabbbbXcccX")) == (Cause.DIFFERS, 8, (0,), (8, 12), *NO_STEP)


def test_explain_prompt_below_one_block():
    desk = Desk()
    desk.serve("a", "aaaa")
    assert summary(desk.why("aaaa")) == (Cause.BELOW_ONE_BLOCK, 0, (), (0, 0), *NO_STEP)


def test_explain_never_cached():
    desk = Desk()
    assert summary(desk.why("aaaabbbbc")) == (Cause.NEVER_CACHED, 0, (0,), (0, 4), *NO_STEP)
    desk.serve("a", "aaaabbbbc")
    assert summary(desk.why("aaaabbbbccccd")) == (Cause.NEVER_CACHED, 8, (0,), (8, 12), *NO_STEP)


def test_explain_different_tokens_names_the_position():
    desk = Desk(replace(FULL, num_blocks=40))
    desk.serve("a", "aaaabbbbccccdddde")
    desk.serve("b", "aaaaxxxxyyyyz")
    assert summary(desk.why("aaaabbbbCcccddddeeee")) == (Cause.DIFFERS, 8, (0,), (8, 12), *NO_STEP)
    assert summary(desk.why("Xaaabbbbc")) == (Cause.DIFFERS, 0, (0,), (0, 4), *NO_STEP)


def test_explain_cached_in_another_domain():
    desk = Desk()
    desk.serve("a", "aaaabbbbc", domain="tenant-1")
    assert summary(desk.why("aaaabbbbc", domain="tenant-2")) == (Cause.OTHER_DOMAIN, 0, (0,), (0, 4), "tenant-1", 0)


def test_explain_other_salt_does_not_return_the_salt():
    desk = Desk()
    desk.serve("a", "aaaabbbbc", extra_keys=ExtraKeys(salt="secret"))
    explanation = desk.why("aaaabbbbc", keys=ExtraKeys(salt="mine"))
    assert summary(explanation) == (Cause.OTHER_SALT, 0, (0,), (0, 4), *NO_STEP)
    assert "secret" not in repr(explanation)


def test_explain_uncomputed_content_is_never_cached():
    desk = Desk(replace(FULL, num_blocks=40))
    slot = desk._slots["long"] = 0
    part = desk.admission("long", "aaaabbbbccccdddde", domain="tenant-1")
    part.admit.cap = [4]
    desk.step(part)
    assert summary(desk.why("aaaabbbbc", domain="tenant-1")) == (Cause.TENTATIVE, 0, (0,), (0, 4), "", 1)
    desk.step()
    assert summary(desk.why("aaaabbbbcccc", domain="tenant-1")) == (Cause.NEVER_CACHED, 4, (0,), (4, 8), *NO_STEP)
    desk.serve("other", "aaaac", domain="tenant-2")
    assert summary(desk.why("aaaabbbbcccc", domain="tenant-2")) == (Cause.NEVER_CACHED, 4, (0,), (4, 8), *NO_STEP)
    desk.step(Part(run=Run(slot=[slot])))
    desk.step()
    assert summary(desk.why("aaaabbbbcccc", domain="tenant-2")) == (Cause.OTHER_DOMAIN, 4, (0,), (4, 8), "tenant-1", 0)


def test_explain_state_between_two_chunks_was_computed():
    desk = Desk(replica_spec(state(), num_blocks=60, **SPARSE))
    slot = desk._slots["long"] = 0
    part = desk.admission("long", "aaaabbbbccccdddde")
    part.admit.cap = [4]
    desk.step(part)
    desk.step()
    assert summary(desk.why("aaaabbbbX")) == (Cause.NEVER_CACHED, 0, (0,), (4, 8), *NO_STEP)
    desk.step(Part(run=Run(slot=[slot])))
    desk.step()
    assert summary(desk.why("aaaabbbbX")) == (Cause.NO_STATE_AT_BOUNDARY, 0, (0,), (4, 8), *NO_STEP)


def test_explain_cached_with_another_adapter():
    desk = Desk()
    desk.serve("a", "aaaabbbbc", extra_keys=ExtraKeys(lora=("sql", "path")))
    assert summary(desk.why("aaaabbbbc")) == (Cause.OTHER_LORA, 0, (0,), (0, 4), "sql", 0)


def test_explain_cached_with_another_image():
    desk = Desk(replace(FULL, num_blocks=40))
    picture = ExtraKeys(multimodal=(Multimodal("cat", 4, 4),))
    desk.serve("a", "aaaabbbbccccd", extra_keys=picture)
    other = ExtraKeys(multimodal=(Multimodal("dog", 4, 4),))
    assert summary(desk.why("aaaabbbbccccd", keys=other)) == (Cause.OTHER_MULTIMODAL, 4, (0,), (4, 8), *NO_STEP)


def test_explain_block_that_only_a_tier_has(monkeypatch):
    monkeypatch.setenv("KVPLANE_CORE", "python")  # which the test writes to
    spec = replace(FULL, num_blocks=40, tiers=(TierSpec(TierKind.HOST, 9), TierSpec(TierKind.DISK, 9)))
    desk = Desk(spec)
    desk.serve("a", "aaaab")
    host, disk = (tiers := specification_of(desk.world.host.replica).coordinator.tiers).each
    for tier, text in ((disk, "aaaa"), (host, "aaaabbbb"), (disk, "aaaabbbb")):
        slot = tier.take_slot()
        assert slot is not None
        tier.store(("", 0, digests(spec, text)[-1]), slot, tiers.next_job())
    assert summary(desk.why("aaaabbbbc")) == (Cause.IN_TIER, 4, (0,), (4, 8), "host", 0)
    desk.step(Part(cache=Cache(evicted=[1])))  # and with its key, what the tiers have of it
    assert summary(desk.why("aaaabbbbc"))[0] is Cause.DROPPED


def test_explain_block_that_a_canary_found_wrong():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.step(Part(cache=Cache(evicted=[2, 1], mismatched=[2], hits_checked=1)))
    desk.serve("first", "aaaac")
    assert summary(desk.why("aaaabbbbc")) == (Cause.MISMATCH, 4, (0,), (4, 8), "", 3)


@pytest.mark.parametrize(
    ("cause", "times"),
    [(Cause.TOO_SLOW, (900, 800)), (Cause.NO_JOB, (0, 0)), (Cause.WAITS, (0, 0)), (Cause.GIVEN_UP, (0, 0))],
)
def test_explain_hit_of_a_tier_that_is_not_loaded(cause, times, monkeypatch):
    monkeypatch.setenv("KVPLANE_CORE", "python")  # which the test writes to
    desk = Desk(replace(FULL, num_blocks=40, tiers=(TierSpec(TierKind.HOST, 9), TierSpec(TierKind.DISK, 9))))
    desk.serve("a", "aaaab")
    tiers = specification_of(desk.world.host.replica).coordinator.tiers
    for text in ("aaaabbbb", "aaaabbbbcccc"):
        slot = tiers.each[1].take_slot()
        assert slot is not None
        tiers.each[1].store(("", 0, digests(desk.world.host.replica.spec, text)[-1]), slot, tiers.next_job())
    if cause is Cause.TOO_SLOW:
        desk.step(Part(cache=Cache(costs_ns=[100, 1, 450])))
    if cause is Cause.NO_JOB:
        monkeypatch.setattr(loads, "MAX_JOBS", 0)
    if cause in (Cause.WAITS, Cause.GIVEN_UP):
        desk.admit("b", "aaaabbbbccccx", flags=RowFlag.LOAD)
    if cause is Cause.GIVEN_UP:
        desk.free("b", end=End.PREEMPTED)
    desk.admit("c", "aaaabbbbccccd", flags=RowFlag.LOAD)
    why = desk.why_request("c").why
    assert (why.cause, why.start, why.end, why.by) == (cause, 4, 12, "disk")
    assert (why.load_ns, why.compute_ns) == times


def test_explain_window_outside_the_retention():
    desk = Desk(replica_spec(full(), window(8), num_blocks=60, **SPARSE))
    desk.serve("a", "aaaabbbbccccddddeeeeffffg")
    explanation = desk.why("aaaabbbbccccdX")  # its window ends at 12; the one kept ends at 24
    assert summary(explanation) == (Cause.WINDOW_NOT_RESIDENT, 0, (1,), (4, 8), *NO_STEP)
    assert explanation.account.alone == (12, 0)
    assert explanation.account.wanted == 12


def test_explain_chunked_attention_needs_only_its_chunk():
    desk = Desk(replica_spec(full(), chunked(8), num_blocks=60))
    desk.serve("a", "aaaabbbbccccd")
    desk.step(Part(cache=Cache(evicted=[5])))  # of the chunk before
    assert summary(desk.why("aaaabbbbccccd"))[:2] == (Cause.NOTHING, 12)
    desk.step(Part(cache=Cache(evicted=[7])))
    assert summary(desk.why("aaaabbbbccccd")) == (Cause.DROPPED, 8, (1,), (8, 12), "", 4)


def test_explain_state_outside_the_retention():
    desk = Desk(replica_spec(full(), state(), num_blocks=60, **SPARSE))
    desk.serve("a", "aaaabbbbccccddddeeee")
    explanation = desk.why("aaaabbbbccX")
    assert summary(explanation) == (Cause.NO_STATE_AT_BOUNDARY, 0, (1,), (4, 8), *NO_STEP)
    assert explanation.account.alone == (8, 0)


def test_explain_block_dropped_for_drafts():
    desk = Desk(replica_spec(full(), full(is_draft=True, drops_last_block=True, lookup_class=1), num_blocks=60))
    desk.serve("a", "aaaabbbbccccd")
    explanation = desk.why("aaaabbbbccccd")
    assert summary(explanation) == (Cause.LAST_BLOCK_DROPPED, 8, (1,), (0, 0), *NO_STEP)


def test_explain_caching_is_off():
    desk = Desk(replace(FULL, enable_caching=False))
    desk.serve("a", "aaaabbbbc")
    assert summary(desk.why("aaaabbbbc"))[0] is Cause.CACHING_OFF


def test_explain_beyond_the_log_is_not_recorded():
    desk = Desk(config=Config(decision_log_steps=2))
    desk.serve("old", "aaaabbbbcccc")
    desk.serve("big", "1111222233334444555566667777")
    desk.step()
    desk.step()
    explanation = desk.why("aaaabbbbccccd")
    assert summary(explanation) == (Cause.NOT_RECORDED, 4, (0,), (4, 8), *NO_STEP)
    assert not explanation.is_complete


def test_explain_without_events_is_not_recorded():
    desk = Desk(replace(FULL, events=False))
    assert desk.why("aaaabbbbc").why.cause is Cause.NOT_RECORDED


# ---- requests, as the cache was when they were admitted


def test_explain_request_uses_the_cache_at_its_admission():
    desk = Desk()
    desk.serve("old", "aaaabbbbcccc")
    desk.serve("big", "1111222233334444555566667777")
    desk.admit("late", "aaaabbbbccccd")
    desk.free("late")
    desk.serve("other", "9999888877776666555544443333")  # what happens later is no part of it
    explanation = desk.why_request("late")
    assert summary(explanation) == (Cause.EVICTED, 4, (0,), (4, 8), "big", 3)
    assert (explanation.status, explanation.seq) == (AdmitStatus.GRANTED, 5)


def test_explain_first_request_is_never_cached():
    desk = Desk()
    desk.serve("first", "aaaabbbbc")
    desk.serve("second", "aaaabbbbc")
    assert summary(desk.why_request("first")) == (Cause.NEVER_CACHED, 0, (0,), (0, 4), *NO_STEP)
    assert summary(desk.why_request("second")) == (Cause.NOTHING, 8, (), (0, 0), *NO_STEP)


def test_explain_request_of_another_salt_is_not_different_tokens():
    """The log knows hashes alone: equal tokens under two salts look as different as other tokens."""
    desk = Desk(replace(FULL, num_blocks=40))
    desk.serve("first", "aaaabbbbc")
    desk.serve("salted", "aaaabbbbc", extra_keys=ExtraKeys(salt="secret"))
    assert summary(desk.why_request("salted")) == (Cause.NEVER_CACHED, 0, (0,), (0, 4), *NO_STEP)
    desk.serve("again", "aaaaXbbbc", extra_keys=ExtraKeys(salt="secret"))
    assert summary(desk.why_request("again")) == (Cause.DIFFERS, 4, (0,), (4, 8), *NO_STEP)


def test_explain_two_requests_of_one_step():
    desk = Desk(replace(FULL, num_blocks=40))
    text = [ord(letter) for letter in "aaaabbbbc"]
    news = News(slot=[0, 1], num_tokens=[9, 9], tokens=text * 2, request_id=["one", "two"])
    desk.step(Part(news=news, admit=Admit(slot=[0, 1])))
    assert summary(desk.why_request("one"))[:2] == (Cause.NEVER_CACHED, 0)
    assert summary(desk.why_request("two"))[:2] == (Cause.NOTHING, 8)


def test_explain_request_whose_image_has_no_identifier():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.admit("b", "aaaabbbbc", extra_keys=ExtraKeys(multimodal=(Multimodal("", 4, 4),)))
    assert summary(desk.why_request("b")) == (Cause.UNPROVEN_KEYS, 0, (), (0, 0), *NO_STEP)


def test_explain_request_with_skip_reading():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.serve("b", "aaaabbbbc", skip_reading=1)
    assert summary(desk.why_request("b"))[:2] == (Cause.NOT_READ, 0)


def test_explain_refused_request():
    desk = Desk()
    desk.admit("big", "111122223333444455556666")
    desk.admit("b", "aaaabbbbccccd")
    explanation = desk.why_request("b")
    assert explanation.status is AdmitStatus.REFUSED
    assert explanation.why.cause is Cause.DIFFERS
    assert explanation.needed > explanation.free


def test_explain_request_older_than_the_log():
    desk = Desk(config=Config(decision_log_steps=2))
    desk.serve("old", "aaaabbbbcccc")
    desk.step(Part(cache=Cache(evicted=[2])))
    desk.step()
    desk.admit("late", "aaaabbbbccccd")
    assert summary(desk.why_request("late"))[:2] == (Cause.NOT_RECORDED, 4)


def test_explain_unrecorded_request_is_not_found():
    desk = Desk()
    with pytest.raises(NotFound, match="no attempt to admit the request 'unknown'"):
        desk.why_request("unknown")


@pytest.mark.parametrize("commit", CommitRule)
def test_explain_prompt_equals_the_lookup(commit):
    desk = Desk(replica_spec(full(), window(8), state(), num_blocks=30, commit=commit, **SPARSE))
    for number, text in enumerate(["aaaabbbbccccddddeeee", "aaaabbbbXXXXddddeeee", "aaaabbbbccccddddffffgggg"] * 4):
        desk.admit(f"{number}", text)
        for question in ("aaaabbbbccccddddeeeef", "aaaabbbbXXXXd", "aaaab"):
            found = desk.why(question)
            news = News(slot=[0], num_tokens=[len(question)], tokens=[ord(letter) for letter in question])
            replica = desk.world.host.replica
            hit = replica.lookup(replica.digests_of(news), "", len(question))
            assert found.account.hit == hit.num_tokens
        desk.free(f"{number}")
    for number in range(12):
        assert desk.why_request(f"{number}").why.cause is not Cause.NOT_RECORDED


def test_explain_tests_produce_every_cause():
    assert set(Cause) == SEEN


# ---- over the wire


def test_explain_over_the_wire():
    with running() as service:
        service.register()
        stream: Stream = service.open()
        tokens = column(*[7] * 40)
        news = {"slot": column(0), "num_tokens": column(40), "tokens": tokens, "request_id": ["first"]}
        stream.step({"news": news, "admit": {"slot": column(0)}})
        stream.step()
        ask = pb.ExplainRequest(replica="r", content=RequestContent(token_ids=[7] * 40 + [1] * 20))
        answer = service.admin.Explain(ask)
        assert (answer.num_tokens, answer.hit_tokens, answer.longest_hit) == (60, 32, 48)
        assert [group.hit_tokens for group in answer.groups] == [32, 32]
        assert (answer.cause, answer.start, answer.end) == (pb.MISS_CAUSE_NEVER_CACHED, 32, 48)
        answer = service.admin.Explain(pb.ExplainRequest(replica="r", request_id="first"))
        assert (answer.cause, answer.admit_status, answer.admit_seq) == (pb.MISS_CAUSE_NEVER_CACHED, 1, 1)
        assert answer.log_is_complete


def test_explain_contract_names_every_cause():
    names = {name.removeprefix("MISS_CAUSE_").lower() for name in pb.MissCause.keys()} - {"unspecified"}  # noqa: SIM118
    assert names == {cause.value for cause in Cause}
