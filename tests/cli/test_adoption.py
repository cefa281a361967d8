"""Service processes that share a store: one ends, another one adopts its replicas, and engines see a pause."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from urllib.parse import urlsplit

import pytest

import kvplane
from kvplane import aio
from kvplane.base.errors import Moved
from kvplane.base.events import EventBatch
from kvplane.base.step import End, EventKind
from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.reopening import Revival
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_service.store.json_api import Endpoint
from tests.cli.test_restart import wait_until_stored
from tests.cli.test_serve import serving
from tests.client.lasting import HYBRID, LastingEngine, PageMemory
from tests.service.rig import WAIT_S
from tests.store import apiserver, servers

LEASE_MS = 1500  # a call of the table may last a third of it; a busy machine needs 0.3 s for one


@dataclass
class Fleet:
    """Two services on one Redis, and on one Lease if there is an API server; each can end and start again."""

    store: str
    api: Endpoint | None = None
    addresses: list[str] = field(default_factory=lambda: [f"127.0.0.1:{servers.free_port()}" for _ in range(2)])
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, number: int):
        settings: tuple[str, ...] = (f"store=redis://{self.store}", "store_flush_ms=5", f"owner_lease_ms={LEASE_MS}")
        variables = {}
        if self.api is not None:
            lease = f"ownership=lease:{apiserver.NAMESPACE}/{apiserver.NAME}"
            settings += (lease, f"ownership_ca={self.api.ca}", f"ownership_token={self.api.token}")
            at = urlsplit(self.api.url)
            variables = {"KUBERNETES_SERVICE_HOST": str(at.hostname), "KUBERNETES_SERVICE_PORT": str(at.port)}
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        process, _ = self.stack.enter_context(serving(*arguments, listen=self.addresses[number], **variables))
        return process

    def owner(self) -> int:
        """The number of the service that owns the replica."""
        for number, address in enumerate(self.addresses):
            with Client(open_channel(address), timeout_s=1.0) as client:
                try:
                    client.describe_replica("r")
                except (Moved, kvplane.Unavailable):
                    continue
                return number
        raise AssertionError("no service owns the replica")

    def wait_for_owner(self, number: int) -> None:
        servers.wait_until(lambda: self.owner() == number, f"service {number} has the replica")


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with servers.serving(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return servers.make_certificates(tmp_path_factory.mktemp("certificates")).parent


@pytest.fixture(params=["store", "lease"])
def fleet(redis, request, tmp_path, certificates):
    redis.client().flushall()
    fleet = Fleet(redis.address)
    with fleet.stack:
        if request.param == "lease":
            _, fleet.api = fleet.stack.enter_context(apiserver.serving(tmp_path, certificates))
        yield fleet


@contextmanager
def an_engine(fleet) -> Iterator[LastingEngine]:
    """An engine with published keys on the first service; its client tries the second one first."""
    with kvplane.connect(fleet.addresses[0]) as client:
        client.register_replica("r", HYBRID)
    with kvplane.connect(",".join(reversed(fleet.addresses))) as client:
        engine = LastingEngine(lambda revive: client.lasting_session("r", revive), HYBRID.num_blocks, resumes=True)
        for _ in range(12):
            engine.step()
        wait_until_stored(client)
        yield engine
        engine.session.close()


def test_replicas_of_a_killed_service_are_adopted_twice(fleet):
    first, second = fleet.start(0), fleet.start(1)
    with an_engine(fleet) as engine:
        first.kill()
        first.wait()
        engine.step()
        assert (fleet.owner(), engine.revivals) == (1, 1)
        while not engine.hits_since_revival:
            engine.step()
        fleet.start(0)
        second.kill()
        second.wait()
        engine.run()
        assert (fleet.owner(), engine.revivals) == (0, 2)


def test_a_draining_service_hands_over_its_replicas(fleet):
    first = fleet.start(0)
    fleet.start(1)
    with an_engine(fleet) as engine:
        first.send_signal(signal.SIGTERM)
        while fleet.owner() == 0:
            engine.step()
        _, logged = first.communicate(timeout=15)  # less than drain_grace_ms, the limit for engines that stay
        assert (first.returncode, engine.session.draining) == (0, False), logged
        assert engine.revivals
        assert not engine.log[-1].preempted, "requests keep their blocks"
        assert engine.running
        engine.run()
        assert engine.hits_since_revival > 0


@pytest.mark.parametrize("fleet", ["store"], indirect=True)  # with a Lease the client is first sent to the killed one
def test_a_host_name_with_two_addresses_is_used_as_a_list(fleet):
    if not has_ipv6():
        pytest.skip("this machine has no IPv6, so localhost has one address")
    port = fleet.addresses[0].rpartition(":")[2]
    fleet.addresses = [f"127.0.0.1:{port}", f"[::1]:{port}"]
    processes = [fleet.start(number) for number in range(2)]
    with kvplane.connect(f"localhost:{port}", retry=RetryPolicy(attempts=20)) as client:
        client.register_replica("r", HYBRID)
        owner = fleet.owner()
        processes[owner].kill()
        processes[owner].wait()
        assert client.describe_replica("r").replica == "r"
        assert fleet.owner() == 1 - owner


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_an_asyncio_session_and_a_subscriber_follow_an_adopted_replica(fleet):
    first = fleet.start(0)
    fleet.start(1)
    with kvplane.connect(fleet.addresses[0]) as client:
        client.register_replica("r", HYBRID)
    memory = PageMemory(HYBRID.num_blocks)
    batches: SimpleQueue[EventBatch] = SimpleQueue()

    async def move_to_the_other() -> None:
        async with aio.connect(",".join(reversed(fleet.addresses))) as client:
            session = await client.lasting_session("r", lambda: Revival(tuple(memory.stamps), memory.incarnation))
            epoch = session.epoch
            await serve(session)
            assert batches.get(timeout=WAIT_S).events
            first.send_signal(signal.SIGTERM)
            while session.epoch == epoch:
                await session.apply(kvplane.Part())
            await serve(session)
            await session.close()

    async def serve(session) -> None:
        tokens = [session.epoch] * 40
        for part in (part_of(NewsRow(0, tokens), AdmitRow(0)), part_of(FactRow(0, end=End.FREE)), kvplane.Part()):
            memory.carry_out((await session.apply(part)).parts[0])

    with subscribed(fleet.addresses[1] + "," + fleet.addresses[0], batches):
        asyncio.run(move_to_the_other())
        received = [batches.get(timeout=WAIT_S)]
        while not received[-1].events or received[-1].events[0].kind is not EventKind.STORED:
            received.append(batches.get(timeout=WAIT_S))
    assert any(batch.gap for batch in received), "another service has its own batch numbers"


@contextmanager
def subscribed(addresses: str, batches: SimpleQueue[EventBatch]) -> Iterator[None]:
    """A subscriber in a thread, from the first batch."""
    with kvplane.connect(addresses, retry=RetryPolicy(attempts=200, max_delay_s=0.05)) as client:

        def listen() -> None:
            with suppress(kvplane.KvplaneError):
                for batch in client.subscribe("r", 0):
                    batches.put(batch)

        thread = threading.Thread(target=listen)
        thread.start()
        yield
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_resumed_former_owner_gives_up_its_replica(fleet):
    """It claims the replica until it reads the record; no engine uses it, and it gives up."""
    first, second = fleet.start(0), fleet.start(1)
    with an_engine(fleet) as engine, Client(open_channel(fleet.addresses[1])) as client:
        first.send_signal(signal.SIGSTOP)
        servers.wait_until(lambda: is_owned(client), "the second service adopts")
        cut(engine.session)
        engine.step()
        epoch = engine.session.epoch
        first.send_signal(signal.SIGCONT)
        for _ in range(10):
            engine.step()
        fleet.wait_for_owner(1)
        assert engine.session.epoch == epoch
        wait_until_stored(client)
        second.kill()
        second.wait()
        hits = engine.num_hit
        engine.run()
        assert fleet.owner() == 0
        assert engine.num_hit > hits


def cut(session: kvplane.Session) -> None:
    """As gRPC's keepalive does in half a minute."""
    transport = session._transport
    assert isinstance(transport, kvplane.GrpcTransport)
    transport._drop()


def is_owned(client) -> bool:
    try:
        client.describe_replica("r")
    except (Moved, kvplane.Unavailable):  # Unavailable: the table of owners did not answer in time
        return False
    return True
