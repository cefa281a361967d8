"""Replicas that nothing uses expire: their place is free, a store keeps their keys, a registration recovers them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvplane.base.errors import LimitExceeded, NotFound
from kvplane.base.session import OpenRequest
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry, UnknownReplica
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.keeper import Entropy, Keeper
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import Offloaded
from kvplane_service.store.owners import StoreOwners
from kvplane_service.store.ownership import Ownership, expire_all
from kvplane_service.store.record import REGISTRATION, seal, unseal
from kvplane_service.store.registration import ReplicaRecord, pack_record, unpack_record
from kvplane_service.store.sqlite import SqliteStore
from kvplane_service.store.writer import Runtime
from tests.client.lasting import HYBRID
from tests.store.test_ownership import Clock, Net, Service
from tests.store.test_restart import NONCES, inline, no_pause

TTL_MS = 60_000
SAME = Registration(HYBRID)


class OneService(Service):
    """A service whose store no other one uses, or without a store."""

    def __init__(self, clock: Clock, store) -> None:
        config = Config(store="none", max_replicas=2, replica_ttl_ms=TTL_MS, store_ttl_ms=3 * TTL_MS)
        self.clock, self.store = clock, store
        self.registry = Registry(config, clock)
        runtime = Runtime(clock, no_pause, inline, lambda: 0.0)
        self.keeper = Keeper(self.registry, config, runtime, Entropy(lambda: clock.now_ms, lambda: 7))
        owners = StoreOwners(self.keeper, config.owner_lease_ms, never)
        self.ownership = Ownership(self.registry, config, self.keeper, runtime, owners)

    async def begin(self) -> OneService:
        if self.store is not None:
            await self.keeper.start(Offloaded(lambda: self.store, inline))
            await self.keeper.load()
        return self

    async def pass_time(self, ms: int) -> None:
        self.clock.now_ms += ms
        await expire_all(self.registry, self.ownership, TTL_MS)

    async def register_again(self, registration: Registration = SAME, name: str = "r") -> None:
        """As the call RegisterReplica does."""
        with pytest.raises(UnknownReplica):
            await self.ownership.ensure_local(name)  # not for any call
        await self.ownership.resume(name, registration)
        self.registry.register(name, registration)
        await self.idle()


async def never(_: str) -> bool:
    return False


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    return MemoryStore(Clock()) if request.param == "memory" else SqliteStore(tmp_path / "keys.sqlite")


@pytest.fixture
async def service(store):
    return await OneService(Clock(), store).begin()


async def closed(service: Service, name: str = "r") -> int:
    """Publish keys, close the session, and return the number of keys."""
    service.open(name)
    service.publish(range(80), name)
    host = service.registry.get(name).host
    assert host._session is not None
    host.close(host._session.nonce)
    return host.replica.count_keys()


def kept(service: Service, name: str = "r") -> int:
    """Number of entries that a new engine life may prove."""
    recovering = service.registry.get(name).host.recovering
    return len(recovering.entries) if recovering is not None else 0


async def test_an_idle_replica_expires_and_a_registration_recovers_its_keys(service):
    await service.register()
    assert await closed(service)
    await service.pass_time(TTL_MS - 1)
    assert service.state() is ReplicaState.IDLE
    await service.pass_time(1)
    assert service.state() is None
    assert service.registry.num_expired == 1
    await service.register_again()
    assert service.state() is ReplicaState.RECOVERING
    assert kept(service)


async def test_without_a_store_it_begins_empty():
    service = await OneService(Clock(), None).begin()
    service.registry.register("r", SAME)
    await service.pass_time(TTL_MS)
    assert service.state() is None
    await service.ownership.resume("r", SAME)
    service.registry.register("r", SAME)
    assert service.state() is ReplicaState.IDLE


async def test_an_expired_replica_leaves_its_place_to_another(service):
    for name in ("a", "b"):
        await service.register(name)
    with pytest.raises(LimitExceeded, match="another replica"):
        service.registry.register("c", SAME)
    await service.pass_time(TTL_MS)
    service.registry.register("c", SAME)


async def test_calls_of_an_expired_replica_name_the_reason(service):
    await service.register()
    host = service.registry.get("r").host
    ended: list[Exception] = []
    host.open(OpenRequest("r", next(NONCES)), ended.append)
    await service.pass_time(TTL_MS)
    with pytest.raises(NotFound, match=r"expired: nothing has used it for 60 s .*register it again"):
        host.check_readable()
    assert [type(error) for error in ended] == [NotFound], "a client that is silent for hours and still connected"


@pytest.mark.parametrize("use", ["session", "worker", "call", "registration", "another session"])
async def test_what_is_used_does_not_expire(service, use, monkeypatch):
    await service.register()
    entry = service.registry.get("r")
    if use in ("session", "another session"):
        service.open()
    for _ in range(5):
        if use == "session":
            entry.host.heartbeat(entry.host._session.nonce)
        elif use == "worker":
            monkeypatch.setattr(type(entry.workers), "alive", lambda _: [object()])
        elif use == "call":
            entry.host.touch()
        elif use == "registration":
            service.registry.register("r", SAME)
        else:
            service.open()
        await service.pass_time(TTL_MS - 1)
        assert service.state() is not None
    monkeypatch.undo()
    await service.pass_time(TTL_MS)
    assert service.state() is None


async def test_a_lease_that_ended_counts_from_the_last_message(service):
    await service.register()
    service.open()
    host = service.registry.get("r").host
    service.clock.now_ms += TTL_MS // 2
    host.heartbeat(host._session.nonce)
    await service.pass_time(TTL_MS - 1)
    assert (service.state(), host.unused_ns) == (ReplicaState.LAPSED, (TTL_MS - 1) * 1_000_000)
    await service.pass_time(1)
    assert service.state() is None


async def test_another_registration_of_the_name_begins_empty(service):
    await service.register()
    await closed(service)
    await service.pass_time(TTL_MS)
    other = Registration(replace(HYBRID, num_blocks=HYBRID.num_blocks + 8))
    await service.register_again(other)
    assert service.state() is ReplicaState.IDLE
    assert service.registry.get("r").registration.agrees_with(other)
    _, records = await stored(service)
    assert records == {"r": False}


async def stored(service: OneService) -> tuple[set[str], dict[str, bool]]:
    """The replicas with a log in the store, and those with a record: whether it has expired."""
    records = {name: unpack_record(raw) for name, raw in service.store.records()}
    logs = {name for name, record in records.items() if service.store.size_bytes(record.log)}
    return logs, {name: record.expired for name, record in records.items()}


async def test_a_restart_does_not_load_an_expired_replica(service):
    await service.register()
    await closed(service)
    await service.pass_time(TTL_MS)
    again = await OneService(service.clock, service.store).begin()
    assert again.state() is None
    await again.register_again()
    assert kept(again)


async def test_a_store_forgets_what_expired_long_ago(service):
    await service.register()
    await closed(service)
    await service.pass_time(TTL_MS)
    assert await stored(service) == ({"r"}, {"r": True})
    await service.pass_time(3 * TTL_MS)
    assert await stored(service) == ({"r"}, {"r": True})
    await service.pass_time(1)
    assert await stored(service) == (set(), {})
    await service.register_again()
    assert service.state() is ReplicaState.IDLE


async def test_what_came_back_is_not_forgotten(service):
    await service.register()
    await closed(service)
    await service.pass_time(TTL_MS)
    await service.register_again()
    for _ in range(4):
        service.registry.get("r").host.touch()
        await service.pass_time(TTL_MS - 1)
    assert service.state() is ReplicaState.RECOVERING
    assert (await stored(service))[1] == {"r": False}


async def test_nothing_expires_while_the_store_is_away(service, monkeypatch):
    await service.register()
    await closed(service)
    service.keeper.note_failure(StoreUnavailable("away"))
    await service.pass_time(TTL_MS)
    assert service.state() is ReplicaState.IDLE
    assert await service.writer.write_all()
    await service.pass_time(0)
    assert service.state() is None


async def test_another_service_recovers_it_from_a_shared_store():
    net = Net()
    first, second = await net.service("a:1"), await net.service("b:1")
    await first.register()
    await closed(first)
    net.clock.now_ms += TTL_MS
    await expire_all(first.registry, first.ownership, TTL_MS)
    assert net.owner() == ("a:1", True)
    with pytest.raises(UnknownReplica):
        await second.ownership.ensure_local("r")
    await second.ownership.resume("r", SAME)
    await second.idle()
    assert second.state() is ReplicaState.RECOVERING
    assert kept(second)
    assert net.owner() == ("b:1", False)


def test_a_record_of_an_earlier_version_has_not_expired():
    net = Net()
    net.store.put_record("r", pack_record_without_expiry())
    assert not unpack_record(net.store.records_by_name["r"]).expired


def pack_record_without_expiry() -> bytes:
    raw = pack_record(ReplicaRecord("r", SAME, 1, 2, "a:1", 3))
    content = json.loads(bytes(unseal(REGISTRATION, raw)))
    del content["expired"], content["model_name"]
    return seal(REGISTRATION, json.dumps(content).encode())
