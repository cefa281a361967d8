"""What a payload of a hostile engine costs, per byte of it."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
import tracemalloc
from dataclasses import replace

import msgspec
import pytest
import zmq.asyncio

from kvplane.base.groups import HashAlgorithm
from kvplane.base.step import ExtraKeys
from kvplane_fleet.domains import Domain, DomainProof
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.follow import zmq_source
from kvplane_fleet.follow.zmq_source import ZmqSource
from kvplane_fleet.index import Index
from kvplane_fleet.native import make_index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import MAX_BLOCK_SIZE, Evidence
from kvplane_fleet.wire.msgpack import MAX_PAYLOAD_BYTES, MOST_EVIDENCE
from tests.router.engine import batches
from tests.router.fleets import finished
from tests.router.publisher import Publisher
from tests.store.servers import free_port

WITHIN_S = 30
encode = msgspec.msgpack.encode
SIZE = MAX_PAYLOAD_BYTES - 4096
MOST_S = 3.0  # of CPU for one payload; a good one of this size takes about 0.3, on a loaded machine up to 1
MOST_MEMORY = 12  # bytes of memory for each of the payload
FIXED_MEMORY = 16 << 20  # of the most events, whatever their length
TIME = b"\xcb" + struct.pack(">d", 1.0)


def array(number):
    return b"\xdd" + struct.pack(">I", number)


def batch(number, events):
    return b"\x93" + TIME + array(number) + events + b"\x00"


def many(one, size=SIZE):
    return batch(size // len(one), one * (size // len(one)))


def with_field(name, value, **fields):
    """A batch of one stored block, of which one field is given packed."""
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16, "medium": "GPU",
             "group_idx": 0, "token_ids": [], **fields}  # fmt: skip
    event.pop(name, None)
    head = encode(event)
    return batch(1, bytes([head[0] + 1]) + head[1:] + encode(name) + value)


def of_blocks(size, count=4):
    hashes = [size * 10 + at for at in range(count)]
    number = size * count
    return with_field("token_ids", array(number) + b"\x01" * number, block_size=size, block_hashes=hashes)


def each(event, most=1 << 16):
    """A batch of as many events as are allowed, of one key each."""
    one = encode(event)
    number = min(SIZE // len(one), most)
    return batch(number, b"".join(encode([*event[:1], [key << 40 | key], *event[2:]]) for key in range(number)))[:SIZE]


NOTHING = array(SIZE - 300) + b"\x90" * (SIZE - 300)
PAYLOADS = {
    "events that are none": many(b"\x90"),
    "as many as are read": batch(1 << 16, b"\x90" * (1 << 16)),
    "maps that are none": batch(1 << 16, (b"\x81\xa1x\xb4" + b"y" * 20) * (1 << 16)),
    "clears": many(encode({"type": "AllBlocksCleared"})),
    "clears of few bytes": batch(1 << 16, b"\x91\xb0AllBlocksCleared" * (1 << 16)),
    "stores and clears": batch(
        1 << 15,
        (encode({"type": "AllBlocksCleared"}) + encode({"type": "BlockRemoved", "block_hashes": [1]})) * (1 << 14),
    ),
    "hashes": with_field("block_hashes", NOTHING.replace(b"\x90", b"\x01")),
    "hashes that are lists": with_field("block_hashes", NOTHING),
    "tokens": with_field("token_ids", NOTHING.replace(b"\x90", b"\x01")),
    "tokens that are lists": with_field("token_ids", NOTHING),
    "extra keys": with_field("extra_keys", NOTHING),
    "lookahead": with_field("lookahead_token_ids", NOTHING),
    "a name": with_field("lora_name", NOTHING),
    "an unknown field": with_field("of_a_later_version", NOTHING),
    "one event of lists": batch(1, NOTHING),
    "no batch": NOTHING,
    "a batch that is a map": b"\xdf" + struct.pack(">I", 1 << 19) + b"\x01\x90" * (1 << 19),
    "a time of lists": b"\x93" + NOTHING + b"\x90\x00",
    "deep": b"\x93" + TIME + b"\x91" * (SIZE - 20),
    "stated longer than it is": batch(1 << 31, b"\x90"),
    "blocks with 192 divisors": of_blocks(360360),
    "blocks with 72 divisors": of_blocks(10080),
    "blocks of a million": of_blocks(MAX_BLOCK_SIZE, 1),
    "stores": each(["BlockStored", [1 << 60], None, [], 16, None, "GPU", None, None, 0]),
    "removals": each(["BlockRemoved", [1 << 60], "GPU", 0]),
    "removals and one that cannot be read": batch(40_000, encode(["BlockRemoved", [1], "GPU", 0]) * 39_999 + b"\x90"),
    "proofs": batch(1 << 10, of_blocks(5040, 1)[15:-1] * (1 << 10))[:SIZE],
}


LONG = {"stores", "removals", "removals and one that cannot be read"}


@pytest.fixture(params=[make_index, Index], ids=["selected", "python"])
def place(request):
    return Place(PlaceSettings("hostile", events="inproc://x"), request.param())


@pytest.mark.parametrize("name", sorted(PAYLOADS.keys() - LONG))
def test_a_payload_costs_no_more_than_its_length_allows(name, place):
    payload = PAYLOADS[name]
    assert len(payload) <= MAX_PAYLOAD_BYTES
    began_s = time.process_time()
    finished(place.applying(payload))
    assert time.process_time() - began_s < MOST_S
    tracemalloc.start()
    finished(place.applying(payload[:-1] + b"\x01"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_MEMORY * len(payload) + FIXED_MEMORY


@pytest.mark.parametrize("name", sorted(LONG))
def test_a_payload_of_many_events_holds_the_loop_for_a_slice_at_a_time(name, place):
    gc.disable()  # a router makes full collections rare
    try:
        spent_s, work, began_s = list[float](), place.applying(PAYLOADS[name]), time.thread_time()
        for _ in work:
            spent_s.append(time.thread_time() - began_s)
            began_s = time.thread_time()
    finally:
        gc.enable()
    assert place.stores + place.removals > 30_000
    assert max(spent_s) < sum(spent_s) / 5
    assert sum(spent_s) < MOST_S


def test_blocks_with_many_divisors_are_proven_by_several_events():
    """The last domain that is compared is found too: the next event continues where the last one ended."""
    algorithms = (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR)
    truth = Domain(algorithms[-1], "", 1)
    proof, size, events = DomainProof(algorithms, ""), 2520, 0
    tokens = list(range(size))
    while proof.domain is None and events < 100:
        proof.observe([truth.keys(tokens)[-1]], size, Evidence(tokens, None, plain=True))
        events += 1
    assert proof.domain == truth
    assert events > 2


def test_first_blocks_of_adapters_cost_a_bounded_time():
    """An event of an adapter is hashed in Python, block by block, and its domain may have blocks of one token."""
    proof, size = DomainProof((HashAlgorithm.SHA256,), "", {"sql": "/p"}), 1 << 16
    tokens = list(range(size))
    proof.observe(Domain(HashAlgorithm.SHA256, "", 1).keys(tokens[:4]), 1, Evidence(tokens[:4], None, plain=True))
    evidence = Evidence(tokens, None, plain=False, extra=ExtraKeys(lora=("sql", "")))
    began_s = time.process_time()
    for _ in range(MOST_EVIDENCE):
        proof.observe([1], size, evidence)
        proof.observe([1], 2048, replace(evidence, tokens=tokens[:2048]))
    assert time.process_time() - began_s < MOST_S
    assert proof.differing == {"sql"}


async def test_a_place_that_costs_too_much_is_given_up_by_name_and_others_are_not(monkeypatch, caplog):
    monkeypatch.setattr(zmq_source, "CPU_BURST_S", 0.2)
    monkeypatch.setattr(zmq_source, "CPU_SHARE", 0.01)
    addresses = {name: (f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}") for name in ("bad", "good")}
    fleet, context, sources = Fleet(), zmq.asyncio.Context(), dict[str, ZmqSource]()
    with Publisher(context, *addresses["bad"]) as bad, Publisher(context, *addresses["good"]) as good:
        tasks = [asyncio.create_task(one.serve_replays()) for one in (bad, good)]
        for name, (events, replay) in addresses.items():
            source = fleet.add(PlaceSettings(name, events=events, replay=replay, model="m")).source
            assert isinstance(source, ZmqSource)
            source.given_up_s = 0.5
            sources[name] = source
        tasks += [asyncio.create_task(fleet.follow(name, context)) for name in addresses]
        await asyncio.wait_for(fleet.wait_until_current(), WITHIN_S)
        await good.publish(1.0, next(batches(1)))
        payload = PAYLOADS["as many as are read"]

        async def flood():
            for sequence in range(10**6):
                await bad._pub.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
                await asyncio.sleep(0.01)

        tasks.append(flooding := asyncio.create_task(flood()))
        async with asyncio.timeout(WITHIN_S):
            while fleet.followed["bad"].state != "given up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert fleet.followed["bad"].place.faults.counts[Fault.COSTS_TOO_MUCH] == 1
            assert addresses["bad"][0] in caplog.text
            assert "given up" in caplog.text
            assert fleet.followed["good"].state == "current"
            assert fleet.followed["good"].place.entries
            flooding.cancel()
            sources["bad"]._live._burst_s = sources["bad"]._live.left_s = 20.0
            while fleet.followed["bad"].state != "current":  # noqa: ASYNC110  # it is followed again
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
