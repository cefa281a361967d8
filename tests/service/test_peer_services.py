"""What two services report their replicas to each other, and what replicas of one load from those of the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from kvplane import wire
from kvplane.base.errors import InvalidArgument, LimitExceeded, NotFound
from kvplane.base.sections import Peers
from kvplane.base.stamps import MAX_COUNTER, MAX_EPOCH, Stamp
from kvplane.base.worker import MAX_PEERS, PeerArena, PeerNews
from kvplane.rpc.channel import open_aio_channel
from kvplane.v1 import plan_pb2 as pb
from kvplane.v1.plan_pb2_grpc import WorkersStub
from kvplane_service.config import Config
from kvplane_service.process import peer_services
from kvplane_service.process.app import App
from kvplane_service.process.peer_services import PeerServices
from kvplane_service.registry import Registry
from kvplane_service.replicas.lenders import Held, Member
from kvplane_service.replicas.peer_watch import PeerWatch
from kvplane_service.replicas.peers import Namespace
from tests.engine.stress import FULL
from tests.engine.world import World
from tests.peers.site import Link, Site, pool_of, tiers_of
from tests.service.certificates import Authority
from tests.service.guarded import Guard
from tests.service.test_peers import serve

ARENA = PeerArena(0, 40, "unix:/far/worker.sock", b"memory of a peer")


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def site(clock: Clock):
    """One engine on each of two services."""
    made = Site(2, pool_of(2, (FULL,)), registry=Registry(Config(), clock), more=[Registry(Config(), clock)])
    yield made
    made.close()


def namespace_of(world: World) -> Namespace:
    (found,) = world.registry.namespaces.values()
    return found


def serve_one(site: Site, world: World, name: str = "q") -> int:
    loaded = serve(world, name)
    site.report()
    return loaded


def test_a_replica_loads_what_one_of_another_service_has(site: Site):
    first, second = site.worlds
    assert first.registry is not second.registry
    assert serve_one(site, first) == 0
    assert serve_one(site, second) == 96


def test_services_report_only_what_has_changed(site: Site):
    first, second = site.worlds
    serve_one(site, first)
    (link,) = (one for one in site.links if one._reader is second.registry)
    before = link.messages
    for _ in range(5):
        site.report()
    assert link.messages == before
    serve_one(site, first, "again")
    assert link.messages == before, "the host tier did not change"


@pytest.mark.parametrize("which", [0, 1], ids=["the peer", "the reader"])
def test_a_reset_ends_what_is_reported_and_read(site: Site, which: int):
    first, second = site.worlds
    serve_one(site, first)
    world = site.worlds[which]
    world.engine.change_weights(world.weights)
    serve_one(site, first, "again")
    assert serve(second) == 0


def test_a_broken_connection_ends_what_was_reported_until_it_is_reported_again(site: Site):
    first, second = site.worlds
    serve_one(site, first)
    for link in site.links:
        link.cut()
    assert namespace_of(second).arenas(second.name, 0) == []
    assert serve(second) == 0
    mine = namespace_of(second)._members[second.name].held.values()
    assert namespace_of(second)._holders.keys() == {key for key, _ in mine}, "nothing is left of the other service"
    site.connect()
    site.connect()
    assert len(namespace_of(second).arenas(second.name, 0)) == 1


def test_a_peer_whose_engine_or_worker_is_gone_is_forgotten(site: Site, clock: Clock):
    first, second = site.worlds
    serve_one(site, first)
    clock.now_ns += 60_000_000_000  # the lease of all workers
    second.registry.get(second.name).workers.register(site.info(second, 0))
    site.report()
    assert namespace_of(second).arenas(second.name, 0) == []
    first.registry.get(first.name).workers.register(site.info(first, 0))
    site.report()
    assert len(namespace_of(second).arenas(second.name, 0)) == 1
    assert first.host._session is not None
    first.host.close(first.host._session.nonce)
    site.report()
    assert not namespace_of(second)._remote[f"{site.links[0].name} {first.name}"].held
    first.registry.remove(first.name)
    del site.worlds[0]
    site.report()
    assert namespace_of(second).arenas(second.name, 0) == []


def test_new_memory_of_a_peer_has_another_range_and_nothing(site: Site):
    first, second = site.worlds
    serve_one(site, first)
    (before,) = namespace_of(second).arenas(second.name, 0)
    first.check()
    first.registry.remove(first.name)
    site._turns = iter([first.registry])  # type: ignore[assignment]
    site.worlds[0] = site.make(first.name)
    site.report()
    (after,) = namespace_of(second).arenas(second.name, 0)
    assert after.incarnation != before.incarnation
    assert serve(second) == 0


def test_a_service_that_follows_itself_has_no_peer_twice(site: Site):
    first, _ = site.worlds
    itself = Link(first.registry, first.registry)
    itself.report()
    serve(first)
    itself.report()
    assert namespace_of(first)._remote
    assert [one.address for one in namespace_of(first).arenas(first.name, 0)] == ["unix:/engine/1/0"]


def test_a_replica_that_moves_to_this_service_is_no_peer_of_itself(site: Site):
    first, second = site.worlds
    entry = first.registry.get(first.name)
    second.registry.register(first.name, entry.registration)
    second.registry.get(first.name).workers.register(site.info(first, 0))
    site.report()
    found = namespace_of(second).arenas(second.name, 0)
    assert [one.incarnation for one in found] == [tiers_of(first, 0)[0].incarnation]
    assert found[0].first_slot + found[0].num_slots <= 2 * found[0].num_slots


def test_what_no_tier_of_peers_has_room_for_is_not_kept(site: Site):
    _, second = site.worlds
    namespace, size = namespace_of(second), tiers_of(second, 0)[0].spec.num_blocks
    news = PeerNews("far", arenas=(replace(ARENA, num_slots=size),), rows=Peers([3], [1], [0], bytes(32), [""]))
    namespace.apply("other", news)
    assert not namespace._remote["other far"].held, "the tier has room for two, which it has"
    assert len(namespace.arenas(second.name, 0)) == 1


@pytest.mark.parametrize(
    ("news", "field"),
    [
        (PeerNews("far", rows=Peers([3], [1], [0], bytes(32), [""])), "arenas"),
        (PeerNews("far", arenas=(ARENA, ARENA)), "arenas"),
        (PeerNews("far", arenas=(ARENA,), rows=Peers([40], [1], [0], bytes(32), [""])), "rows.slot"),
        (PeerNews("far", arenas=(ARENA,), rows=Peers(gone=[40])), "rows.slot"),
        (PeerNews("far", arenas=(ARENA,), rows=Peers([3], [1], [9], bytes(32), [""])), "rows.group"),
        (PeerNews("far", arenas=(ARENA,), rows=Peers([3], [0], [0], bytes(32), [""])), "rows.version"),
        (PeerNews("far", arenas=(ARENA,), rows=Peers([3], [2**64 - 1], [0], bytes(32), [""])), "rows.version"),
    ],
)
def test_what_cannot_be_of_the_namespace_is_refused_by_name(site: Site, news: PeerNews, field: str):
    namespace = namespace_of(site.worlds[1])
    namespace.forget(site.links[0].name)
    with pytest.raises(InvalidArgument) as refused:
        namespace.apply("other", news)
    assert refused.value.field == field


def test_the_widest_rows_of_another_service_do_not_make_a_step_refused(site: Site):
    first, second = site.worlds
    namespace = namespace_of(second)
    (arena,) = namespace.arenas(second.name, 0)
    highest = Stamp(0, MAX_EPOCH, MAX_COUNTER).pack()
    last = arena.num_slots - 1
    rows = Peers([0, last, 3], [1, highest, 2], [0, 0, 0], bytes(range(96)), ["", "d" * 5000, "é"], gone=[last, 7])
    namespace.apply(site.links[0].name, PeerNews(first.name, rows=rows))
    assert serve(second) == 0


@pytest.mark.parametrize(
    ("news", "field"),
    [
        (PeerNews("\x1b[2J", is_gone=True), "replica"),
        (PeerNews("f" * 129, is_gone=True), "replica"),
        (PeerNews("far", arenas=(replace(ARENA, address="unix:/far/../etc"),)), "arenas[0].address"),
        (PeerNews("far", arenas=(replace(ARENA, num_slots=0),)), "arenas[0].num_slots"),
        (PeerNews("far", arenas=(ARENA, replace(ARENA, incarnation=b"short"))), "arenas[1].incarnation"),
        (PeerNews("far", arenas=(replace(ARENA, nixl_arena=bytes(8193)),)), "arenas[0].nixl_arena"),
        (PeerNews("far", rows=Peers([1, 2], [1, 1], [0, 0], bytes(63), ["", ""])), "rows.hashes"),
        (PeerNews("far", rows=Peers([1, 2], [1], [0, 0], bytes(64), ["", ""])), "rows.version"),
    ],
)
def test_a_message_that_is_malformed_is_refused_by_name(news: PeerNews, field: str):
    with pytest.raises(InvalidArgument) as refused:
        wire.decode_news(wire.encode_news(news), 32)
    assert refused.value.field == field


def test_a_service_may_have_so_many_replicas_and_no_more(site: Site):
    namespace = namespace_of(site.worlds[1])
    namespace.forget(site.links[0].name)
    for number in range(MAX_PEERS):
        arena = replace(ARENA, incarnation=number.to_bytes(16, "big"))
        namespace.apply("other", PeerNews(str(number), arenas=(arena,)))
    with pytest.raises(LimitExceeded):
        namespace.apply("other", PeerNews("one more", arenas=(ARENA,)))
    namespace.forget("other")
    assert not namespace._remote


def test_many_rows_are_sent_in_messages_of_bounded_size(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvplane_service.replicas.peer_watch.MOST_ROWS", 4)
    first, _ = site.worlds
    serve(first)
    namespace, watch = namespace_of(first), PeerWatch()
    with namespace.watched(watch):
        sizes = [len(one.rows.slot) + len(one.rows.gone) for one in namespace.news(watch)]
    assert max(sizes) == 4
    assert sum(sizes) == len(namespace._members[first.name].held)


def test_a_host_tier_is_read_in_slices(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvplane_service.replicas.lenders.MOST_READ", 4)
    read, sizes = Member.read, list[int]()

    def noted(member: Member) -> Mapping[int, Held | None] | None:
        found = read(member)
        sizes.append(len(found or ()))
        return found

    monkeypatch.setattr(Member, "read", noted)
    first, second = site.worlds
    serve(first)
    while sum(len(one.held) for one in namespace_of(second)._remote.values()) < 6:
        site.report()
    assert max(sizes) == 4
    assert serve(second) == 96


# -- over gRPC ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_services, "RETRY_S", 0.05)
    monkeypatch.setattr(peer_services, "LOOK_S", 0.05)


@asynccontextmanager
async def two_services(first: Config, **of_second: Any) -> AsyncIterator[tuple[Site, App, App]]:
    """Two services, of which the second follows the first, with an engine each."""
    one = App(first)
    address = await one.start()
    other = App(Config(listen="127.0.0.1:0", peer_services=address, **of_second))
    await other.start()
    try:
        site = Site(2, pool_of(2, (FULL,)), registry=one.registry, more=[other.registry])
        for link in site.links:
            link.cut()
        site.links.clear()
        yield site, one, other
        site.close()
    finally:
        await other.stop()
        await one.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is in many places
            await asyncio.sleep(0.01)


def remote(app: App) -> list[int]:
    """How many slots of each replica of another service are known to hold something."""
    return [len(one.held) for found in app.registry.namespaces.values() for one in found._remote.values()]


def followed(app: App) -> bool:
    return all(app.registry.peer_services.values())


async def test_a_replica_loads_what_one_of_a_followed_service_has():
    async with two_services(Config(listen="127.0.0.1:0")) as (site, one, other):
        first, second = site.worlds
        serve(first)
        await until(lambda: remote(other) == [6])
        site.connect()
        site.connect()
        assert serve(second) == 96
        assert followed(other)
        assert {entry.host.name for entry in other.registry} == {second.name}
        await one.stop()
        await until(lambda: not remote(other))
        assert not followed(other)


async def test_services_follow_each_other_with_tls_and_tokens(tmp_path, caplog):
    authority = Authority(tmp_path)
    guard = Guard(tmp_path, {"service": {"scopes": ["worker"], "every_replica": True}, "acme": {"scopes": ["worker"]}})
    server = authority.issue("server")
    config = guard.config(tls_cert=server.cert, tls_key=server.key)
    token = tmp_path / "token"
    token.write_text("token-acme")
    files = {"peer_services_token": str(token), "peer_services_ca": authority.cert}
    async with two_services(config, **files) as (site, _, other):
        await until(lambda: "lacks `every_replica`" in caplog.text)
        assert not followed(other)
        token.write_text("token-service")
        serve(site.worlds[0])
        await until(lambda: remote(other) == [6])
        assert caplog.text.count("lacks `every_replica`") == 1, "a problem is logged once"
        guard.write_tokens("acme")
        await until(lambda: not remote(other))


async def test_what_a_followed_service_says_wrongly_ends_the_stream_and_is_logged(monkeypatch, caplog):
    async with two_services(Config(listen="127.0.0.1:0")) as (_, _, other):
        await until(lambda: remote(other))
        monkeypatch.setattr(PeerWatch, "news", lambda *_: iter([PeerNews("far", arenas=(ARENA, ARENA))]))
        await until(lambda: "state one of each of 1 ranks" in caplog.text)
        assert not remote(other)


async def test_a_namespace_that_is_not_here_yet_is_reported_when_it_comes(caplog):
    caplog.set_level(logging.INFO)
    one = App(Config(listen="127.0.0.1:0"))
    address = await one.start()
    async with open_aio_channel(address) as channel:
        stream = WorkersStub(channel).WatchPeers(pb.WatchPeersRequest(namespace=bytes(16)))
        assert await anext(aiter(stream)) == pb.WatchPeersResponse()
        with pytest.raises(grpc.aio.AioRpcError, match="give the 16 bytes"):
            await anext(aiter(WorkersStub(channel).WatchPeers(pb.WatchPeersRequest(namespace=b"short"))))
    await one.stop()


async def test_a_token_in_plain_text_and_settings_without_services_are_refused(tmp_path):
    token = str(tmp_path / "token")
    with pytest.raises(InvalidArgument, match="plain text") as refused:
        PeerServices(Registry(Config(), lambda: 0), Config(peer_services="10.0.0.1:7070", peer_services_token=token))
    assert refused.value.field == "peer_services_ca"
    with pytest.raises(InvalidArgument) as refused:
        App(Config(peer_services_token=token))
    assert refused.value.field == "peer_services_token"


async def test_a_missing_token_is_logged_and_tried_again(tmp_path, caplog):
    token = tmp_path / "token"
    async with two_services(Config(listen="127.0.0.1:0"), peer_services_token=str(token)) as (site, _, other):
        await until(lambda: NotFound.reason in caplog.text or "cannot be read" in caplog.text)
        token.write_text("any")
        serve(site.worlds[0])
        await until(lambda: remote(other) == [6])
