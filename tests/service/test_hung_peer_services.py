"""A service that is followed and hangs is left soon, named and tried again; what it has is loaded or computed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from kvplane import wire
from kvplane.base.worker import PeerNews
from kvplane.v1 import plan_pb2 as pb
from kvplane.v1.plan_pb2_grpc import WorkersServicer, add_WorkersServicer_to_server
from kvplane_service.config import Config
from kvplane_service.process import peer_services
from kvplane_service.process.app import App
from kvplane_service.rpc import workers
from kvplane_service.telemetry.collector import ServiceCollector
from tests.engine.reference.request import Request
from tests.engine.stress import FULL, Report, compare
from tests.engine.world import World
from tests.peers.site import Site, pool_of, tiers_of
from tests.service.far_service import FarSite, far_service
from tests.service.test_peer_services import ARENA, followed, namespace_of, remote, two_services, until
from tests.service.test_peers import PROMPT, serve

SILENT_S = 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_services, "SILENT_S", SILENT_S)
    monkeypatch.setattr(peer_services, "RETRY_S", 0.05)
    monkeypatch.setattr(peer_services, "LOOK_S", 0.05)
    monkeypatch.setattr(workers, "BEAT_S", SILENT_S / 10)


@asynccontextmanager
async def follower(address: str) -> AsyncIterator[tuple[App, Site]]:
    """A service with an engine, which follows the one at this address."""
    app = App(Config(listen="127.0.0.1:0", peer_services=address))
    await app.start()
    try:
        site = FarSite(1, pool_of(2, (FULL,)), registry=app.registry)
        yield app, site
        site.close()
    finally:
        await app.stop()


def answered(world: World, name: str) -> tuple[int, list[str]]:
    """Serve the prompt; return how many of its tokens were not computed, and what is wrong with the answer."""
    request, report = Request(name, PROMPT, 2, keep_logits=True), Report()
    world.engine.add(request)
    while world.engine.has_work:
        world.engine.step()
    compare(world, request, report)
    return request.hits[-1] if request.hits else 0, report.complaints


class Silent(WorkersServicer):
    """Answers nothing, or `said`, and is silent then, while gRPC answers pings."""

    def __init__(self, said: Sequence[pb.WatchPeersResponse]) -> None:
        self.said, self.calls = said, 0

    async def WatchPeers(self, request: pb.WatchPeersRequest, _: Any) -> AsyncIterator[pb.WatchPeersResponse]:  # noqa: N802
        self.calls += 1
        for one in self.said:
            yield one
        await asyncio.sleep(3600)


@pytest.mark.parametrize("said", [0, 1, 2], ids=["to the call", "after its first message", "after a replica"])
async def test_a_service_that_is_silent_is_followed_no_more_named_and_tried_again(said: int, caplog):
    news = pb.WatchPeersResponse(), wire.encode_news(PeerNews("far", arenas=(ARENA,)))
    silent = Silent(news[:said])  # type: ignore[abstract]
    server = grpc.aio.server()
    add_WorkersServicer_to_server(silent, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with follower(address) as (app, site):
        if said:
            await until(lambda: followed(app))
            await until(lambda: len(remote(app)) == said - 1)
        await until(lambda: silent.calls > 2)
        assert caplog.text.count(f"the peers of {address} are not known: nothing was said for 1 s") == 1
        await until(lambda: not followed(app))
        assert not remote(app)
        assert serve(site.worlds[0]) == 0
    await server.stop(0)


async def test_an_address_that_accepts_connections_and_says_nothing_is_named_and_holds_up_nothing(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with follower(address) as (app, site):
            await until(lambda: f"the peers of {address} are not known" in caplog.text)
            assert not followed(app)
            assert serve(site.worlds[0]) == 0


async def test_what_a_stopped_service_has_is_loaded_until_it_is_left_and_again_when_it_continues(caplog, tmp_path):
    with far_service(tmp_path) as far:
        async with follower(far.address) as (app, site):
            (world,) = site.worlds
            await until(lambda: remote(app) == [6])
            site.connect()
            site.connect()
            far.stop()
            assert answered(world, "q") == (96, []), "workers read each other: the service carries no data"
            await until(lambda: not followed(app))
            assert not remote(app)
            assert f"the peers of {far.address} are not known: nothing was said for 1 s" in caplog.text
            site.connect()
            assert not namespace_of(world).arenas(world.name, 0)
            far.go_on()
            await until(lambda: followed(app))
            await until(lambda: remote(app) == [6])


async def test_what_a_stopped_service_has_lost_meanwhile_is_computed(monkeypatch, tmp_path):
    with far_service(tmp_path) as far:
        async with follower(far.address) as (app, site):
            (world,) = site.worlds
            await until(lambda: remote(app) == [6])
            site.connect()
            site.connect()
            far.stop()
            for peer in tiers_of(world, 0)[1].peers:
                monkeypatch.setattr(peer.memory, "read", lambda *_: False)
            assert answered(world, "q") == (0, [])
            assert world.engine.counts.loads == 1


def metric_of(app: App) -> list[float]:
    families = ServiceCollector(app.registry).collect()
    (family,) = (one for one in families if one.name == "kvplane_peer_service_followed")
    return [sample.value for sample in family.samples]


async def test_the_metric_is_there_only_where_a_replica_could_load():
    app = App(Config(listen="127.0.0.1:0", peer_services="127.0.0.1:1"))
    assert metric_of(app) == []
    site = Site(1, pool_of(1, (FULL,)), registry=app.registry)
    assert metric_of(app) == [0.0]
    app.registry.peer_services["127.0.0.1:1"] = True
    assert metric_of(app) == [1.0]
    site.close()


async def test_a_service_that_has_nothing_new_to_say_is_followed_on(caplog):
    async with two_services(Config(listen="127.0.0.1:0")) as (_, _, other):
        await until(lambda: remote(other))
        for _ in range(30):
            await asyncio.sleep(SILENT_S / 10)
            assert followed(other)
        assert "are not known" not in caplog.text
