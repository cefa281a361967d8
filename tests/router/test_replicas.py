"""Claims for replicas of a kvplane service equal its FindCacheHit once the events are applied: eight replicas of each
kind, with the recorded operations of vLLM, each stopped at another place.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing

import pytest

from kvplane.base.requests import Content
from kvplane.base.step import ExtraKeys, Part
from kvplane.blocking.client import connect
from kvplane_fleet.fleet import Fleet, Prompt, following
from kvplane_fleet.follow.replica_source import ReplicaSource
from kvplane_fleet.settings import PlaceSettings
from kvplane_tools.cli.child import ServiceChild
from tests.conformance.header import read_records
from tests.conformance.paths import PathPart
from tests.conformance.rpc import make_replayer
from tests.router.recorded import CONFORMANCE

REPLICAS = 8
PROMPTS = 12
WITHIN_S = 60
KINDS = sorted((CONFORMANCE / "kinds").glob("*.gz"))
TRACES = sorted((CONFORMANCE / "traces").glob("*.gz"))


@pytest.fixture(scope="module")
def service():
    with ServiceChild() as one:
        yield one


class Replicas:
    """Replicas of one recording, and the prompts of their requests."""

    def __init__(self, path, client, stack):
        header, *records = read_records(path)
        self.names = list[str]()
        self.prompts = dict[tuple[tuple[int, ...], ExtraKeys], None]()
        for number in range(1, REPLICAS + 1):
            replayer = stack.enter_context(closing(make_replayer("session", client)(header)))
            self.names.append(replayer.path._name)
            for line, record in enumerate(records[: max(1, number * (len(records) - 1) // REPLICAS)], 2):
                replayer.replay(line, record)
                if record["op"] == "new":
                    request = replayer.requests[record["id"]]
                    self.prompts[tuple(request.tokens), request.extra] = None
            replayer._flush()
            for _ in range(2):  # the second one reports that the first was executed
                replayer.path.send([PathPart(Part(), last=True)])


ALL = [*KINDS, *(pytest.param(path, marks=pytest.mark.nightly) for path in TRACES)]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
async def test_claims_equal_find_cache_hit(service, path):
    with connect(service.address) as client, ExitStack() as stack:
        replicas = await asyncio.to_thread(Replicas, path, client, stack)
        fleet = Fleet()
        async with following(fleet, [PlaceSettings(name, service=service.address) for name in replicas.names]):
            await asyncio.wait_for(fleet.wait_until_current(), WITHIN_S)
            for name in replicas.names:
                last = await asyncio.to_thread(client.describe_replica, name)
                source = fleet.followed[name].source
                assert isinstance(source, ReplicaSource)
                await asyncio.wait_for(source.wait_until(last.event_seq), WITHIN_S)
            compared = differences = hits = 0
            for tokens, extra in list(replicas.prompts)[-PROMPTS:]:
                for claim in fleet.claims("", Prompt(tokens, extra)):
                    asked = Content(token_ids=list(tokens), extra_keys=extra)
                    real = (await asyncio.to_thread(client.find_cache_hit, claim.place, asked)).hit_tokens
                    compared += 1
                    hits += real > 0
                    differences += real != claim.tokens
                    assert claim.inexact == ""
    print(f"{path.name}: {compared} look-ups, {hits} hits, {differences} differences")
    assert compared >= REPLICAS
    assert differences == 0
