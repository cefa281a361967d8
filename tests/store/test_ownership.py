"""Services in one process on one store: adoption, release, giving up, and wrong owners in the store."""

from __future__ import annotations

import asyncio
import itertools
import socket
from copy import deepcopy
from typing import Any

import pytest

from kvplane.base.errors import LimitExceeded, Moved, NotFound, Unavailable
from kvplane.base.session import OpenRequest
from kvplane.base.step import End, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry, UnknownReplica
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.interface import ALIVE, BlockingSharedStore, StoredChunk
from kvplane_service.store.keeper import Entropy, Keeper
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import Offloaded, OffloadedShared
from kvplane_service.store.owners import Owners, OwnerUnknown, StoreOwners
from kvplane_service.store.ownership import Ownership, is_gone
from kvplane_service.store.registration import unpack_record
from kvplane_service.store.sqlite import SqliteStore
from kvplane_service.store.writer import Runtime, StoreWriter
from tests.client.lasting import HYBRID, ONE_GROUP
from tests.store.test_restart import NONCES, inline, no_pause
from tests.twins import weakened

LEASE_MS = 1000


class Clock:
    now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms * 1_000_000


class Net:
    """A store, a clock, and services by address."""

    def __init__(self, store=None) -> None:
        self.clock = Clock()
        self.store = store or MemoryStore(self.clock)
        kind = OffloadedShared if isinstance(self.store, BlockingSharedStore) else Offloaded
        self.awaited = kind(lambda: self.store, inline)
        self.dead: set[str] = set()
        self.draws = itertools.count(5)

    async def is_gone(self, address: str) -> bool:
        return address in self.dead

    def owners(self, keeper: Keeper, runtime: Runtime) -> Owners:
        del runtime
        return StoreOwners(keeper, LEASE_MS, self.is_gone)

    async def service(self, address: str, **config) -> Service:
        service = Service(self, Config(listen=address, store="redis://unused", owner_lease_ms=LEASE_MS, **config))
        await service.keeper.start(self.awaited)
        await service.keeper.load()
        await service.ownership.beat()
        return service

    def owner(self, name: str = "r") -> tuple[str, bool]:
        record = unpack_record(self.store.records_by_name[name])
        return record.owner, record.released


class Service:
    def __init__(self, net: Net, config: Config) -> None:
        self.registry = Registry(config, net.clock)
        runtime = Runtime(net.clock, no_pause, inline, lambda: 0.0)
        self.keeper = Keeper(self.registry, config, runtime, Entropy(lambda: 1, lambda: next(net.draws)))
        owners = net.owners(self.keeper, runtime)
        self.ownership = Ownership(self.registry, config, self.keeper, runtime, owners)

    async def register(self, name: str = "r", spec=HYBRID) -> None:
        self.registry.register(name, Registration(spec))
        await self.keeper.flush(name)

    async def adopt(self, name: str = "r") -> None:
        await self.ownership.ensure_local(name)
        await self.idle()

    async def idle(self) -> None:
        await asyncio.gather(*self.keeper._loads.tasks)
        assert await self.writer.write_all()

    @property
    def writer(self) -> StoreWriter:
        assert self.keeper._writer is not None
        return self.keeper._writer

    def open(self, name: str = "r") -> None:
        self.registry.get(name).host.open(OpenRequest(name, next(NONCES)))

    def publish(self, tokens: range, name: str = "r") -> None:
        """Compute and end a request of these tokens."""
        host = self.registry.get(name).host
        assert host._session is not None
        parts = ([part_of(NewsRow(0, tokens=tokens), AdmitRow(0))], [part_of(FactRow(0, end=End.FREE))])
        for seq, some in enumerate(parts, host.seq + 1):
            host.step(host._session.nonce, Step(host.epoch, seq, some, executed_through=seq - 1), bytes([seq]))

    def state(self, name: str = "r") -> ReplicaState | None:
        return self.registry.get(name).host.state if name in self.registry else None


@pytest.fixture
async def net():
    return Net()


async def pair(net: Net) -> tuple[Service, Service]:
    first, second = await net.service("a:1"), await net.service("b:1")
    await first.register()
    return first, second


async def test_a_live_owner_is_named(net):
    _, second = await pair(net)
    with pytest.raises(Moved) as moved:
        await second.adopt()
    assert moved.value.metadata["address"] == "a:1"
    assert second.state() is None


async def test_an_owner_with_an_expired_lease_is_replaced(net):
    _, second = await pair(net)
    net.clock.now_ms += LEASE_MS
    await second.adopt()
    assert second.state() is ReplicaState.RECOVERING
    assert net.owner() == ("b:1", False)
    second.open()
    assert second.state() is ReplicaState.LIVE


async def test_an_owner_that_renews_its_lease_is_not_replaced(net):
    first, second = await pair(net)
    for _ in range(4):
        net.clock.now_ms += LEASE_MS // 2
        await first.ownership.beat()
    with pytest.raises(Moved):
        await second.adopt()


async def test_an_owner_without_a_listener_is_replaced(net):
    _, second = await pair(net)
    net.dead.add("a:1")
    await second.adopt()
    assert net.owner() == ("b:1", False)


async def test_a_release_is_recorded_and_the_replica_removed(net):
    first, second = await pair(net)
    first.open()
    await first.ownership.leave(["r"])
    assert first.state() is ReplicaState.LIVE, "its engine is still connected"
    with pytest.raises(Moved):
        await second.adopt()
    await first.ownership.release("r")
    assert (first.state(), net.owner()) == (None, ("a:1", True))
    with pytest.raises(Unavailable, match="shutting down"):
        await first.adopt()
    await second.adopt()
    assert net.owner() == ("b:1", False)
    with pytest.raises(Moved):
        await first.adopt()


async def test_a_released_record_comes_after_all_published_entries(net):
    first, _ = await pair(net)
    first.open()
    first.publish(range(40))
    host = first.registry.get("r").host
    put, found = net.store.put_record, dict[bool, int]()

    def put_record(replica, record):
        put(replica, record)
        found[unpack_record(record).released] = sum(map(len, net.store.logs.values()))

    net.store.put_record = put_record
    assert host._session is not None
    host.lost(host._session.nonce)
    await first.ownership.release("r")
    assert found[True] > 0
    assert found[True] == sum(map(len, net.store.logs.values())), "a chunk was written after the record"


def unreadable(log):
    raise StoreUnavailable("not yet")


async def test_a_release_stops_the_load_of_a_replica(net, monkeypatch):
    _, second = await pair(net)
    net.dead.add("a:1")
    monkeypatch.setattr(net.store, "load", unreadable)
    await second.ownership.ensure_local("r")
    keeper = second.keeper
    assert list(keeper._loads.tasks.values()) == ["r"]

    async def write_released(names, expired):
        await asyncio.gather(*keeper._loads.tasks)
        return True

    monkeypatch.setattr(keeper, "_write_released", write_released)
    await keeper.release(["r"], Unavailable("the service is going away"))
    assert (second.state(), keeper._restored) == (None, {})


async def test_an_adoption_continues_when_the_caller_is_cancelled(net):
    first, second = await pair(net)
    await first.ownership.leave(())
    put = net.store.put_record

    def put_record(replica, record):
        net.store.put_record = put
        raise asyncio.CancelledError

    net.store.put_record = put_record
    with pytest.raises(asyncio.CancelledError):
        await second.ownership.ensure_local("r")
    await second.idle()
    second.open()
    assert (second.state(), net.owner()) == (ReplicaState.LIVE, ("b:1", False))


async def test_a_restarted_service_recovers_a_released_replica_unless_adopted(net):
    first, second = await pair(net)
    await first.ownership.leave(())
    again = await net.service("a:1")
    assert again.state() is ReplicaState.RECOVERING
    await again.idle()
    assert net.owner() == ("a:1", False)
    await again.ownership.leave(())
    await second.adopt()
    assert (await net.service("a:1")).state() is None


async def test_of_two_owners_the_one_without_an_engine_gives_up(net):
    first, second = await pair(net)
    first.open()
    host = first.registry.get("r").host
    net.dead.add("a:1")  # as seen from here
    await second.adopt()
    await first.ownership.beat()
    await first.idle()
    assert net.owner() == ("a:1", False), "it has the engine"
    await second.ownership.beat()
    assert (first.state(), second.state()) == (ReplicaState.LIVE, None)
    await second.adopt()
    second.open()
    assert host._session is not None
    host.lost(host._session.nonce)
    await first.ownership.beat()
    assert (first.state(), second.state()) == (None, ReplicaState.LIVE)
    with pytest.raises(Moved):
        host.check_readable()


async def test_a_service_that_gave_up_a_replica_writes_nothing_more(net):
    first, second = await pair(net)
    net.clock.now_ms += LEASE_MS
    await second.adopt()
    await first.ownership.beat()
    assert first.state() is None
    await first.idle()
    assert net.owner() == ("b:1", False)


async def stopped_and_replaced(net: Net) -> tuple[Service, Service]:
    """A process that is stopped while its engine moves to another one at the same address, and resumes."""
    first = await net.service("a:1")
    await first.register()
    first.open()
    first.publish(range(40))
    await first.idle()
    second = await net.service("a:1")
    await second.idle()
    second.open()
    for start in (40, 120, 160):
        second.publish(range(start, start + 40))
        await second.idle()  # one chunk each
    return first, second


async def logs_before_and_after_the_first_resumes(net: Net) -> tuple[Any, Any]:
    first, _ = await stopped_and_replaced(net)
    before = deepcopy(net.store.logs)
    first.publish(range(80, 120))
    first.writer._watched["r"].journal.resync()
    for _ in range(2):
        await first.writer.write_all()
    assert first.state() is ReplicaState.LIVE, "the store does not decide which service has the engine"
    return before, net.store.logs


async def test_a_resumed_process_trims_no_chunk_of_its_successor(net):
    before, after = await logs_before_and_after_the_first_resumes(net)
    assert after == before
    with weakened("a process that continues trims the log"):
        before, after = await logs_before_and_after_the_first_resumes(Net())
        assert after != before


async def test_a_resumed_process_without_an_engine_gives_up_the_replica(net):
    first, second = await stopped_and_replaced(net)
    first.publish(range(80, 120))
    host = first.registry.get("r").host
    assert host._session is not None
    host.lost(host._session.nonce)
    await first.writer.write_all()
    assert (first.state(), second.state()) == (None, ReplicaState.LIVE)


async def test_a_process_with_the_engine_replaces_late_chunks_of_an_earlier_one(net):
    _, second = await stopped_and_replaced(net)
    (log,) = net.store.logs
    net.store.append(log, StoredChunk(1 << 50, b"late"), 0)
    second.publish(range(80, 120))
    await second.idle()
    assert min(net.store.logs[log]) > 1 << 50
    third = await net.service("a:1")
    await third.idle()
    recovering = third.registry.get("r").host.recovering
    assert recovering is not None
    published = second.registry.get("r").host.replica.entries()
    assert sum(map(len, recovering.entries)) == len(published) > 0


async def test_a_lost_record_is_written_again(net):
    first, _ = await pair(net)
    net.store.records_by_name.clear()
    await first.ownership.beat()
    await first.idle()
    assert net.owner() == ("a:1", False)


class NeverRead(OffloadedShared):
    """Does not answer when a record is read, once it `hangs`, and counts the renewals meanwhile."""

    hangs = is_reading = False
    renewals = 0

    async def get_record(self, replica):
        if not self.hangs:
            return await super().get_record(replica)
        self.is_reading = True
        return await asyncio.get_running_loop().create_future()

    async def announce(self, service, lease_ms, lease=ALIVE):
        self.renewals += self.is_reading


async def renewals_while_a_record_is_read(net: Net) -> int:
    """Return how often a service renews its lease while a comparison waits for the store."""
    net.awaited = store = NeverRead(lambda: net.store, inline)
    first, _ = await pair(net)
    store.hangs = True
    keeping = asyncio.create_task(first.ownership.keep())
    for _ in range(100):
        await asyncio.sleep(0)
    assert store.is_reading
    keeping.cancel()
    await asyncio.wait([keeping])
    assert keeping.cancelled()
    return store.renewals


async def test_reading_records_delays_no_renewal_of_the_lease(net):
    assert await renewals_while_a_record_is_read(net) >= 3
    with weakened("the lease is renewed after the records are read"):
        assert await renewals_while_a_record_is_read(Net()) == 0


async def test_concurrent_requests_adopt_a_replica_once(net):
    _, second = await pair(net)
    net.clock.now_ms += LEASE_MS
    await asyncio.gather(*(second.ownership.ensure_local("r") for _ in range(5)))
    await second.idle()
    assert len(second.registry) == 1


async def test_a_heartbeat_during_an_adoption_keeps_the_replica(net, monkeypatch):
    _, second = await pair(net)
    net.clock.now_ms += LEASE_MS

    async def meanwhile(name):
        await second.ownership.beat()

    monkeypatch.setattr(second.writer, "write_record", meanwhile)
    await second.ownership.ensure_local("r")
    assert second.state() is ReplicaState.RECOVERING


@pytest.mark.parametrize("name", ["unknown", "no name at all"])
async def test_a_replica_without_a_record_is_unknown(net, name):
    _, second = await pair(net)
    with pytest.raises(UnknownReplica):
        await second.adopt(name)


async def test_a_replica_with_a_damaged_record_is_unknown(net):
    _, second = await pair(net)
    net.store.records_by_name["r"] = b"damaged"
    with pytest.raises(NotFound):
        await second.adopt()


async def test_an_adoption_beyond_the_limit_is_refused(net):
    first = await net.service("a:1")
    second = await net.service("b:1", max_blocks=ONE_GROUP.num_blocks - 1)
    await first.register("r", ONE_GROUP)
    net.clock.now_ms += LEASE_MS
    with pytest.raises(LimitExceeded):
        await second.adopt()
    assert net.owner() == ("a:1", False)


class Away(MemoryStore):
    away = False

    asked = 0

    def get_record(self, replica):
        self.asked += 1
        self._answer()
        return super().get_record(replica)

    def put_record(self, replica, record):
        self.asked += 1
        self._answer()
        super().put_record(replica, record)

    def records(self):
        self._answer()
        return super().records()

    def _answer(self):
        if self.away:
            raise StoreUnavailable("away")


async def test_an_unavailable_store_names_no_owner_and_loses_no_replica(net):
    net = Net(Away(net.clock))
    first, second = await pair(net)
    net.store.away = True
    with pytest.raises(OwnerUnknown):
        await second.adopt()
    await first.ownership.beat()
    assert first.state() is ReplicaState.IDLE


async def test_only_the_writer_retries_an_unavailable_store(net):
    net = Net(Away(net.clock))
    service = await net.service("a:1")
    net.store.away = True
    with pytest.raises(OwnerUnknown):
        await service.adopt()
    asked = net.store.asked
    net.clock.now_ms += 7000
    with pytest.raises(OwnerUnknown, match="the store has not answered for 7 s"):
        await service.adopt()
    await service.register("new")
    await service.ownership.leave(())
    assert service.state("new") is None, "a shutdown does not wait for it"
    assert net.store.asked == asked
    net.store.away = False
    await service.idle()
    with pytest.raises(UnknownReplica):
        await service.adopt()


async def test_a_service_started_without_its_store_recovers_replicas_later(net):
    net = Net(Away(net.clock))
    first = await net.service("a:1")
    for name in ("r", "used", "unused"):
        await first.register(name)
    net.store.away = True
    again = Service(net, Config(listen="a:1", store="redis://unused", owner_lease_ms=LEASE_MS))
    await again.keeper.start(net.awaited)
    assert not again.keeper.is_there
    with pytest.raises(OwnerUnknown):
        await again.adopt()
    for name in ("used", "unused"):
        await again.register(name)
    again.open("used")
    used = again.registry.get("used").host
    net.store.away = False
    await again.keeper.load()
    assert again.keeper.is_there
    assert [again.state(name) for name in ("r", "used", "unused")] == [
        ReplicaState.RECOVERING, ReplicaState.LIVE, ReplicaState.RECOVERING
    ]  # fmt: skip
    assert again.registry.get("used").host is used, "an engine that was served meanwhile continues"
    await again.idle()
    assert unpack_record(net.store.records_by_name["used"]).epoch == used.epoch


async def test_a_file_has_one_service(net, tmp_path):
    store = SqliteStore(tmp_path / "entries.db")
    assert not isinstance(store, BlockingSharedStore)
    service = await Net(store).service("a:1")
    await service.register()
    await service.ownership.leave(())
    assert service.state() is ReplicaState.IDLE, "no other service can own it"
    with pytest.raises(UnknownReplica):
        await service.adopt("other")
    store.close()


async def test_only_a_refused_connection_proves_that_no_process_listens():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert await is_gone(address)
        listener.listen()
        assert not await is_gone(address)
    assert not await is_gone("no address")


async def test_a_stale_socket_file_proves_that_no_process_listens(tmp_path):
    path = tmp_path / "s"
    assert await is_gone(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert not await is_gone(f"unix:{path}")
