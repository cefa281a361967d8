"""The history of the keys of a block: who computed them, from which tier they were loaded, why they were removed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import NO_EXTRA_KEYS, Cache, EventKind, Part, RowFlag
from kvplane_core.face import setup
from kvplane_service.explain.history import Change, KeyName
from kvplane_service.explain.service import explain_block
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.rpc.encode import encode_changes
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns
from tests.service.hosts import history_of
from tests.service.test_explain import Desk
from tests.service.tiered import FILLS, Served


def changes_of(host: ReplicaHost, block: int) -> list[tuple[Change, KeyName]]:
    return asyncio.run(explain_block(host, block, Turns("explanations", 0), Executor("explanations")))


def shown(host: ReplicaHost, block: int) -> list[tuple[int, str]]:
    """Step of each change, and what it was."""
    answer = encode_changes(host, changes_of(host, block))
    return [(one.seq, f"{'stored' if one.stored else one.cause} {one.by} {one.tier}".strip()) for one in answer.changes]


MISMATCH, DROPPED = 29, 6  # MissCause


def test_history_of_a_block_that_a_canary_found_wrong():
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    desk.step(Part(cache=Cache(evicted=[2, 1], mismatched=[2], hits_checked=1)))
    desk.serve("b", "aaaabbbbc")
    host = desk.world.host
    assert shown(host, 2)[:2] == [(1, "stored a"), (3, f"{MISMATCH}")]
    assert shown(host, 1)[:2] == [(1, "stored a"), (3, f"{DROPPED}")]
    assert shown(host, 2)[2:] == [(4, "stored b")], "the key again, on whichever block"


def test_history_of_a_key_that_came_back_from_a_tier(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)  # of this small pool, the whole
    served = Served()
    for number in range(2 * FILLS):
        for back in (0, 5, 8):
            served.serve((number - back) % FILLS, RowFlag.LOAD)
    history = history_of(served.host)
    changes = [change for one in history.changes.values() for change in one]
    loaded = [change for change in changes if change.tier >= 0]
    assert len(loaded) > 10
    assert len(loaded) < len([change for change in changes if change.kind is EventKind.STORED])
    assert any(what in ("stored slot 0 host", "stored slot 0 disk") for _, what in shown(served.host, loaded[-1].block))


def test_history_of_a_block_that_the_replica_does_not_have():
    desk = Desk()
    for block in (0, desk.world.host.replica.spec.num_blocks):
        with pytest.raises(InvalidArgument) as refused:
            changes_of(desk.world.host, block)
        assert refused.value.field == "block"


def test_a_wrong_block_is_named_in_the_log(caplog):
    desk = Desk()
    desk.serve("a", "aaaabbbbc")
    key = desk.digests("aaaabbbb", NO_EXTRA_KEYS)[1].hex()
    with caplog.at_level(logging.ERROR):
        desk.step(Part(cache=Cache(evicted=[2], mismatched=[2], hits_checked=1)))
        assert desk.world.host.tally.mismatches == 1
    (line,) = caplog.messages
    name = desk.world.host.name
    assert line.startswith(f"canary: replica {name}, block 2 (group 0, key {key}) is not what its key names")
    assert line.endswith(f"in step 3 of life 2; see kvplane explain {name} --block 2")
