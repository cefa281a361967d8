"""The built-in workload of chats: it is determined by its seed, and has the shapes of real traffic."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane_tools.replay.workloads import ChatShape, TraceRequest, chat_workload

SHAPE = ChatShape(max_model_len=4096, num_sessions=40)


def requests_of(seed: int, shape: ChatShape = SHAPE) -> list[TraceRequest]:
    return list(chat_workload(Random(seed), shape))


def by_session(requests: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions


def test_chat_workload_is_determined_by_its_seed() -> None:
    assert requests_of(1) == requests_of(1)
    assert requests_of(1) != requests_of(2)


@given(st.integers(0, 2**32), st.integers(256, 200_000), st.integers(0, 12), st.floats(0, 1))
def test_chat_requests_fit_and_are_ordered_by_arrival(
    seed: int, max_model_len: int, sessions: int, agents: float
) -> None:
    requests = requests_of(seed, ChatShape(max_model_len, sessions, agent_share=agents))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert len({request.name for request in requests}) == len(requests)
    for request in requests:
        assert request.output_tokens >= 1
        assert len(request.prompt) + request.output_tokens <= max_model_len


def test_chat_turn_begins_with_the_previous_turn_and_answer() -> None:
    pairs = [pair for turns in by_session(requests_of(3)).values() for pair in pairwise(turns)]
    assert len(pairs) > 50
    for before, after in pairs:
        so_far = before.prompt.packed() + before.output.packed()
        assert after.prompt.packed()[: len(so_far)] == so_far
        assert len(after.prompt.packed()) > len(so_far)
        assert after.arrival_s > before.arrival_s


def test_chat_sessions_share_only_system_prompts() -> None:
    firsts = [turns[0] for turns in by_session(requests_of(4)).values()]
    systems = {request.prompt.spans[0] for request in firsts}
    assert len(systems) < len(firsts) / 2
    own = [span for request in firsts for span in (*request.prompt.spans[1:], *request.output.spans)]
    assert len({(span.stream, span.generated) for span in own}) == len(own)
    assert not {span.stream for span in systems} & {span.stream for span in own if not span.generated}


def test_chat_agents_take_more_turns_in_less_time_than_users() -> None:
    def seconds_per_turn(share: float) -> float:
        sessions = by_session(requests_of(5, ChatShape(16_384, 60, agent_share=share))).values()
        gaps = [b.arrival_s - a.arrival_s for turns in sessions for a, b in pairwise(turns)]
        return sum(gaps) / len(gaps)

    assert seconds_per_turn(1.0) < seconds_per_turn(0.0) / 2


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("max_model_len", {"max_model_len": 255}),
        ("num_sessions", {"num_sessions": -1}),
        ("sessions_per_s", {"sessions_per_s": 0.0}),
        ("agent_share", {"agent_share": 1.5}),
        ("num_system_prompts", {"num_system_prompts": 0}),
    ],
)
def test_chat_workload_value_out_of_range_is_refused_by_field(field: str, shape: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ChatShape(**{"max_model_len": 4096, **shape})
    assert refused.value.field == field
