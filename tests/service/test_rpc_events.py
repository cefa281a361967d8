"""The stream of events over real gRPC."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import grpc
import pytest

from kvplane.base.errors import InvalidArgument, LimitExceeded, NotFound
from kvplane.base.step import CacheEvent, EventKind
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import events_pb2, step_pb2
from kvplane_service.config import Config
from kvplane_service.replicas import published
from kvplane_service.rpc import events as events_module
from tests.service.rig import WAIT_S, column, error_of, running, until

LIMITS = Config(listen="127.0.0.1:0", events_resume=8, max_subscribers=2)


@pytest.fixture
def service():
    with running(LIMITS) as service:
        service.register()
        yield service


def subscribe(service, **fields):
    return service.events.Subscribe(events_pb2.SubscribeRequest(replica="r", **fields), timeout=WAIT_S)


def admit(stream, slot: int) -> None:
    tokens = column(*range(slot * 1000, slot * 1000 + 20))
    stream.step(
        {
            "news": {"slot": column(slot), "num_tokens": column(20), "tokens": tokens},
            "admit": {"slot": column(slot)},
        }
    )


def followed(service) -> None:
    """Wait until a subscriber is there."""
    log = service.app.registry.get("r").host.events
    until(lambda: bool(service.in_loop(lambda: len(log._subscribers))))


def test_a_subscriber_sees_what_was_executed_as_it_happens(service):
    events = subscribe(service)
    followed(service)
    stream = service.open()
    admit(stream, 0)
    stream.step()
    batch = next(events)
    assert (batch.seq, batch.epoch, len(batch.events)) == (1, 2, 2)
    assert {event.kind for event in batch.events} == {step_pb2.CACHE_EVENT_KIND_STORED}
    admit(stream, 1)
    stream.step()
    assert next(events).seq == 2


def test_a_subscriber_resumes_and_gets_gaps(service):
    stream = service.open()
    for slot in range(5):
        admit(stream, slot)
    stream.step()
    assert [batch.seq for batch in islice(subscribe(service, after_seq=2), 3)] == [3, 4, 5]
    for slot in range(5, 15):
        admit(stream, slot)
    first = next(subscribe(service, after_seq=0))
    last = service.in_loop(lambda: service.app.registry.get("r").host.events.last_seq)
    assert (first.gap, first.seq) == (True, last - 8)


def read(batches, at_least: int) -> tuple[list[Any], Counter[tuple[int, bytes]]]:
    """Return batches up to the one with this number or a higher one, and the keys that they leave."""
    taken, keys = list[Any](), Counter[tuple[int, bytes]]()
    for batch in batches:
        taken.append(batch)
        keys = Counter() if batch.gap else keys
        for event in batch.events:
            pairs = [(event.group, digest) for digest in event.hashes]
            (keys.update if event.kind == step_pb2.CACHE_EVENT_KIND_STORED else keys.subtract)(pairs)
        if batch.seq >= at_least:
            return taken, keys
    raise AssertionError("the stream ended")


def test_a_late_subscriber_gets_the_entries_instead_of_a_gap(service):
    stream, log = service.open(), service.app.registry.get("r").host.events
    for slot in range(15):
        admit(stream, slot)
    stream.step()
    last = service.in_loop(lambda: log.last_seq)
    taken, keys = read(subscribe(service, after_seq=0, entries=True), at_least=1)
    assert (taken[0].gap, [one.seq for one in taken]) == (True, [0] * (len(taken) - 1) + [last])
    entries = service.in_loop(lambda: service.app.registry.get("r").host.replica.entries())
    assert keys.total() == len(entries) > 0
    changes = subscribe(service, after_seq=last, entries=True)
    admit(stream, 15)
    stream.step()
    assert next(changes).seq == last + 1  # nothing was lost, so there is nothing to read


def test_entries_are_those_of_a_replica_that_goes_on_meanwhile(service, monkeypatch):
    monkeypatch.setattr(published, "SLICE_BLOCKS", 2)
    monkeypatch.setattr(events_module, "_PAUSE_S", 0.02)
    stream, log = service.open(), service.app.registry.get("r").host.events
    admit(stream, 0)
    stream.step()
    batches = subscribe(service, after_seq=0, entries=True)
    assert next(batches).gap
    for slot in range(1, 6):
        admit(stream, slot)
    stream.step()
    _, keys = read(batches, at_least=service.in_loop(lambda: log.last_seq))
    assert (+keys).total() == len(service.in_loop(lambda: service.app.registry.get("r").host.replica.entries()))


def test_digests_are_those_of_the_keys(service):
    stream = service.open()
    for slot in range(5):
        admit(stream, slot)
    stream.step()
    taken, keys = [], Counter[tuple[int, bytes]]()
    for batch in subscribe(service, after_seq=0, entries=True, digest_period_s=1):
        if batch.digests:
            break
        keys.update((event.group, digest) for event in batch.events for digest in event.hashes)
        taken.append(batch)
    assert (batch.seq, list(batch.events)) == (taken[-1].seq, [])
    for one in batch.digests:
        own = [int.from_bytes(digest[-16:], "big") for group, digest in keys.elements() if group == one.group]
        assert (one.keys, int.from_bytes(one.sum, "big")) == (len(own), sum(own) % (1 << 128))
    assert keys.total() == sum(one.keys for one in batch.digests) > 0


def test_subscribers_get_lapse_and_restoration(service):
    stream = service.open()
    admit(stream, 0)
    stream.step()
    events = subscribe(service)
    followed(service)
    stream.vanish()
    assert next(events).withdrawn
    assert next(subscribe(service)).withdrawn
    service.open(epoch=stream.opened.epoch, life_nonce=stream.nonce)
    assert next(events).restored


def test_lapse_is_published_without_any_call():
    with running(LIMITS.model_copy(update={"lease_ms": 100})) as service:
        service.register()
        stream = service.open()
        events = subscribe(service)
        assert next(events).withdrawn
        stream.send(heartbeat={})
        assert next(events).restored


def test_a_slow_subscriber_is_ended_and_can_resume(service):
    events = subscribe(service, after_seq=0)
    followed(service)
    stream = service.open()
    host = service.app.registry.get("r").host
    wide = tuple(str(number).encode() * 50 for number in range(2000))

    def publish_much() -> int:
        """More than the connection holds, so that the subscriber's stream stands still."""
        for number in range(30):
            host.events.publish(number, [CacheEvent(EventKind.STORED, 0, wide, tuple(range(2000)))])
        return host.events.last_seq

    last = service.in_loop(publish_much)
    seen: list[int] = []
    with pytest.raises(grpc.RpcError) as raised:
        seen.extend(batch.seq for batch in events)
    error = error_of(raised.value)
    assert isinstance(error, LimitExceeded)
    assert seen == []
    assert error.metadata["after_seq"] == "0"
    batches = subscribe(service, after_seq=0)
    assert next(batches).gap
    assert next(batches).seq == last - 7
    stream.close()


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [({"replica": "unknown"}, NotFound, "replica"), ({"replica": "r", "after_seq": 1}, InvalidArgument, "after_seq")],
)
def test_invalid_subscriptions_are_refused(service, fields, kind, field):
    with pytest.raises(grpc.RpcError) as raised:
        next(service.events.Subscribe(events_pb2.SubscribeRequest(**fields)))
    error = error_of(raised.value)
    assert (type(error), error.field) == (kind, field)


def test_subscribers_are_limited_and_make_room(service):
    log = service.app.registry.get("r").host.events
    first, _ = subscribe(service), subscribe(service)
    until(lambda: service.in_loop(lambda: len(log._subscribers)) == 2)
    with pytest.raises(grpc.RpcError) as raised:
        next(subscribe(service))
    assert isinstance(error_of(raised.value), LimitExceeded)
    first.cancel()
    until(lambda: service.in_loop(lambda: len(log._subscribers)) == 1)


def test_a_deregistered_replica_ends_its_subscribers(service):
    events = subscribe(service)
    followed(service)
    service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))
    with pytest.raises(grpc.RpcError) as raised:
        next(events)
    assert isinstance(error_of(raised.value), NotFound)
