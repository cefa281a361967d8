"""`kvplane.scheduling` against a core in this process: every request ends with the tokens of a run without a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.errors import InternalError, InvalidArgument
from kvplane.base.groups import AlignSpec, ReplicaSpec
from kvplane.base.step import AdmitStatus, End, Part, PartResult, Step
from kvplane.scheduling import MAX_IDLE_STEPS, Limits, Request, Scheduled, Scheduler
from kvplane.session.rows import part_of
from kvplane_core.face import inspect
from kvplane_core.spec.replica import Replica
from tests.client.stepper import Stepper
from tests.core.builders import full, replica_spec, state, window

SMALL = Limits(max_running=4, token_budget=24, chunk_tokens=16, admit_rows=3)
VOCABULARY = 5


def spec_of(*groups, num_blocks=30, **changes) -> ReplicaSpec:
    return replica_spec(*groups or (full(),), num_blocks=num_blocks, max_model_len=64, **changes)


MIXES = {
    "full": spec_of(),
    "window and full": spec_of(window(6), full()),
    "states": spec_of(state(), full(), align=AlignSpec(4, 4096)),
    "states and drafts": spec_of(state(speculative_blocks=2), full(), align=AlignSpec(4, 4096)),
}


def next_token(tokens: list[int]) -> int:
    """The model: what follows depends on every token before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token) % 1009
    return value % VOCABULARY


def sampled(row: Scheduled) -> list[int]:
    """The tokens behind the last `num_outputs` tokens of a row."""
    text = [*row.request.tokens, *row.request.drafts][: row.end]
    return [next_token(text[:end]) for end in range(row.end - row.num_outputs + 1, row.end + 1)]


def expected(request: Request) -> list[int]:
    """The output without batches, drafts or a cache."""
    text = list(request.prompt)
    while len(text) < request.max_tokens:
        text.append(next_token(text))
        if text[-1] in request.stop_token_ids:
            break
    return text[len(request.prompt) :]


class Engine:
    """A scheduler on a core; after each step the core's invariants hold."""

    def __init__(self, spec: ReplicaSpec = MIXES["full"], limits: Limits = SMALL) -> None:
        self.replica = Replica(spec)
        self.replica.begin_epoch(1)
        self.executed = 0
        self.scheduler = Scheduler(spec, limits)
        self.parts: list[tuple[Part, PartResult]] = []
        self.finished: list[Request] = []

    def add(self, prompt, max_new_tokens=3, **changes) -> Request:
        request = Request(f"request {len(self.parts)}", list(prompt), max_new_tokens, **changes)
        self.scheduler.add(request)
        return request

    def launch(self) -> list[Scheduled]:
        """A step up to its launch."""
        part, seq = self.scheduler.plan(), len(self.parts) + 1
        (result,) = self.replica.apply(Step(1, seq, [part], executed_through=self.executed)).parts
        inspect.check(self.replica)
        self.parts.append((part, result))
        return self.scheduler.update(part, result)

    def lose(self) -> None:
        """A step whose launch fails."""
        self.launch()
        self.scheduler.lose_step(len(self.parts))

    def step(self) -> None:
        for row in self.launch():
            self.scheduler.finish_row(row, sampled(row))
        self.executed = len(self.parts)
        self.finished += self.scheduler.take_finished()

    def run(self) -> list[Request]:
        while self.scheduler.has_work:
            self.step()
        return self.finished

    @property
    def is_empty(self) -> bool:
        return self.replica.coordinator.pool.is_unused


def test_the_loop_of_the_notes_for_engine_authors_runs(capsys):
    code = (Path(__file__).parents[2] / "docs" / "engines.md").read_text().split("```python\n")[1].split("```")[0]
    assert "Scheduler" in code
    replica = Replica(MIXES["full"])
    replica.begin_epoch(1)
    session = SimpleNamespace(spec=replica.spec, apply=Stepper(replica))
    exec(code, {"session": session, "prompt": [1, 2, 3], "sample": sampled})
    output = expected(Request("r-1", [1, 2, 3], 16))
    assert capsys.readouterr().out == f"r-1 {output} [0]\n"


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    engine = Engine(limits=Limits(token_budget=10, chunk_tokens=4))
    engine.add(range(9))
    engine.step()
    engine.step()
    engine.step()
    granted = [sum(result.granted) + sum(result.admit_granted) for _, result in engine.parts]
    assert granted == [4, 4, 1]


def test_a_request_ends_with_the_tokens_of_the_model_and_its_blocks_return():
    engine = Engine()
    request = engine.add([1, 2, 3], max_new_tokens=9)
    assert engine.run() == [request]
    assert request.output == expected(request)
    assert engine.is_empty


def test_a_request_ends_with_a_stop_token():
    engine = Engine()
    request = engine.add([1, 2, 3], max_new_tokens=40, stop_token_ids={next_token([1, 2, 3])})
    engine.run()
    assert len(request.output) == 1


def test_a_hint_is_sent_with_the_request_and_as_it_is_when_the_request_ends():
    engine = Engine()
    quiet, hinted = engine.add([1, 2, 3], max_new_tokens=9), engine.add([4, 5, 6], max_new_tokens=9, hint=1)
    rows = [quiet.news_row(), hinted.news_row()]
    assert part_of(*rows).news.hint == [0, 1]
    with pytest.raises(InvalidArgument, match="hint_values 0") as refused:  # this replica has none
        engine.run()
    assert refused.value.field == "parts[0].news.hint"
    hinted.hint = 0
    ended = Engine(replace(MIXES["full"], hint_values=8))
    request = ended.add([1, 2, 3], max_new_tokens=9, hint=1)
    ended.step()
    request.hint = 7
    ended.run()
    hints = [part.facts.hint[part.facts.end.index(End.FREE)] for part, _ in ended.parts if End.FREE in part.facts.end]
    assert hints == [7]


def test_a_second_request_hits_the_prefix_of_the_first():
    engine = Engine()
    engine.add(range(17))
    engine.run()
    second = engine.add(range(17))
    engine.run()
    assert second.hits == [16]
    assert engine.scheduler.counts.hit_tokens == 16


def test_requests_of_different_domains_share_no_prefix():
    engine = Engine()
    engine.add(range(17), domain="a")
    engine.run()
    second = engine.add(range(17), domain="b")
    engine.run()
    assert second.hits == [0]


def oracle(tokens, most) -> list[int]:
    """A drafter that is right at first and wrong at the end."""
    text = list(tokens)
    for _ in range(most):
        text.append(next_token(text))
    return [*text[len(tokens) : -1], (text[-1] + 1) % VOCABULARY]


@pytest.mark.parametrize("mix", ["full", "states and drafts"])
@pytest.mark.parametrize("commits", [False, True])
def test_correct_drafts_are_accepted(mix, commits):
    engine = Engine(MIXES[mix], Limits(num_drafts=2, drafter=oracle, commits=commits))
    request = engine.add([1, 2, 3], max_new_tokens=20)
    engine.run()
    assert request.output == expected(request)
    counts = engine.scheduler.counts
    assert counts.accepted_drafts > 5
    assert counts.rejected_drafts > 5
    assert counts.steps < 20, "accepted drafts save steps"


def test_a_pool_that_is_too_small_preempts_the_newest_request():
    engine = Engine(spec_of(num_blocks=9), Limits(max_running=2))
    first, second = engine.add(range(12), 14), engine.add(range(20, 32), 14)
    assert engine.run() == [first, second]
    assert [first.output, second.output] == [expected(first), expected(second)]
    assert engine.scheduler.counts.preempted > 0
    assert len(second.hits) > len(first.hits) == 1


def test_a_request_that_never_fits_is_given_up():
    engine = Engine(spec_of(num_blocks=4))
    request = engine.add(range(40))
    assert engine.run() == [request]
    assert "40 tokens need more blocks" in request.error
    assert engine.is_empty


def waiting_behind_a_long_prompt(passed_by: int, followers: int) -> tuple[Engine, Request, list[Request]]:
    """A running request with 8 of 16 blocks, a prompt that needs more than are left, and some that share the 8."""
    limits = Limits(max_running=8, token_budget=64, admit_rows=8, passed_by=passed_by)
    engine = Engine(spec_of(num_blocks=17), limits)
    engine.add([1] * 32, 20)
    engine.step()
    long = engine.add([2] * 44, 2)
    return engine, long, [engine.add([1] * 32 + [3], 1) for _ in range(followers)]


def test_requests_that_share_what_runs_pass_one_that_lacks_blocks():
    waits, _, others = waiting_behind_a_long_prompt(0, 3)
    waits.step()
    assert not any(one.hits for one in others)
    engine, long, others = waiting_behind_a_long_prompt(8, 3)
    engine.step()
    assert [one.hits for one in others] == [[32]] * 3
    assert (long.passed, long.hits) == (3, [])
    engine.run()
    assert long.output == expected(long)


def test_no_request_is_passed_by_more_than_its_limit():
    engine, long, others = waiting_behind_a_long_prompt(2, 5)
    first, end = engine.scheduler.waiting[0], 0
    assert first is long
    while not long.hits:
        engine.step()
        end += 1
        assert long.passed <= 2, end
    assert sum(bool(one.hits) for one in others) == long.passed == 2
    engine.run()
    assert all(one.output == expected(one) for one in others)


def test_a_preempted_request_was_passed_as_often_as_those_behind_it():
    engine, long, _ = waiting_behind_a_long_prompt(3, 1)
    engine.step()
    (first,) = [one for one in engine.scheduler._running if not one.passed]
    engine.scheduler._start_again(first)
    assert engine.scheduler.waiting[0] is first
    assert first.passed == long.passed == 1


@pytest.mark.parametrize("steps", range(6))
def test_an_aborted_request_gives_its_blocks_back(steps):
    """Before it is announced, while it waits, in a chunk of its prompt, while it decodes, and after its end."""
    engine = Engine(limits=Limits(max_running=1, chunk_tokens=8))
    first, second = engine.add(range(12), 3), engine.add(range(20, 30), 2)
    for _ in range(steps):
        engine.step()
    done = first.is_done
    engine.scheduler.abort(first)
    engine.scheduler.abort(first)
    engine.run()
    assert first.error == ("" if done else "aborted")
    assert second.output == expected(second)
    assert sorted(map(id, engine.finished)) == sorted(map(id, (first, second)))
    assert engine.is_empty


def test_a_request_aborted_during_its_launch_takes_no_tokens():
    engine = Engine()
    request = engine.add([1, 2, 3])
    (row,) = engine.launch()
    engine.scheduler.abort(request)
    assert engine.scheduler.finish_row(row, sampled(row)) == 0
    engine.run()
    assert (request.output, engine.is_empty) == ([], True)


def test_a_lost_launch_is_reported_and_its_requests_are_computed_again():
    engine = Engine()
    request = engine.add(range(9))
    engine.lose()
    assert engine.scheduler.resume() is None
    engine.run()
    assert request.output == expected(request)
    assert engine.parts[1][0].cache.failed_steps == [1]
    assert engine.scheduler.counts.preempted == 1


def test_a_reopened_session_is_given_the_requests_and_their_blocks():
    engine = Engine()
    request = engine.add(range(9), 5)
    engine.step()
    news, running = engine.scheduler.known_requests()
    assert (news.num_tokens, running) == ([10], (request.slot,))
    resume = engine.scheduler.resume()
    assert resume is not None
    assert (resume.slot, resume.computed, resume.num_blocks) == ([request.slot], [9], [3])


@pytest.mark.parametrize(
    ("prompt", "count", "field"), [((), 3, "prompt"), ((1, 2), 0, "max_new_tokens"), (range(60), 5, "prompt")]
)
def test_a_request_that_cannot_end_is_refused_by_name(prompt, count, field):
    engine = Engine()
    with pytest.raises(InvalidArgument) as refused:
        engine.add(prompt, count)
    assert refused.value.field == field
    assert not engine.scheduler.has_work


def test_more_drafts_than_states_are_refused_by_name():
    with pytest.raises(InvalidArgument) as refused:
        Scheduler(MIXES["states and drafts"], Limits(num_drafts=3))
    assert refused.value.field == "num_drafts"


def test_a_wrong_number_of_sampled_tokens_is_refused_by_name():
    engine = Engine()
    engine.add([1, 2, 3])
    (row,) = engine.launch()
    with pytest.raises(InvalidArgument) as refused:
        engine.scheduler.finish_row(row, [])
    assert refused.value.field == "sampled"


def test_a_service_that_grants_nothing_for_many_steps_raises():
    scheduler = Scheduler(MIXES["full"], SMALL)
    scheduler.add(Request("q", [1, 2], 2))
    refused = PartResult(admit_status=[AdmitStatus.REFUSED], admit_hit=[0], admit_granted=[0])
    for _ in range(MAX_IDLE_STEPS):
        scheduler.update(scheduler.plan(), refused)
    part = scheduler.plan()
    with pytest.raises(InternalError, match="stuck with 0 running and 1 waiting"):
        scheduler.update(part, refused)


@pytest.mark.parametrize("end", ["jobs_done", "jobs_failed", "jobs_before"])
def test_an_engine_is_not_stuck_while_a_load_that_it_gave_up_holds_blocks(end):
    scheduler = Scheduler(MIXES["full"], SMALL)
    scheduler.add(Request("q", [1, 2], 2))
    loading = PartResult(
        admit_status=[AdmitStatus.GRANTED], admit_hit=[0], admit_granted=[0], admit_job=[7], admit_tier_tokens=[1]
    )
    scheduler.update(scheduler.plan(), loading)
    scheduler.give_up_load(scheduler.loading[0])
    refused = PartResult(admit_status=[AdmitStatus.REFUSED], admit_hit=[0], admit_granted=[0])
    for _ in range(MAX_IDLE_STEPS + 5):
        scheduler.update(scheduler.plan(), refused)
        assert scheduler.awaits_loads
    part = scheduler.plan()
    setattr(part.cache, end, 8 if end == "jobs_before" else [7])
    scheduler.update(part, refused)
    assert not scheduler.awaits_loads
    for _ in range(MAX_IDLE_STEPS - 1):
        scheduler.update(scheduler.plan(), refused)
    part = scheduler.plan()
    with pytest.raises(InternalError, match="stuck"):
        scheduler.update(part, refused)


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_engines_have_the_tokens_of_a_run_without_a_cache(mix, seed):
    rng = Random(seed)
    drafts = 2 if mix in ("full", "states and drafts") else 0
    drafter = rng.choice([oracle, lambda tokens, most: list(tokens[-most:]) if most else []])
    limits = Limits(
        max_running=rng.randint(1, 6),
        token_budget=rng.choice([8, 24, 1000]),
        chunk_tokens=rng.choice([8, 1000]),
        admit_rows=rng.randint(1, 4),
        num_drafts=drafts,
        drafter=drafter,
        commits=rng.random() < 0.5,
        passed_by=rng.choice([0, 0, 1, 5]),
    )
    engine, requests, steps = Engine(MIXES[mix], limits), list[Request](), 0
    while engine.scheduler.has_work or steps < 40:
        steps += 1
        if steps < 40 and rng.random() < 0.4:
            prompt = [0, 1, 2, 3] * rng.randint(0, 3) + rng.choices(range(VOCABULARY), k=rng.randint(1, 20))
            requests.append(engine.add(prompt, rng.randint(1, 20), stop_token_ids={4} if rng.random() < 0.3 else ()))
        if requests and rng.random() < 0.05:
            engine.scheduler.abort(rng.choice(requests))
        engine.lose() if rng.random() < 0.03 else engine.step()
    engine.finished += engine.scheduler.take_finished()
    for request in requests:
        assert request.error in ("", "aborted")
        whole = expected(request)
        assert request.output == (whole if not request.error else whole[: len(request.output)])
        assert request.passed <= limits.passed_by
    assert sorted(map(id, engine.finished)) == sorted(map(id, requests))
    assert engine.is_empty
    ends = [end for part, _ in engine.parts for end in part.facts.end]
    assert set(ends) <= {End.NONE, End.FREE}


def test_waiting_requests_are_prefetched_once():
    """Those near the head of the queue, also before there is a place for them."""
    scheduler = Scheduler(spec_of(), replace(SMALL, max_running=1, admit_rows=1, prefetch_rows=3))
    for number in range(5):
        scheduler.add(Request(f"{number}", [number] * 9, 2))
    part = scheduler.plan()
    assert (part.admit.slot, part.prefetch.slot, part.news.slot) == ([0], [0, 1, 2], [0, 1, 2])
    part = scheduler.plan()
    assert (part.prefetch.slot, part.news.slot) == ([], [])
    (first, *_) = scheduler.waiting
    scheduler.abort(first)
    assert scheduler.plan().prefetch.slot == [0], "the slot is used again"
