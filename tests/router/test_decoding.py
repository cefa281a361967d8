"""Payloads of engines, good and bad: one bad event costs only itself, and each fault is counted by its name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.wire.events import Batch, Cleared, GroupFormat, Removed, Stored, Tier
from kvplane_fleet.wire.frames import END, Frame, is_replay_end, parse_live, parse_replay
from kvplane_fleet.wire.msgpack import MAX_PAYLOAD_BYTES, BatchDecoder
from tests.router.fleets import finished

encode = msgspec.msgpack.encode
FULL = GroupFormat("full_attention", 16, 0)


def stored(**fields):
    return {
        "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": list(range(32)),
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields  # fmt: skip


def removed(**fields):
    return {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0} | fields


GOOD = [Removed(0, Tier.DEVICE, [11]), Cleared()]
GOOD_WIRE = [removed(), {"type": "AllBlocksCleared"}]


def decode(payload) -> tuple[Any, Counter[Fault]]:
    faults = Faults()
    return finished(BatchDecoder(faults).decoding(payload)), faults.counts


def test_maps_and_arrays_decode_to_equal_events():
    maps = [stored(), stored(medium="CPU", group_idx=2, kv_cache_spec_kind="mamba"), *GOOD_WIRE]
    head = ["BlockStored", [11, 12], None, list(range(32)), 16, None]
    arrays = [
        [*head, "GPU", None, None, 0, "full_attention", None],
        [*head, "CPU", None, None, 2, "mamba", None],
        ["BlockRemoved", [11], "GPU", 0],
        ["AllBlocksCleared"],
    ]
    first, second = (decode(encode([5.5, events, 3])) for events in (maps, arrays))
    assert first == second
    batch, counts = first
    assert (batch.time_s, batch.rank, counts) == (5.5, 3, Counter())
    assert [(one.group, one.tier, one.keys, one.form) for one in batch.events[:2]] == [
        (0, Tier.DEVICE, [11, 12], FULL),
        (2, Tier.HOST, [11, 12], GroupFormat("mamba", 16, 0)),
    ]
    assert batch.events[2:] == GOOD


def test_sglang_events_have_signed_hashes_and_metadata():
    event = ["BlockStored", [-1, 5], -2, [1] * 8, 4, None, "CPU_PINNED", {"cache_salt": "a"}]
    batch, counts = decode(encode([1.0, [event]]))
    assert batch.events[0].keys == [(1 << 64) - 1, 5]
    assert batch.events[0].tier is Tier.HOST
    assert batch.events[0].evidence.parent == (1 << 64) - 2
    assert not batch.events[0].evidence.plain
    assert not counts


def test_whole_digests_have_the_key_in_their_last_bytes():
    digest = bytes(range(32))
    batch, _ = decode(encode([1.0, [stored(block_hashes=[digest, digest[:16]])]]))
    assert batch.events[0].keys == [int.from_bytes(digest[16:], "big"), int.from_bytes(digest[:16], "big")]
    assert batch.events[0].key_bytes == batch.events[0].evidence.key_bytes == 16


def test_tokens_are_left_alone_unless_wanted():
    decoder = BatchDecoder(Faults())
    decoder.want_tokens = False
    batch: Any = finished(decoder.decoding(encode([1.0, [stored(token_ids=[1.5])]])))
    assert batch.events[0].evidence is None


LOST_STORES = [
    (stored(block_hashes=[-(1 << 63), 1.5]), Fault.HASH_INVALID),
    (stored(block_hashes=[b""]), Fault.HASH_INVALID),
    (stored(block_hashes=[b"x" * 33]), Fault.HASH_INVALID),
    (stored(block_hashes=[True]), Fault.HASH_INVALID),
    (stored(block_hashes=[1, b"x" * 32]), Fault.HASH_INVALID),
    (stored(block_hashes=[b"x" * 32, 1]), Fault.HASH_INVALID),
    (stored(block_hashes=None), Fault.HASH_INVALID),
    (stored(block_hashes=[7] * ((1 << 17) + 1)), Fault.TOO_MANY_HASHES),
    (stored(block_size=0, group_idx=None), Fault.BLOCK_SIZE_INVALID),
    (stored(block_size=-16), Fault.BLOCK_SIZE_INVALID),
    (stored(block_size=1 << 40), Fault.BLOCK_SIZE_INVALID),
    (stored(block_size="16"), Fault.BLOCK_SIZE_INVALID),
    (stored(group_idx=10**9), Fault.GROUP_INVALID),
    (stored(group_idx=-1), Fault.GROUP_INVALID),
    (stored(group_idx="0"), Fault.GROUP_INVALID),
    (stored(kv_cache_spec_kind="telepathy"), Fault.KIND_UNKNOWN),
    (stored(kv_cache_spec_kind=5), Fault.KIND_UNKNOWN),
    (stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=0), Fault.WINDOW_INVALID),
    (stored(kv_cache_spec_sliding_window=-1), Fault.WINDOW_INVALID),
    (stored(kv_cache_spec_sliding_window="w"), Fault.WINDOW_INVALID),
    (stored(medium=""), Fault.MEDIUM_UNKNOWN),
    (stored(medium="DISK7"), Fault.MEDIUM_UNKNOWN),
    (stored(medium=7), Fault.MEDIUM_UNKNOWN),
    ({"type": "BlockMoved", "block_hashes": [1]}, Fault.EVENT_UNKNOWN),
    (["BlockMoved"], Fault.EVENT_UNKNOWN),
    ({"block_hashes": [1]}, Fault.EVENT_UNTYPED),
    ([], Fault.EVENT_UNTYPED),
    (7, Fault.EVENT_UNTYPED),
    (None, Fault.EVENT_UNTYPED),
]


@pytest.mark.parametrize(("event", "fault"), LOST_STORES, ids=str)
def test_a_bad_event_is_counted_and_the_others_of_its_batch_are_kept(event, fault):
    batch, counts = decode(encode([1.0, [event, *GOOD_WIRE], 0]))
    assert batch.events == GOOD
    assert counts == {fault: 1}


@pytest.mark.parametrize("fields", [{"lookahead_token_ids": 5}, {"token_ids": [-1] * 32}], ids=str)
def test_content_that_cannot_be_read_proves_nothing_and_its_blocks_are_kept(fields):
    batch, counts = decode(encode([1.0, [stored(**fields)], 0]))
    assert [(one.keys, one.evidence) for one in batch.events] == [([11, 12], None)]
    assert counts == {Fault.TOKENS_INVALID: 1}


@pytest.mark.parametrize("fields", [{"block_hashes": ["x"]}, {"block_hashes": [b"7"]}, {"group_idx": 64}], ids=str)
def test_a_removal_that_cannot_be_read_clears(fields):
    batch, counts = decode(encode([1.0, [removed(**fields)], 0]))
    assert batch.events == [Cleared()]
    assert counts.total() == 1


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [-1], [1 << 40]], ids=str)
def test_invalid_tokens_cost_the_evidence_alone(tokens):
    batch, counts = decode(encode([1.0, [stored(token_ids=tokens)]]))
    assert (batch.events[0].keys, batch.events[0].evidence, counts) == ([11, 12], None, {Fault.TOKENS_INVALID: 1})


@pytest.mark.parametrize("medium", ["GPU", "gpu", None])
def test_names_of_media_are_read_in_any_case(medium):
    assert decode(encode([1.0, [removed(medium=medium)]]))[0].events == GOOD[:1]


NO_BATCHES = [
    (b"", Fault.NOT_MSGPACK),
    (b"\xc1", Fault.NOT_MSGPACK),
    (encode([1.0, [stored()], 0])[:-20], Fault.NOT_MSGPACK),
    (encode([1.0, [], 0]) + b"\x00", Fault.NOT_MSGPACK),
    (b"\x91" * 100 + b"\x90", Fault.BATCH_INVALID),
    (b"\x91" * 100_000 + b"\x90", Fault.NOT_MSGPACK),
    (encode({"ts": 1.0}), Fault.BATCH_INVALID),
    (encode([1.0]), Fault.BATCH_INVALID),
    (encode([1.0, None]), Fault.EVENTS_INVALID),
    (encode([1.0, {"type": "BlockStored"}]), Fault.EVENTS_INVALID),
    (b"\x00" * (MAX_PAYLOAD_BYTES + 1), Fault.PAYLOAD_TOO_LARGE),
]


@pytest.mark.parametrize(("payload", "fault"), NO_BATCHES, ids=lambda one: repr(one)[:40])
def test_what_is_no_batch_is_counted(payload, fault):
    assert decode(payload) == (None, {fault: 1})


@pytest.mark.parametrize(
    ("time_s", "rank", "fault"),
    [("now", 0, Fault.TIME_INVALID), (1.0, -1, Fault.RANK_INVALID), (1.0, "a", Fault.RANK_INVALID)],
)
def test_invalid_time_and_rank_keep_the_events(time_s, rank, fault):
    batch, counts = decode(encode([time_s, GOOD_WIRE, rank]))
    assert (batch.events, counts) == (GOOD, {fault: 1})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
)
FIELDS = st.sampled_from([*stored(), "extra_keys", "lookahead_token_ids", "type"])
EVENTS = st.builds(lambda fields: stored(**fields), st.dictionaries(FIELDS, VALUES, max_size=4)) | VALUES


@given(st.lists(EVENTS, max_size=4), VALUES, st.data())
def test_no_payload_raises_and_every_loss_is_counted(events, rank, data):
    payload = bytearray(encode([1.0, events, rank]))
    if data.draw(st.booleans()):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    batch, counts = decode(bytes(payload))
    assert isinstance(batch, Batch) or counts.total() == 1
    for event in batch.events if batch else ():
        if isinstance(event, Stored | Removed):
            assert all(0 <= key < 1 << 64 for key in event.keys)


def parsed(parse, *arguments):
    faults = Faults()
    return parse(*arguments, faults), dict(faults.counts)


def test_frames_are_parsed():
    seq = (7).to_bytes(8, "big")
    frame = Frame(7, b"p")
    assert parsed(parse_live, [b"t", seq, b"p"]) == (frame, {})
    assert parsed(parse_replay, [b"", b"t1", seq, b"p"], b"t") == (frame, {})
    assert parsed(parse_replay, [b"", seq, b"p"], b"t") == (frame, {}), "SGLang"
    assert is_replay_end([b"", b"", END, b""])
    assert is_replay_end([b"", END, b""])
    assert not is_replay_end([b"", b"t", seq, b""])


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([], Fault.FRAME_COUNT),
        ([b"t", b"\0" * 8], Fault.FRAME_COUNT),
        ([b"t", b"\0" * 8, b"p", b"q"], Fault.FRAME_COUNT),
        ([b"t", b"\0" * 7, b"p"], Fault.SEQUENCE_BYTES),
        ([b"t", b"\0" * 9, b"p"], Fault.SEQUENCE_BYTES),
        ([b"t", b"\xff" * 8, b"p"], Fault.SEQUENCE_RANGE),
    ],
)
def test_bad_frames_are_counted(parts, fault):
    assert parsed(parse_live, parts) == (None, {fault: 1})


def test_a_replay_of_another_topic_is_counted():
    assert parsed(parse_replay, [b"", b"x", b"\0" * 8, b"p"], b"t") == (None, {Fault.TOPIC_FOREIGN: 1})
