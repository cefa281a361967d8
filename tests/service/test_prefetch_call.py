"""Prefetch by a call: the engine of a session copies what a prompt needs in its next step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvplane import AdmitRow, Content, FactRow, NewsRow, connect, part_of
from kvplane.base.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.step import Cache, End, RowFlag
from kvplane.session.rows import PrefetchRow
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.config import Config
from kvplane_service.replicas import cache_requests
from tests.service.hosts import spec_of
from tests.service.rig import running

TIERS = (TierSpec(TierKind.HOST, 20), TierSpec(TierKind.DISK, 300))
PROMPTS = range(40)  # of four blocks each


class Moving:
    """An engine whose movers end each job before the next step."""

    def __init__(self, session):
        self.session, self.jobs = session, []

    def step(self, *rows):
        part = part_of(*rows, cache=Cache(jobs_done=self.jobs))
        (result,) = self.session.apply(part).parts
        orders = result.orders
        self.jobs = [*dict.fromkeys(orders.load_job), *orders.save_job, *orders.move_job]
        return result

    def serve(self, fill, flags=RowFlag.NONE):
        result = self.step(NewsRow(0, tokens=[fill] * 65), AdmitRow(0, flags=flags))
        self.step(FactRow(0, end=End.FREE))
        return result

    @contextmanager
    def idling(self, *rows):
        """Steps with these rows alone, on a thread, until the end of the block."""
        ended = threading.Event()

        def run():
            while not ended.wait(0.001):
                self.step(*rows)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def served(client):
    """An engine with prompts on disk alone, of a replica that is there until the end of the block."""
    client.register_replica("r", spec_of(21, tiers=TIERS), namespace_digest=b"n" * 32)
    with client.session("r") as session:
        engine = Moving(session)
        for fill in PROMPTS:
            engine.serve(fill)
        for _ in range(5):
            engine.step()
        yield engine
    client.deregister_replica("r")


@pytest.fixture(scope="module")
def client():
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        yield client


@pytest.fixture
def engine(client):
    with served(client) as engine:
        yield engine


def prompt(fill):
    return Content(token_ids=[fill] * 65)


def test_what_is_only_on_the_disk_is_copied_and_then_loaded_from_the_host(client, engine):
    with engine.idling():
        done = client.prefetch("r", prompt(3))
        again = client.prefetch("r", prompt(3))
    assert (done.hit_tokens, done.copied_blocks, done.outcome) == (64, 4, pb.PREFETCH_OUTCOME_ALL)
    assert (again.hit_tokens, again.copied_blocks) == (64, 0)
    assert again.seq > done.seq > 0
    result = engine.serve(3, flags=RowFlag.LOAD)
    assert list(result.orders.load_tier) == [0] * 4
    assert client.describe_replica("r").tier_counts["prefetched"] == 4


def test_callers_at_one_time_get_the_answer_for_their_prompt(client, engine):
    """And a change of the cache with them; the engine's own row is before theirs."""
    engine.step(NewsRow(5, tokens=[4] * 50))
    with ThreadPoolExecutor(8) as callers:
        asked = [callers.submit(client.prefetch, "r", prompt(fill)) for fill in (90, 5, 91, 6)]
        asked.append(callers.submit(client.evict_blocks, "r", [1]))
        with engine.idling(PrefetchRow(5)):
            hits = [one.result().hit_tokens for one in asked[:4]]
            assert asked[4].result().result.seq
    assert hits == [0, 64, 0, 64]


def test_a_copy_that_would_end_too_late_is_left_out(client, engine):
    part = part_of(cache=Cache(costs_ns=[1000, 1000, 10**9]))
    engine.session.apply(part)
    with engine.idling():
        soon = client.prefetch("r", prompt(3), within_s=0.0001)  # 0 would be "at any time"
        late = client.prefetch("r", prompt(3), within_s=3.9)
        done = client.prefetch("r", prompt(3), within_s=4.1)
    for one in (soon, late):
        assert (one.copied_blocks, one.outcome) == (0, pb.PREFETCH_OUTCOME_TOO_LATE)
    assert (done.copied_blocks, done.outcome) == (4, pb.PREFETCH_OUTCOME_ALL)


def test_refusals_name_the_field_and_change_nothing(client, engine, monkeypatch):
    monkeypatch.setattr(cache_requests, "TIMEOUT_S", 0.1)
    before = client.snapshot("r", summary=True).digest
    with pytest.raises(Unavailable, match="has run no step"):
        client.prefetch("r", prompt(3))
    with pytest.raises(InvalidArgument) as short:
        client.prefetch("r", Content(token_ids=[1] * 9))
    assert short.value.field == "content"
    with pytest.raises(InvalidArgument) as long:
        client.prefetch("r", prompt(3), within_s=3601.0)
    assert long.value.field == "within_ms"
    for no_time in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="is no time") as refused:
            client.prefetch("r", prompt(3), within_s=no_time)
        assert refused.value.field == "within_s"
        with pytest.raises(InvalidArgument, match="is no time"):
            client.retain("r", prompt(3), ttl_s=no_time)
    assert client.snapshot("r", summary=True).digest == before
    client.register_replica("one", spec_of(21, tiers=TIERS[:1]), namespace_digest=b"n" * 32)
    with client.session("one"), pytest.raises(InvalidArgument) as alone:
        client.prefetch("one", prompt(3))
    assert alone.value.field == "header.replica"
    with pytest.raises(FailedPrecondition) as left:
        client.prefetch("one", prompt(3))
    assert left.value.remedy
