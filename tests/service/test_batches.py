"""A batch of events is encoded to the message that its events give one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane import wire
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane.v1 import events_pb2
from kvplane_core.face.cache_events import CacheEvents
from kvplane_service.replicas.events import Batch
from kvplane_service.rpc.events import encode_batch

DIGESTS = st.sampled_from([b"a" * 16, b"b" * 32, b"c" * 16, b""])
KEYS = st.tuples(st.sampled_from(["", "blue", "x" * 300]), st.integers(0, 300), DIGESTS)
REMOVED = st.tuples(st.integers(0, 2**32 - 1), st.lists(KEYS, max_size=3), st.sampled_from(list(RemoveReason)))
STORED = st.builds(
    CacheEvent,
    st.sampled_from([EventKind.STORED, EventKind.CLEARED]),
    st.integers(0, 9),
    st.lists(DIGESTS, min_size=2, max_size=2).map(tuple),
    st.just((1, 1 << 20)),
    parent=DIGESTS,
    block_starts=st.just((0, 16)),
)


@given(st.lists(REMOVED | STORED, max_size=12), st.booleans())
def test_encoded_batch_equals_its_events(changes, gap):
    events = CacheEvents()
    for change in changes:
        if isinstance(change, CacheEvent):
            events.append(change)
        else:
            events.removed(*change)
    one_by_one = events_pb2.SubscribeResponse(seq=7, epoch=1 << 40, gap=gap)
    one_by_one.events.extend(map(wire.encode_event, events))
    message = encode_batch(Batch(7, 1 << 40, events, gap=gap))
    assert events_pb2.SubscribeResponse.FromString(message) == one_by_one
    assert len(events) == len(list(events)) == len(one_by_one.events)
