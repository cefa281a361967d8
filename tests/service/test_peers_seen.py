"""What an operator sees of peers: describe, top and explain name them, also those of other services."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rich.console import Console

from kvplane.base.hashing import split_hashes
from kvplane.base.step import NO_EXTRA_KEYS
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, PeerStatus
from kvplane_service.config import Config
from kvplane_service.explain.service import Prompt, explain_prompt
from kvplane_service.registry import Registry
from kvplane_service.rpc.encode import encode_description, encode_explanation
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.unary.hashing import hash_tokens
from kvplane_tools.cli.output import peers_line
from kvplane_tools.cli.query.explain import sentence
from kvplane_tools.cli.query.replica import _description
from kvplane_tools.cli.views.samples import Trend
from kvplane_tools.cli.views.top_panels import panel
from tests.engine.reference.request import Request
from tests.engine.stress import FULL
from tests.engine.world import World
from tests.peers.site import Site, pool_of
from tests.service.test_peers import PROMPT, serve


@pytest.fixture
def site():
    """Engines 0 and 2 on one service, 1 on another; the first of them has served a prompt."""
    made = Site(3, pool_of(3, (FULL,)), more=[Registry(Config(), lambda: 0)])
    serve(made.worlds[0])
    made.report()
    for world in made.worlds[1:]:
        world.engine.add(Request("one block", PROMPT[-8:], 1))  # its steps have what peers have
        while world.engine.has_work:
            world.engine.step()
    yield made
    made.close()


def described(world: World) -> DescribeReplicaResponse:
    entry = world.registry.get(world.name)
    return encode_description(entry, StoreReport(StoreState.OFF), entry.host.replica.group_counters())


def seen(answer: DescribeReplicaResponse) -> dict[str, tuple[str, int, bool]]:
    return {one.replica: (one.service, one.held_blocks, one.is_read) for one in answer.peers}


def explained(world: World) -> str:
    scheme = world.host.scheme
    digests = split_hashes(hash_tokens(scheme, PROMPT, NO_EXTRA_KEYS, None).hashes, scheme.digest.size)
    prompt = Prompt(digests, len(PROMPT))
    return sentence(encode_explanation(world.host, asyncio.run(explain_prompt(world.host, prompt, Executor("test")))))


def test_describe_names_peers_of_this_service_and_of_others(site: Site):
    first, second, third = site.worlds
    far = {link._reader: link.name for link in site.links}
    of_first = {second.name: (far[first.registry], 0, True), third.name: ("", 0, True)}
    of_second = {first.name: (far[second.registry], 6, True), third.name: (far[second.registry], 0, True)}
    assert seen(described(first)) == of_first
    assert seen(described(second)) == of_second
    lines = [" ".join(line.split()) for line in "\n".join(_description(described(first))).splitlines()]
    assert "PEER SERVICE SLOTS HELD READ" in lines
    assert f"{second.name} {far[first.registry]} 400 0 yes" in lines
    assert f"{third.name} this one 400 0 yes" in lines


def test_a_peer_that_no_worker_has_mapped_is_not_read_yet(site: Site):
    second = site.worlds[1]
    second.registry.get(second.name).workers.renew(replace(site.info(second, 0), mapped=()))
    assert {one.is_read for one in described(second).peers} == {False}
    assert "not yet" in "\n".join(_description(described(second)))


def test_a_replica_that_reads_no_peers_has_none(site: Site):
    world = World(pool_of(2, (FULL,)))
    answer = described(world)
    assert not answer.peers
    assert "PEER " not in "\n".join(_description(answer))
    world.check()


def test_top_names_the_peers_with_the_most_blocks(site: Site):
    first, second, _ = site.worlds
    console = Console(width=400, record=True)
    console.print(panel(described(second), Trend()))
    (link,) = (one for one in site.links if one._reader is second.registry)
    assert f"peers {first.name} of {link.name} 6 blocks" in console.export_text()
    many = DescribeReplicaResponse(peers=[PeerStatus(replica=f"r{one}", held_blocks=one) for one in range(5)])
    assert peers_line(many) == "r4 4 blocks, r3 3 blocks, r2 2 blocks, 2 more"


def test_explain_names_who_has_what_the_device_lacks(site: Site):
    first, second, third = site.worlds
    (link,) = (one for one in site.links if one._reader is second.registry)
    assert f"are in the peers tier ({first.name} of {link.name});" in explained(second)
    assert f"are in the peers tier ({first.name});" in explained(third)
