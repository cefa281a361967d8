"""No way in costs more per byte than its bound, whatever the bytes are."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from kvplane.base.errors import LimitExceeded
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire import parsing
from kvplane.wire.parsing import parse, parse_long
from tests.service.input_costs import BOUNDS, cases
from tests.service.rig import SPEC, running

SIZE = 96 << 10
TURNS, TURN_NS = 200_000, 70.0  # of `slowness`, on a machine on which the bounds are several times what is measured


def slowness() -> float:
    """Return how many times the CPU time of that machine Python needs here and now; 1 at least."""
    began_ns, total, last = time.process_time_ns(), 0, dict[int, int]()
    for turn in range(TURNS):
        last[turn & 1023] = turn
        total += len(last)
    return max(1.0, (time.process_time_ns() - began_ns) / TURNS / TURN_NS)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Cases, the CPU time in ns per byte of a machine of that speed, and the memory."""
    found = []
    with closing(cases(tmp_path_factory.mktemp("inputs"), SIZE)) as all_cases:
        for case in all_cases:
            before = slowness()
            ns_per_byte, num_bytes = case.measure()
            found.append((case, ns_per_byte / max(before, slowness()), num_bytes))
    return found


def test_every_way_in_has_a_bound(measured):
    assert {case.path for case, *_ in measured} == set(BOUNDS)


@pytest.mark.parametrize("path", BOUNDS)
def test_no_message_costs_more_than_its_way_in_may(measured, path):
    bound, of_path = BOUNDS[path], [one for one in measured if one[0].path == path]
    assert [(case.what, ns) for case, ns, _ in of_path if ns > bound.ns_per_byte] == []
    most = [bound.fixed_bytes + bound.bytes_per_byte * case.num_bytes for case, *_ in of_path]
    assert [(one[0].what, one[2]) for one, limit in zip(of_path, most, strict=True) if one[2] > limit] == []


@pytest.mark.parametrize("parser", [parse, parse_long])
@pytest.mark.parametrize(
    "message",
    [
        pb.SessionRequest(step={"parts": [{}] * 200_000}),
        pb.SessionRequest(step={"parts": [{"news": {"extra_keys": [{}] * 200_000}}]}),
        pb.SessionRequest(step={"parts": [{"news": {"request_id": [""] * 200_000}}]}),
    ],
)
def test_a_message_of_more_fields_than_are_parsed_is_refused(parser, message):
    with pytest.raises(LimitExceeded, match="more than 131072 fields"):
        parser(type(message), message.SerializeToString())


def test_long_messages_of_few_fields_are_parsed(monkeypatch):
    monkeypatch.setattr(parsing, "MAX_FIELDS", 100)
    hashes = pb.FindCacheHitRequest(replica="r", content={"hashes": [bytes([at % 250]) * 32 for at in range(9000)]})
    tokens = pb.FindCacheHitRequest(replica="r", content={"token_ids": range(90_000)})
    parts = pb.SessionRequest(step={"parts": [{"news": {"tokens": bytes(4000)}}] * 20})
    for message in (hashes, tokens, parts):
        assert parse(type(message), message.SerializeToString()) == message


def test_a_step_of_more_parts_than_rows_is_refused_undecoded_and_its_session_goes_on():
    with running() as service:
        service.register(spec=SPEC)
        stream = service.open()
        error = stream.refused(*[{}] * 5000)
        assert "5000 parts" in error.message
        assert stream.step().result.seq == 1
