"""Claims for replicas of a kvplane service equal its FindCacheHit once the events are applied: eight replicas of each
kind, with the recorded operations of vLLM, each stopped at another place.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.requests import Content
from kvplane.base.step import ExtraKeys, Part
from kvplane.blocking.client import connect
from kvplane.rpc.access import Access
from kvplane_fleet.fleet import Fleet, Prompt, following
from kvplane_fleet.follow.replica_source import RETRY_S, ReplicaSource
from kvplane_fleet.settings import PlaceSettings
from kvplane_tools.cli.child import ServiceChild
from tests.conformance.header import read_records
from tests.conformance.paths import PathPart
from tests.conformance.rpc import make_replayer
from tests.router.recorded import CONFORMANCE
from tests.service.guarded import guarded

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


async def test_a_service_with_owners_is_followed_with_a_token_and_says_why_it_is_not_without(tmp_path, caplog):
    with guarded(tmp_path) as world:
        world.acme.register("acme/r")
        place = PlaceSettings("acme/r", service=world.service.address)
        accesses = {"not authenticated": Access(), "not registered": Access(token="token-rival")}
        for state, access in accesses.items():
            fleet = Fleet(access)
            async with following(fleet, [place]), asyncio.timeout(WITHIN_S):
                while fleet.followed["acme/r"].state != state:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert "acme/r" in caplog.text
                assert world.service.address in caplog.text
                caplog.clear()
                await asyncio.sleep(2.5 * RETRY_S)
                # A reason is logged once, not at each try; the service in this process logs too.
                assert not [one for one in caplog.records if one.name.startswith("kvplane_fleet")]
        fleet = Fleet(Access(token="token-acme"))
        async with following(fleet, [place]):
            await asyncio.wait_for(fleet.wait_until_current(), WITHIN_S)
            assert fleet.followed["acme/r"].state == "current"


def test_a_token_is_sent_to_no_service_of_another_machine_in_plain_text():
    with pytest.raises(InvalidArgument, match="plain text"):
        Fleet(Access(token="t")).add(PlaceSettings("r", service="127.0.0.1:1, 192.0.2.1:1"))
