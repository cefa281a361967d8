"""Retain by a call: the engine of a session, or the next unary call, evicts the blocks of a prefix after all others."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvplane import AdmitRow, Allocate, Commit, Content, FactRow, NewsRow, connect, part_of
from kvplane.base.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.sections import Retain
from kvplane.base.step import End, Part
from kvplane_service.config import Config
from kvplane_service.replicas import cache_requests
from tests.service.hosts import spec_of
from tests.service.rig import running


@pytest.fixture(scope="module")
def client():
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        yield client


class Serving:
    """An engine that serves one prompt per step."""

    def __init__(self, session):
        self.session = session

    def serve(self, fill):
        (result,) = self.session.apply(part_of(NewsRow(0, tokens=[fill] * 65), AdmitRow(0))).parts
        self.session.apply(part_of(FactRow(0, end=End.FREE)))
        return result.admit_hit[0]

    @contextmanager
    def idling(self):
        """Steps without rows, on a thread, until the end of the block."""
        ended = threading.Event()

        def run():
            while not ended.wait(0.001):
                self.session.apply(Part())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@pytest.fixture
def engine(client):
    client.register_replica("r", spec_of(41))
    with client.session("r") as session:
        engine = Serving(session)
        engine.serve(3)
        yield engine
    client.deregister_replica("r")


def prompt(fill):
    return Content(token_ids=[fill] * 65)


def flood(engine):
    for fill in range(100, 130):
        engine.serve(fill)


def test_what_is_retained_is_hit_after_other_prompts_have_used_the_pool(client, engine):
    with engine.idling():
        done = client.retain("r", prompt(3), ttl_s=60, priority=9)
    assert (done.retained_tokens, done.retained_blocks, done.left_blocks) == (64, 4, 10 - 4)
    flood(engine)
    assert engine.serve(3) == 64
    answer = client.describe_replica("r")
    assert (answer.retained_prefixes, answer.retained_blocks) == (1, 4)
    assert dict(answer.retain_counts) == {"retained": 1}
    with engine.idling():
        done = client.retain("r", prompt(3), ttl_s=0)
    assert (done.retained_blocks, done.left_blocks) == (0, 10)
    flood(engine)
    assert engine.serve(3) == 0


def test_it_ends_in_the_first_step_after_its_time(client, engine):
    with engine.idling():
        client.retain("r", prompt(3), ttl_s=0.05)
        ended = threading.Event()
        while client.describe_replica("r").retained_prefixes:
            ended.wait(0.01)
    flood(engine)
    assert engine.serve(3) == 0


def test_callers_at_one_time_get_the_answer_for_their_prefix(client, engine):
    engine.serve(4)
    with ThreadPoolExecutor(8) as callers:
        asked = [callers.submit(client.retain, "r", prompt(fill), ttl_s=9) for fill in (90, 3, 91, 4)]
        asked.append(callers.submit(client.evict_blocks, "r", [40]))
        with engine.idling():
            tokens = [one.result().retained_tokens for one in asked[:4]]
            assert asked[4].result().result.seq
    assert tokens == [0, 64, 0, 64]


def test_refusals_name_the_field_and_change_nothing(client, engine, monkeypatch):
    monkeypatch.setattr(cache_requests, "TIMEOUT_S", 0.1)
    with pytest.raises(Unavailable, match="has run no step"):
        client.retain("r", prompt(3), ttl_s=9)
    wrong = {
        "content": (Content(token_ids=[1] * 9), 9.0, 0),
        "ttl_ms": (prompt(3), 604801.0, 0),
        "priority": (prompt(3), 9.0, 101),
    }
    for field, (content, ttl_s, priority) in wrong.items():
        with pytest.raises(InvalidArgument) as refused:
            client.retain("r", content, ttl_s=ttl_s, priority=priority)
        assert refused.value.field == field
    with pytest.raises(InvalidArgument) as own:
        engine.session.apply(Part(retain=Retain(now_ns=[1])))
    assert own.value.field == "parts[0].retain"
    assert client.describe_replica("r").retained_prefixes == 0


def test_more_than_the_share_is_refused_with_what_is_left(client, engine):
    engine.serve(4)
    engine.serve(5)
    with engine.idling():
        for fill in (3, 4):
            client.retain("r", prompt(fill), ttl_s=9)
        with pytest.raises(InvalidArgument, match="needs 4 blocks, and of the owner's share of the pool 2 are left"):
            client.retain("r", prompt(5), ttl_s=9)
    assert client.describe_replica("r").retained_prefixes == 2


@pytest.mark.parametrize(("kind", "name"), [(TierKind.HOST, "host tier"), (TierKind.DISK, "disk")])
def test_more_than_the_share_of_a_tier_is_refused_with_what_is_left(client, kind, name):
    spec = replace(spec_of(41), tiers=(TierSpec(kind, 40, retained_percent=5),))
    client.register_replica("tiered", spec, namespace_digest=b"n")
    client.allocate_slots("tiered", Allocate("a", prompt(3)))
    client.commit_blocks("tiered", Commit("a"))
    client.free("tiered", "a")
    with pytest.raises(
        InvalidArgument, match=f"needs 4 blocks, and of the owner's share of the {name} 2 are"
    ) as refused:
        client.retain("tiered", prompt(3), ttl_s=9)
    assert refused.value.field == "content"
    assert "in the owner's limits and in the registration of the tier" in refused.value.remedy
    answer = client.describe_replica("tiered")
    assert answer.retained_prefixes == 0
    assert dict(answer.retain_counts) == {f"over_{kind.value}_budget": 1}
    assert answer.spec.tiers[0].retained_percent == 5
    client.deregister_replica("tiered")


def test_without_a_session_the_call_itself_retains_and_later_calls_end_it(client):
    client.register_replica("unary", spec_of(41))
    client.allocate_slots("unary", Allocate("a", prompt(3)))
    client.commit_blocks("unary", Commit("a"))
    client.free("unary", "a")
    assert client.retain("unary", prompt(3), ttl_s=0.001).retained_tokens == 64
    numbers = itertools.count()
    while client.describe_replica("unary").retained_prefixes:  # until a call comes when the millisecond is over
        client.allocate_slots("unary", Allocate(f"request {next(numbers)}", prompt(4)))
    assert next(numbers), "no call was needed"
    client.deregister_replica("unary")


def test_after_the_engine_has_left_it_is_refused(client):
    client.register_replica("left", spec_of(41))
    with client.session("left") as session:
        Serving(session).serve(3)
    with pytest.raises(FailedPrecondition) as refused:
        client.retain("left", prompt(3), ttl_s=9)
    assert refused.value.remedy
    client.deregister_replica("left")
