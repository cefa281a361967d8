"""The asyncio client against a whole service."""

from __future__ import annotations

import asyncio
import inspect

import pytest

import kvplane
from kvplane import aio
from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvplane.base.requests import Allocate, Appended, Commit, Content
from kvplane.base.session import OpenRequest
from kvplane.base.step import EventKind, Part
from kvplane.rpc.channel import open_aio_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.rows import AdmitRow, NewsRow, RunRow, part_of
from kvplane.v1 import allocation_pb2 as pb
from tests.client.loop_thread import on_shared_loop, shared_loop
from tests.client.mini_engine import HYBRID, spec_of

PROMPT = Content(token_ids=range(40))
ASK = part_of(NewsRow(0, range(40)), AdmitRow(0, cap=20))


@pytest.fixture
def client(world):
    client = shared_loop().make(aio.connect, world.service.address)
    yield client
    shared_loop().do(client.close)


def methods(kind):
    return {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(kind).items()
        if not name.startswith("_") and callable(value)
    }


def test_both_clients_have_the_same_calls():
    assert methods(aio.Client) == methods(kvplane.Client)


def test_both_sessions_have_the_same_calls():
    mine = methods(aio.Session)
    assert mine.pop("open") == ["self", "heartbeats"]
    assert mine == methods(kvplane.Session)


@on_shared_loop
async def test_a_request_from_lookup_to_hit(client, name):
    assert (await client.find_cache_hit(name, PROMPT)).hit_tokens == 0
    first = await client.allocate_slots(name, Allocate("a", PROMPT))
    assert first.status == pb.ALLOCATION_STATUS_GRANTED
    await client.commit_blocks(name, Commit("a", appended=Appended(token_ids=[7])))
    await client.free(name, "a")
    assert (await client.find_cache_hit(name, PROMPT)).hit_tokens == 32
    await client.evict_blocks(name, [1])
    assert (await client.reset_prefix_cache(name)).done
    assert (await client.snapshot(name, summary=True)).num_free_blocks == HYBRID.num_blocks - 1


@on_shared_loop
async def test_replicas_can_be_registered_listed_and_removed(client, name):
    for one in ("many/1", "many/2"):
        await client.register_replica(one, spec_of(num_blocks=4))
    assert [one.replica async for one in client.list_replicas(page_size=1)] == ["many/1", "many/2", name]
    for one in ("many/1", "many/2"):
        await client.deregister_replica(one)
    with pytest.raises(NotFound):
        await client.describe_replica("many/1")


@on_shared_loop
async def test_a_session_with_a_subscription_to_its_events(client, name):
    batches = client.subscribe(name, after_seq=0)
    async with await client.session(name) as session:
        assert (await session.apply(ASK)).parts[0].admit_granted == [20]
        await session.apply(part_of(RunRow(0)))
        batch = await anext(batches)
        assert [event.kind for event in batch.events] == [EventKind.STORED, EventKind.STORED]
        with pytest.raises(InvalidArgument):
            await session.apply(part_of(RunRow(9)))
    await batches.aclose()
    with pytest.raises(NotFound):
        await anext(client.subscribe("unknown"))


@on_shared_loop
async def test_a_cancelled_receive_breaks_the_stream_and_not_the_session(client, name):
    async with await client.session(name) as session:
        while True:
            await session.submit(kvplane.Part())
            receiving = asyncio.create_task(session.receive())
            await asyncio.sleep(0)
            if receiving.cancel():
                break
            await receiving  # the answer was there before
        with pytest.raises(asyncio.CancelledError):
            await receiving
        while session.in_flight:
            await session.receive()
        assert (await session.apply(ASK)).parts[0].admit_granted == [20]
        assert (await session.apply(part_of(RunRow(0)))).parts[0].granted == [20]


@on_shared_loop
async def test_an_unreachable_service_raises_unavailable(tmp_path):
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    policy = RetryPolicy(attempts=2, first_delay_s=0.001)
    channel = open_aio_channel(f"unix:{tmp_path}/nothing")
    async with aio.Client(channel, retry=policy, pause=pause) as client:
        with pytest.raises(Unavailable):
            await client.describe_replica("x")
        with pytest.raises(Unavailable):
            await anext(client.subscribe("x"))
        with pytest.raises(Unavailable):
            await client.session("x", retry=policy)
    assert len(pauses) == 6


@on_shared_loop
async def test_a_session_that_did_not_open_refuses_calls(tmp_path):
    once = RetryPolicy(attempts=1)
    async with open_aio_channel(f"unix:{tmp_path}/nothing") as channel:
        session = aio.Session(aio.GrpcTransport(channel), OpenRequest("x", 1), retry=once)
        with pytest.raises(Unavailable):
            await session.open()
        with pytest.raises(FailedPrecondition, match="not open"):
            await session.apply(Part())
        with pytest.raises(FailedPrecondition, match="not open"):
            assert session.epoch
        await session.close()


@on_shared_loop
async def test_open_has_a_deadline():
    connected: list[asyncio.StreamWriter] = []  # a writer that is dropped closes its connection, from Python 3.13 on
    server = await asyncio.start_server(lambda _, writer: connected.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = open_aio_channel(f"127.0.0.1:{port}")
    transport = aio.GrpcTransport(channel, open_timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"not answer within 0\.2 s"):
        await transport.open(OpenRequest("x", 1))
    await transport.close()
    await channel.close()
    for writer in connected:
        writer.close()
    server.close()


@on_shared_loop
async def test_a_closed_client_refuses_calls(world, name):
    client = aio.connect(world.service.address)
    session = await client.session(name, retry=RetryPolicy(attempts=1, first_delay_s=0.001))
    await client.close()
    for call in (client.describe_replica(name), anext(client.subscribe(name)), client.session(name)):
        with pytest.raises(FailedPrecondition, match="closed"):
            await call
    with pytest.raises(FailedPrecondition, match="closed"):
        await session.apply(Part())
    await session.close()
