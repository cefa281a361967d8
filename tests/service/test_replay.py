"""The replay engine: its steps, its use of the answers, and counters equal to those of the service."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvplane.base.errors import InternalError
from kvplane.base.step import Admit, AdmitStatus, Part, PartResult, StepResult
from kvplane.scheduling import MAX_IDLE_STEPS
from kvplane_tools.replay.engine import NEVER_FITS, TOO_LONG, Engine
from kvplane_tools.replay.plan import CostModel, EngineConfig, Routing
from kvplane_tools.replay.workloads import ChatShape, TraceRequest, chat_workload
from tests.service.replaying import BUDGET, COST, SPECS, answer, begin, request, run, text

NS = 1_000_000_000
PER_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def chats(sessions: int = 25, hurry: float = 20.0) -> list[TraceRequest]:
    """The built-in workload, with `hurry` times less between arrivals."""
    shape = ChatShape(max_model_len=1024, num_sessions=sessions, sessions_per_s=10.0)
    return [replace(each, arrival_s=each.arrival_s / hurry) for each in chat_workload(Random(3), shape)]


def small(spec, num_blocks):
    return replace(spec, num_blocks=num_blocks)


# A pool in which each of the SPECS is short of blocks for `chats()`.
TIGHT = {"full": 130, "sliding": 160, "seven groups": 480, "mamba": 110}


@pytest.fixture(params=SPECS.keys())
def tight(request):
    return small(SPECS[request.param], TIGHT[request.param])


# ---- what every replay must do


@PER_SPEC
def test_replay_completes_every_request_with_a_large_pool(spec):
    trace = chats()
    outcome = run(trace, spec)
    tally = outcome.engine.tally
    assert outcome.engine.completed == len(trace)
    assert tally.prompt_tokens == sum(len(each.prompt) for each in trace)
    assert tally.generated_tokens == sum(each.output_tokens for each in trace)
    assert tally.preempted == 0
    assert tally.hit_tokens > 0


def test_replay_completes_every_request_with_a_small_pool(tight):
    trace = chats()
    outcome = run(trace, tight)
    assert outcome.engine.completed == len(trace)
    assert outcome.engine.tally.preempted > 0
    assert outcome.engine.tally.resumed == outcome.engine.tally.preempted
    assert sum(outcome.engine.tally.evicted_blocks) > 0


def test_replay_counts_of_engine_and_service_are_equal(tight):
    outcome = run(chats(), tight)
    tally, counters, groups = outcome.engine.tally, outcome.replica.counters, outcome.replica.group_counters()
    for name in ("admitted", "ended", "preempted", "refused", "queried_tokens", "hit_tokens", "granted_tokens"):
        assert getattr(tally, name) == getattr(counters, name), name
    for name in ("allocated_blocks", "hit_blocks", "evicted_blocks"):
        assert getattr(tally, name) == [getattr(group, name) for group in groups], name


def test_replay_is_deterministic(tight):
    first, second = run(chats(), tight), run(chats(), tight)
    assert first.engine.tally == second.engine.tally
    assert first.engine.clock_ns == second.engine.clock_ns > 0
    assert first.digests() == second.digests()


def test_replay_computes_every_token_once_unless_hit_or_preempted():
    outcome = run(chats(), SPECS["full"])
    tally = outcome.engine.tally
    # The last token of a request is generated and never computed.
    assert tally.granted_tokens == tally.prompt_tokens - tally.hit_tokens + tally.generated_tokens - tally.ended


def test_replay_respects_budgets_and_max_running(tight):
    outcome = run(chats(), tight, EngineConfig(max_running=6, token_budget=100, admit_rows=3))
    (session,) = outcome.sessions
    for part, result in zip(session.parts, session.answers, strict=True):
        (part_result,) = result.parts
        assert sum(part_result.granted) + sum(part_result.admit_granted) <= 100
        assert len(part.run.slot) <= 6
        assert len(part.admit.slot) <= 3
        assert not part.admit.slot or len(part.run.slot) + part_result.admit_status.count(AdmitStatus.GRANTED) <= 6


def test_replay_slots_are_dense_and_reused():
    outcome = run(chats(), SPECS["full"], EngineConfig(max_running=6, token_budget=BUDGET, admit_rows=3))
    (session,) = outcome.sessions
    slots = [slot for part in session.parts for slot in part.news.slot]
    assert len(slots) == outcome.engine.completed
    assert max(slots) < 6 + 3 + 3  # running, announced, ended and not reported yet


# ---- hits


def test_replay_of_a_repeated_prompt_hits_all_but_its_last_block():
    same = text(1, 100)
    outcome = run([request("a", same, answer(1, 4)), request("b", same, answer(2, 4), 1.0)], SPECS["full"])
    assert outcome.engine.tally.hit_tokens == 96
    same = text(1, 96)
    outcome = run([request("a", same, answer(1, 4)), request("b", same, answer(2, 4), 1.0)], SPECS["full"])
    assert outcome.engine.tally.hit_tokens == 80  # the last token must be computed


def test_replay_of_a_later_turn_hits_the_previous_answer():
    first, said = text(1, 40), answer(1, 60)
    later = first + said + text(1, 30, start=40)
    outcome = run([request("a", first, said), request("b", later, answer(2, 4), 9.0)], SPECS["full"])
    # 40 + 60 - 1 tokens are computed in the first turn, so six blocks of 16 are full.
    assert outcome.engine.tally.hit_tokens == 96


def test_replay_counts_a_hit_in_the_same_step():
    """Two equal prompts that arrive together: the second is admitted behind the first and shares its blocks."""
    same = text(1, 100)
    outcome = run([request("a", same, answer(1, 4)), request("b", same, answer(2, 4))], SPECS["full"])
    assert outcome.engine.tally.hit_tokens == 96
    assert len([part for part in outcome.sessions[0].parts if part.admit.slot]) == 1


def test_replay_hits_of_sequential_requests_equal_a_set_of_prefixes():
    """The oracle: with room for everything, a prompt hits its longest prefix of full blocks that was seen before."""
    trace, blocks = chats(), 0
    seen: set[bytes] = set()
    for each in trace:
        packed = each.prompt.packed()
        full = [packed[: 64 * count] for count in range(1, (len(each.prompt) - 1) // 16 + 1)]
        blocks += next((len(full) - back for back in range(len(full)) if full[len(full) - back - 1] in seen), 0)
        seen.update((packed + each.output.packed()[:-4])[: 64 * count] for count in range(1, 65))
    outcome = run(trace, SPECS["full"], EngineConfig(max_running=1, token_budget=BUDGET))
    assert outcome.engine.tally.hit_blocks == [blocks]


# ---- refusals by name


def test_replay_refuses_a_request_beyond_max_model_len_by_name():
    trace = [request("fits", text(1, 2000), answer(1, 48)), request("long", text(2, 2000), answer(2, 49))]
    outcome = run(trace, SPECS["full"])
    (refusal,) = outcome.engine.refusals
    assert (refusal.request_id, refusal.reason) == ("long", TOO_LONG)
    assert "2049" in refusal.detail
    assert outcome.engine.completed == 1


@PER_SPEC
def test_replay_refuses_a_prompt_that_never_fits_and_continues(spec):
    pool = small(spec, 60)
    trace = [request("large", text(1, 1900), answer(1, 4)), request("next", text(2, 100), answer(2, 4))]
    outcome = run(trace, pool)
    (refusal,) = outcome.engine.refusals
    assert (refusal.request_id, refusal.reason) == ("large", NEVER_FITS)
    assert outcome.engine.completed == 1


def test_replay_refuses_a_request_that_outgrows_the_pool():
    """Its prompt fits; alone with the whole pool it preempts itself, and its known tokens no longer fit."""
    outcome = run([request("grows", text(1, 140), answer(1, 100))], small(SPECS["full"], 11))
    (refusal,) = outcome.engine.refusals
    assert (refusal.request_id, refusal.reason) == ("grows", NEVER_FITS)
    assert outcome.engine.tally.preempted == 1
    assert "161 tokens" in refusal.detail


def test_replay_of_a_request_without_output_ends_with_its_prompt():
    outcome = run([request("a", text(1, 100), answer(1, 0))], SPECS["full"])
    assert outcome.engine.completed == 1
    assert outcome.engine.tally.generated_tokens == 0
    assert outcome.engine.tally.granted_tokens == 100


def test_replay_can_limit_the_output():
    config = EngineConfig(token_budget=BUDGET, max_output=1)
    outcome = run(chats(), SPECS["full"], config)
    assert outcome.engine.tally.generated_tokens == outcome.engine.completed == len(chats())


# ---- virtual time


def test_replay_clock_advances_by_the_cost_model():
    outcome = run([request("a", text(1, 300), answer(1, 3))], SPECS["full"])
    # 256 prompt tokens, then 44 (and the first token), then two decode steps.
    assert outcome.engine.tally.steps == 4 + 1  # the last one reports the end
    assert outcome.engine.clock_ns == COST.step_ns(256, 0) + COST.step_ns(44, 0) + 2 * COST.step_ns(0, 1)


def test_cost_model_counts_decode_once_per_step():
    cost = CostModel(prefill_tokens_per_second=1000, decode_step_us=5, step_overhead_us=7)
    assert cost.step_ns(0, 0) == 7_000
    assert cost.step_ns(10, 0) == 7_000 + 10_000_000
    assert cost.step_ns(10, 1) == cost.step_ns(10, 200) == 7_000 + 10_000_000 + 5_000


def test_replay_clock_skips_idle_time_to_the_next_arrival():
    trace = [request("a", text(1, 20), answer(1, 1)), request("b", text(2, 20), answer(1, 1), 5000.0)]
    outcome = run(trace, SPECS["full"])
    assert outcome.engine.clock_ns == 5000 * NS + COST.step_ns(20, 0)


def test_replay_admits_no_request_before_its_arrival():
    """It comes while the first one decodes, and joins at the first step after."""
    trace = [request("a", text(1, 20), answer(1, 50)), request("b", text(2, 20), answer(2, 1), 0.1)]
    outcome = begin(trace, SPECS["full"])
    (session,) = outcome.sessions
    while not any("b" in part.news.request_id for part in session.parts):
        clock_before = outcome.engine.clock_ns
        assert outcome.fleet.run_step()
    assert NS // 10 <= clock_before < NS // 10 + COST.step_ns(0, 1)


# ---- several replicas


def test_sticky_routing_keeps_a_conversation_on_its_replica():
    trace = chats(40)
    outcome = run(trace, SPECS["full"], replicas=3)
    home: dict[str, int] = {}
    session_of = {each.name: each.session for each in trace}
    for number, session in enumerate(outcome.sessions):
        for name in (name for part in session.parts for name in part.news.request_id):
            assert home.setdefault(session_of[name], number) == number
    assert set(home.values()) == {0, 1, 2}


def test_sticky_routing_hits_more_than_round_robin():
    trace = chats(40)
    sticky = run(trace, SPECS["full"], replicas=3).fleet.tally()
    turns = run(trace, SPECS["full"], replicas=3, routing=Routing.ROUND_ROBIN).fleet.tally()
    assert sticky.hit_tokens > turns.hit_tokens
    assert sticky.prompt_tokens == turns.prompt_tokens


def test_round_robin_alternates_replicas_also_without_a_session():
    trace = [request(f"r{number}", text(number, 30), answer(number, 2)) for number in range(9)]
    for routing in Routing:
        outcome = run(trace, SPECS["full"], replicas=3, routing=routing)
        assert [engine.completed for engine in outcome.fleet.engines] == [3, 3, 3]


# ---- faults


def test_replay_engine_that_is_granted_nothing_raises():
    class Miser:
        """A service that never reaches a row."""

        spec = SPECS["full"]
        waiting_requests: int | None = None

        def submit(self, *parts: Part) -> int:
            self.admit: Admit = parts[0].admit
            return 0

        def receive(self) -> StepResult:
            none = [0] * len(self.admit.slot)
            return StepResult(0, 0, [PartResult(admit_status=none, admit_hit=none, admit_granted=none)])

    engine = Engine(Miser(), EngineConfig(), COST)
    engine.submit(request("a", text(1, 20), answer(1, 1)))
    for _ in range(MAX_IDLE_STEPS):
        engine.step()
    with pytest.raises(InternalError, match="stuck with 0 running and 1 waiting"):
        engine.step()
