"""Unary calls: the operations of a step one at a time, by the names of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvplane.base.errors import (
    FailedPrecondition,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    OpIdReused,
    OtherWriter,
)
from kvplane.base.requests import Ending
from kvplane.base.step import CacheEvent, ExtraKeys, RowFlag
from kvplane_service.config import Config
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.runtime.executors import Executor
from kvplane_service.unary.calls import (
    AllocateCall,
    AllocationStatus,
    Appended,
    CallHeader,
    CommitCall,
    Content,
    EvictCall,
    FreeCall,
    ResetCall,
    UnaryCall,
)
from kvplane_service.unary.fields import unary_field
from kvplane_service.unary.hashing import ContentHasher, hash_tokens
from kvplane_service.unary.service import UnaryCalls
from tests.core.specification import specification_of
from tests.service.hosts import HostWorld, spec_of

NOW = UnaryStep()
PROMPT = list(range(40))


class World(HostWorld):
    def __init__(self, config: Config | None = None, num_blocks: int = 21) -> None:
        super().__init__(config, spec_of(num_blocks))
        self.calls = UnaryCalls(self.host, self.config, ContentHasher(self.config), Executor("long calls"))

    def content(self, tokens, **fields) -> Content:
        hashed = hash_tokens(self.host.scheme, tokens, fields.get("extra_keys", ExtraKeys()), None)
        return Content(len(tokens), hashed.hashes, len(hashed.hashes) // 32, hashed.tail, **fields)

    def appended(self, name: str, tokens) -> Appended:
        return asyncio.run(self.calls.hash_appended(name, Appended(len(tokens), token_ids=tokens)))

    def do(self, call: UnaryCall[Any], op_id: str, fingerprint: bytes = b"f") -> bytes:
        header = CallHeader(NOW, op_id, fingerprint)
        return asyncio.run(self.calls.do(header, call, encode))

    def apply(self, call: UnaryCall[Any], at: UnaryStep = NOW) -> Any:
        """The answer of a prepared call."""
        answers = list[Any]()

        def keep(answer: object) -> bytes:
            answers.append(answer)
            return b""

        async def apply() -> None:
            self.host.check_unary(at)
            if self.host.has_left:
                await self.host.begin_unary()
            await self.calls.apply(CallHeader(at), call, keep)

        asyncio.run(apply())
        return answers[0]

    def allocate(self, name: str, tokens=None, **fields):
        content = None if tokens is None else self.content(tokens)
        return self.apply(AllocateCall(name, content, **fields))

    def decode(self, name: str, tokens, **fields):
        return self.apply(AllocateCall(name, appended=self.appended(name, tokens), **fields))


def encode(answer: object) -> bytes:
    return repr(answer).encode()


@pytest.fixture
def world():
    return World()


class TestAllocating:
    def test_a_new_request_gets_blocks_for_its_prompt(self, world):
        answer = world.allocate("a", PROMPT)
        assert (answer.status, answer.hit, answer.granted) == (AllocationStatus.GRANTED, 0, 40)
        assert [len(ids) for ids in answer.new_blocks] == [3]
        assert answer.table == answer.new_blocks
        assert (answer.hashes.count, len(answer.hashes.last)) == (2, 32)
        assert (answer.step.seq, answer.step.parts[0].free_blocks) == (1, 17)

    def test_an_equal_prompt_hits_once_the_first_was_executed(self, world):
        first = world.allocate("a", PROMPT)
        second = world.allocate("b", PROMPT)
        assert (second.hit, second.granted) == (32, 8)
        assert second.table[0][:2] == first.table[0][:2]

    def test_a_running_request_continues(self, world):
        world.allocate("a", PROMPT)
        answer = world.decode("a", range(9))
        assert (answer.status, answer.granted, answer.hashes.count) == (AllocationStatus.GRANTED, 9, 3)
        assert (len(answer.new_blocks[0]), len(answer.table[0])) == (1, 4)

    def test_hashes_of_appended_tokens_continue_those_of_the_prompt(self, world):
        world.allocate("a", PROMPT)
        world.decode("a", range(40, 64))
        assert world.allocate("b", list(range(64))).hashes.last == world.apply(CommitCall("a")).hashes.last

    def test_computed_tokens_decrease_after_rejected_drafts(self, world):
        world.allocate("a", PROMPT)
        world.decode("a", [1], extra=4, lookahead=4)
        answer = world.decode("a", [2], computed=41)
        assert (answer.status, answer.granted) == (AllocationStatus.GRANTED, 1)

    def test_allocate_slots_without_uncomputed_tokens_has_nothing_to_do(self, world):
        world.allocate("a", PROMPT)
        assert world.allocate("a").status is AllocationStatus.NOTHING_TO_DO
        assert world.decode("a", [1], cap=0).status is AllocationStatus.NOTHING_TO_DO
        assert world.allocate("b", PROMPT, cap=0).status is AllocationStatus.NOTHING_TO_DO

    def test_a_refusal_allocates_nothing_and_can_be_repeated(self, world):
        world.allocate("a", list(range(16 * 18)))
        free = world.host.replica.free_blocks
        refused = world.allocate("b", list(range(1000, 1048)))
        assert (refused.status, refused.granted, refused.new_blocks, refused.table) == (
            AllocationStatus.REFUSED,
            0,
            [[]],
            [[]],
        )
        assert world.host.replica.free_blocks == free
        refused = world.allocate("b")
        assert (refused.status, refused.needed) == (AllocationStatus.REFUSED, free + 1)
        world.apply(FreeCall("a"))
        assert world.allocate("b", list(range(1000, 1048))).status is AllocationStatus.GRANTED

    def test_a_refused_running_request_says_what_it_needs(self, world):
        world.allocate("a", list(range(16 * 10)))
        world.allocate("b", list(range(1000, 1000 + 16 * 6)))
        free = world.host.replica.free_blocks
        refused = world.decode("b", list(range(16 * free + 1)))
        assert (refused.status, refused.needed) == (AllocationStatus.REFUSED, free + 1)
        world.apply(FreeCall("a"))
        granted = world.allocate("b")
        assert (granted.status, granted.needed) == (AllocationStatus.GRANTED, 0)

    def test_a_request_larger_than_the_pool_never_fits(self, world):
        assert world.allocate("a", list(range(16 * 21))).status is AllocationStatus.NEVER_FITS

    def test_a_changed_expected_hit_is_stale(self, world):
        answer = world.allocate("a", PROMPT, expected_hit=16)
        assert (answer.status, answer.hit) == (AllocationStatus.STALE_HIT, 0)

    def test_victims_make_room_for_a_running_request_in_their_order(self, world):
        for name, start in (("a", 0), ("b", 1000), ("c", 2000)):
            world.allocate(name, list(range(start, start + 96)))
        answer = world.decode("a", range(5000, 5096), victims=("c", "b"))
        assert (answer.status, answer.preempted) == (AllocationStatus.GRANTED, ["c"])
        assert world.allocate("c").status is AllocationStatus.REFUSED  # it waits, with its tokens

    def test_without_victims_a_running_request_is_refused(self, world):
        for name, start in (("a", 0), ("b", 1000), ("c", 2000)):
            world.allocate(name, list(range(start, start + 96)))
        assert world.decode("a", range(5000, 5096)).status is AllocationStatus.REFUSED

    def test_a_request_can_be_its_own_victim(self, world):
        world.allocate("a", list(range(160)))
        world.allocate("b", list(range(1000, 1160)))
        answer = world.decode("a", range(5000, 5200), victims=("a",))
        assert (answer.status, answer.preempted, answer.table) == (AllocationStatus.REFUSED, ["a"], [[]])

    def test_delayed_keys_are_registered_by_a_commit(self, world):
        answer = world.allocate("a", PROMPT, flags=RowFlag.DELAY_CACHING)
        assert answer.step.parts[0].events == []
        step = world.apply(CommitCall("a", commit=40)).step
        assert isinstance(step.parts[0].events[0], CacheEvent)

    def test_requests_with_hashes_continue_with_hashes(self, world):
        digests = world.content(list(range(48))).hashes
        world.apply(AllocateCall("a", Content(40, digests[:64], 2)))
        answer = world.apply(AllocateCall("a", appended=Appended(8, digests[64:], 1)))
        assert (answer.granted, answer.hashes.last) == (8, digests[64:])


class TestRefusals:
    def test_an_unknown_request_without_content_is_refused(self, world):
        with world.refuses(NotFound, "'a'", "request_id"):
            world.allocate("a")

    def test_a_running_request_takes_no_new_content(self, world):
        world.allocate("a", PROMPT)
        with world.refuses(InvalidArgument, "running", "content"):
            world.allocate("a", PROMPT)

    @pytest.mark.parametrize("name", ["", "x" * 129])
    def test_request_name_length_is_limited(self, world, name):
        with world.refuses(InvalidArgument, field="request_id"):
            world.allocate(name, PROMPT)

    def test_known_requests_are_limited(self):
        world = World(Config(max_requests=1))
        world.allocate("a", PROMPT)
        with world.refuses(LimitExceeded, "max_requests"):
            world.allocate("b", PROMPT)
        world.apply(FreeCall("a"))
        world.allocate("b", PROMPT)

    def test_a_held_request_cannot_be_allocated_before_its_release(self, world):
        world.allocate("a", PROMPT)
        world.apply(FreeCall("a", Ending.HELD, 0))
        with world.refuses(FailedPrecondition, "held", "request_id"):
            world.allocate("a")

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"lookahead": 5000}, "lookahead_tokens"),
            ({"external": 2**20}, "external_tokens"),
            ({"reserved": 22}, "reserved_blocks"),
            ({"expected_hit": 2**20}, "expected_hit_tokens"),
            ({"extra": 2**31}, "extra_tokens"),
        ],
    )
    def test_refusals_name_the_field_of_the_call(self, world, fields, field):
        with world.refuses(InvalidArgument, field=field):
            world.allocate("a", PROMPT, **fields)

    def test_content_beyond_max_model_len_is_refused_by_field(self, world):
        with world.refuses(InvalidArgument, "512", "content.num_tokens"):
            world.allocate("a", list(range(513)))

    def test_an_unknown_victim_is_named(self, world):
        world.allocate("a", PROMPT)
        with world.refuses(NotFound, field="victims[1]"):
            world.decode("a", [1], victims=("a", "unknown"))

    def test_a_new_request_has_nothing_appended_or_computed(self, world):
        content = world.content(PROMPT)
        with world.refuses(InvalidArgument, field="appended"):
            world.apply(AllocateCall("a", content, appended=Appended(3)))
        with world.refuses(InvalidArgument, field="computed_tokens"):
            world.apply(AllocateCall("a", content, computed=3))

    def test_tokens_hashed_for_an_older_state_are_refused(self, world):
        world.allocate("a", PROMPT)
        early = world.appended("a", [1])
        world.decode("a", [2])
        with world.refuses(FailedPrecondition, "changed while"):
            world.apply(AllocateCall("a", appended=early))

    def test_a_commit_without_a_request_is_refused(self, world):
        with world.refuses(InvalidArgument, field="request_id"):
            world.apply(CommitCall(commit=5))

    def test_a_release_with_a_fence_is_refused(self, world):
        world.allocate("a", PROMPT)
        world.apply(FreeCall("a", Ending.HELD, 0))
        with world.refuses(InvalidArgument, field="fence_seq"):
            world.apply(FreeCall("a", Ending.RELEASED, 1))

    def test_a_fence_beyond_the_sent_steps_is_refused(self, world):
        world.allocate("a", PROMPT)
        with world.refuses(InvalidArgument, field="fence_seq"):
            world.apply(FreeCall("a", Ending.FREE, 9))

    @pytest.mark.parametrize("block", [0, 21, 2**32 - 1])
    def test_a_block_outside_of_the_pool_is_refused_by_index(self, world, block):
        with world.refuses(InvalidArgument, field="block_ids[1]"):
            world.apply(EvictCall((1, block)))


class TestEnding:
    def test_a_freed_request_is_forgotten_and_its_blocks_return(self, world):
        world.allocate("a", PROMPT)
        assert world.apply(FreeCall("a")).parts[0].free_blocks == 20
        with world.refuses(NotFound):
            world.apply(FreeCall("a"))

    def test_a_fence_keeps_the_blocks_until_its_step_was_executed(self, world):
        world.allocate("a", PROMPT)
        free = [
            world.apply(FreeCall("a", Ending.FREE, 1), UnaryStep(executed_through=0)).parts[0].free_blocks,
            world.apply(CommitCall(), UnaryStep(executed_through=1)).step.parts[0].free_blocks,
        ]
        assert free == [17, 20]

    def test_held_blocks_stay_until_they_are_released(self, world):
        world.allocate("a", PROMPT)
        assert world.apply(FreeCall("a", Ending.HELD, 0)).parts[0].free_blocks == 17
        assert world.apply(FreeCall("a", Ending.RELEASED, 0)).parts[0].free_blocks == 20

    def test_a_finished_load_does_not_end_the_request(self, world):
        world.allocate("a", PROMPT, external=16, cap=0, flags=RowFlag.DELAY_CACHING)
        world.apply(FreeCall("a", Ending.RELEASED, 0))
        assert world.allocate("a").granted == 24

    def test_a_preempted_request_keeps_its_tokens(self, world):
        world.allocate("a", PROMPT)
        world.apply(FreeCall("a", Ending.PREEMPTED, 0))
        answer = world.allocate("a")
        assert (answer.hit, answer.granted) == (32, 8)

    def test_a_waiting_request_may_be_sent_again(self, world):
        world.allocate("a", PROMPT)
        world.apply(FreeCall("a", Ending.PREEMPTED, 0))
        answer = world.allocate("a", list(range(100, 120)))
        assert (answer.granted, answer.hashes.count) == (20, 1)
        assert world.decode("a", [1] * 12).hashes.count == 2

    def test_content_does_not_end_the_load_of_a_preempted_request(self):
        world, loads, again = World(num_blocks=9), list(range(100, 150)), list(range(300, 340))
        pages = world.allocate("a", loads, external=32, cap=0, flags=RowFlag.DELAY_CACHING).table[0]
        world.allocate("b", list(range(200, 260)))
        assert world.decode("b", range(100), victims=["a"]).preempted == ["a"]
        for content in (None, loads, again):
            answer = world.allocate("a", content)
            assert (answer.status, answer.table, answer.hashes.count) == (AllocationStatus.DEFERRED, [[]], 3)
            assert not set(pages) & set(specification_of(world.host.replica).coordinator.pool.free)
        world.apply(FreeCall("a", Ending.RELEASED, 0))
        answer = world.allocate("a", again)
        assert (answer.status, answer.granted, answer.hashes.count) == (AllocationStatus.GRANTED, 40, 2)
        assert world.decode("a", [1] * 8).hashes.count == 3

    def test_slots_of_ended_requests_are_reused(self, world):
        for name in "abc":
            world.allocate(name, [1])
        world.apply(FreeCall("b"))
        world.allocate("d", [1])
        assert world.host.replica.requests.slots() == [0, 1, 2]

    def test_evicted_keys_are_not_found_again(self, world):
        blocks = world.allocate("a", PROMPT).table[0]
        world.apply(EvictCall(tuple(blocks[:1])))
        assert world.allocate("b", PROMPT).hit == 0

    def test_a_reset_with_running_requests_is_not_done(self, world):
        world.allocate("a", PROMPT)
        assert not world.apply(ResetCall()).parts[0].reset_done
        world.apply(FreeCall("a"))
        assert world.apply(ResetCall()).parts[0].reset_done
        assert world.allocate("a", PROMPT).hit == 0


class TestIdempotency:
    def test_a_repeated_op_id_gets_the_first_answer_and_changes_nothing(self, world):
        first = world.do(AllocateCall("a", world.content(PROMPT)), "op")
        before = world.digest
        assert world.do(AllocateCall("a", world.content(PROMPT)), "op") == first
        assert world.digest == before

    def test_an_empty_op_id_applies_each_call(self, world):
        first = world.do(CommitCall(), "")
        assert world.do(CommitCall(), "") != first

    def test_a_reused_op_id_is_refused_before_its_tokens_are_hashed(self, world):
        world.do(CommitCall(), "op")
        unknown = CommitCall("no such request", appended=Appended(1, token_ids=[1]))  # hashing would raise NotFound
        with world.refuses(OpIdReused, field="header.op_id"):
            world.do(unknown, "op", b"other content")

    def test_a_refused_call_keeps_no_answer(self, world):
        with world.refuses(NotFound):
            world.do(FreeCall("a"), "op")
        world.allocate("a", PROMPT)
        assert b"seq=2" in world.do(FreeCall("a"), "op")

    def test_a_call_is_applied_once_when_its_repeat_arrives_while_it_is_hashed(self):
        world = World(Config(hash_inline_tokens=0))  # every content is hashed on a thread

        async def both() -> list[bytes]:
            call = AllocateCall("a", Content(len(PROMPT), b"", 0, token_ids=PROMPT))
            header = CallHeader(NOW, "op", b"f")
            return await asyncio.gather(*(world.calls.do(header, call, encode) for _ in range(2)))

        first, second = asyncio.run(both())
        assert first == second
        assert world.host.seq == 1


class TestEngineLives:
    def test_a_session_ends_what_unary_calls_began(self, world):
        world.allocate("a", PROMPT)
        engine = world.open()
        with world.refuses(OtherWriter):
            world.allocate("b", PROMPT)
        world.host.close(engine.nonce)
        with pytest.raises(NotFound):
            world.appended("a", [1])
        answer = world.allocate("a", PROMPT)
        assert (answer.hit, answer.step.seq) == (0, 1)
        assert world.host.epoch == engine.opened.epoch + 1

    def test_stored_answers_end_with_their_engine_life(self, world):
        first = world.do(AllocateCall("a", world.content(PROMPT)), "op")
        world.host.close(world.open().nonce)
        assert world.do(AllocateCall("a", world.content(PROMPT)), "op") != first


def test_columns_of_a_step_have_names_in_a_call():
    assert unary_field("parts[0].cache.evicted[3]") == "block_ids[3]"
    assert unary_field("parts[0].admit.external") == "external_tokens"
    assert unary_field("parts[1].facts.computed[0]") == "computed_tokens"
    assert unary_field("executed_through") == "header.executed_through"
    assert unary_field("content.extra_keys.salt") == "content.extra_keys.salt"
    assert unary_field("") == ""
