"""An engine that starts with another number of blocks gets its replica; nothing else is replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import AlreadyExists, Client, Unavailable
from kvplane.base.groups import Medium, TierKind, TierSpec
from kvplane.blocking.registering import EngineInfo, register_engine
from kvplane.rpc.channel import open_channel
from kvplane.v1.replica_pb2 import TIER_KIND_HOST
from tests.service.guarded import guarded
from tests.service.mirrors import spec_of
from tests.service.rig import running

SPEC = spec_of("window and full")
OTHER = replace(SPEC, num_blocks=SPEC.num_blocks + 7, watermark_blocks=1)


@pytest.fixture
def client():
    with running() as service, Client(open_channel(service.address)) as client:
        yield client


def num_blocks(client):
    return client.describe_replica("r").spec.num_blocks


def test_a_replica_without_a_session_gets_the_new_number(client):
    for spec in (SPEC, SPEC, OTHER, SPEC):
        register_engine(client, "r", spec, EngineInfo())
        assert num_blocks(client) == spec.num_blocks


def test_tiers_that_the_engine_has_itself_may_change_their_size(client):
    for slots in (50, 50, 20, 0):
        tiers = (TierSpec(TierKind.DISK, slots),) if slots else ()
        register_engine(client, "r", replace(SPEC, tiers=tiers, pool=Medium.HOST), EngineInfo())
        found = client.describe_replica("r")
        assert [one.num_blocks for one in found.tiers] == [slots] * bool(slots)
        assert found.spec.pool == TIER_KIND_HOST


def test_a_replica_with_a_session_keeps_its_number(client):
    register_engine(client, "r", SPEC, EngineInfo())
    with client.session("r"):
        with pytest.raises(Unavailable, match=f"{SPEC.num_blocks} blocks is open, this engine has {OTHER.num_blocks}"):
            register_engine(client, "r", OTHER, EngineInfo())
        assert num_blocks(client) == SPEC.num_blocks
    register_engine(client, "r", OTHER, EngineInfo())
    assert num_blocks(client) == OTHER.num_blocks


def test_a_session_that_opens_meanwhile_keeps_its_replica(client, monkeypatch):
    register_engine(client, "r", SPEC, EngineInfo())
    describe, opened = client.describe_replica, []

    def describing(name):
        found = describe(name)
        opened.append(client.session(name))
        return found

    monkeypatch.setattr(client, "describe_replica", describing)
    with pytest.raises(Exception, match="epoch"):
        register_engine(client, "r", OTHER, EngineInfo())
    monkeypatch.undo()
    assert num_blocks(client) == SPEC.num_blocks
    opened[0].close()


def test_a_replica_with_other_settings_is_not_replaced(client):
    register_engine(client, "r", SPEC, EngineInfo())
    for spec in (replace(OTHER, max_model_len=2 * SPEC.max_model_len), replace(OTHER, pool=Medium.HOST)):
        with pytest.raises(AlreadyExists):
            register_engine(client, "r", spec, EngineInfo())
    assert num_blocks(client) == SPEC.num_blocks


def test_a_replica_whose_ranks_have_workers_is_not_replaced(client, monkeypatch):
    register_engine(client, "r", SPEC, EngineInfo())
    found = client.describe_replica("r")
    found.workers.add()
    monkeypatch.setattr(client, "describe_replica", lambda name: found)
    with pytest.raises(AlreadyExists):
        register_engine(client, "r", OTHER, EngineInfo())


def test_an_owner_without_the_scope_admin_may_start_its_engine_again(tmp_path):
    with guarded(tmp_path) as world:
        client = Client(world.acme.channel)
        register_engine(client, "r", SPEC, EngineInfo())
        register_engine(client, "r", OTHER, EngineInfo())
        assert num_blocks(client) == OTHER.num_blocks
