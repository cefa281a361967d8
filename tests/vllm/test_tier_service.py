"""The tiers as a replica of a service: it follows them, and what its callers ask for takes effect there."""

from __future__ import annotations

import math
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Medium
from kvplane.base.requests import Content
from kvplane.base.step import EventKind
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.state import digest
from kvplane_tools.cli.query.replica import _description
from kvplane_vllm.tiers import hints
from kvplane_vllm.tiers.host import HostAllocator, host_spec
from kvplane_vllm.tiers.messages import Ready
from kvplane_vllm.tiers.planner import Planner
from tests.service.rig import running
from tests.vllm.followed import Followed, hashed_as_by_a_service, hint
from tests.vllm.tier_world import Request, engine_spec, options

NAME = "engine-tiers"
HOST, SLOTS = 70, 600


@pytest.fixture(autouse=True)
def hashed():
    with hashed_as_by_a_service():
        yield


@pytest.fixture
def service():
    with running() as one:
        yield one


def followed(service, folder):
    return Followed(service, NAME, options(HOST, folder, SLOTS))


PROMPT = [3] * 40


def test_the_service_has_the_state_of_the_tiers_and_events_name_where_a_key_is(service, tmp_path):
    with followed(service, tmp_path / "disk") as world:
        batches = world.client.subscribe(NAME, after_seq=0)
        world.run(100)
        world.applied()
        replica = world.planner.host.replica
        assert service.digest(NAME) == digest(replica)
        found = service.describe(NAME)
        (disk,) = found.tiers
        assert f"of {HOST - 1} blocks in host memory held by 0 running requests" in "\n".join(_description(found))
        assert (found.spec.num_blocks, found.state) == (HOST, pb.REPLICA_STATE_LIVE)
        assert (disk.num_blocks, disk.held_blocks) == (SLOTS, replica.tiers.each[0].num_held)
        assert found.tier_counts["saved"] == replica.tiers.counters.saved > 20
        held = Counter[tuple[Medium, int, int]]()
        last = service.in_loop(lambda: service.app.registry.get(NAME).host.events.last_seq)
        for batch in batches:
            for event in batch.events:
                sign = {EventKind.STORED: 1, EventKind.REMOVED: -1, EventKind.CLEARED: 0}[event.kind]
                for block in event.blocks:
                    held[event.tier, block, event.group] += sign
            if batch.seq == last:
                break
        entries = replica.entries()
        slots = {block for block in entries.block if block >= HOST}
        assert set(held.values()) <= {0, 1}
        assert {block for (where, block, _), count in held.items() if count and where is Medium.DISK} == {
            block - HOST for block in slots
        }
        assert {block for (where, block, _), count in held.items() if count and where is Medium.HOST} == {
            block for block in entries.block if block < HOST
        }


@pytest.mark.parametrize(("seconds", "way", "stays"), [(60, "call", True), (60, "hint", True), (0.2, "call", False)])
def test_what_is_retained_stays_in_host_memory_until_its_end(seconds, way, stays, service, tmp_path):
    with followed(service, tmp_path / "disk") as world:
        other = [4] * 40
        world.answer([*other, 1])
        world.answer([*PROMPT, 1], hint(hints.RETAIN, ttl_s=seconds, priority=10) if way == "hint" else None)
        if way == "call":
            done = world.asked(lambda: world.client.retain(NAME, Content(PROMPT), ttl_s=seconds))
            assert (done.retained_tokens, done.retained_blocks > 10) == (40, True)
            time.sleep(0.3)
        world.flood(0)
        world.applied()
        assert (world.in_host(PROMPT), world.in_host(other)) == (40 if stays else 0, 0)
        assert service.describe(NAME).retained_prefixes == int(stays)


@pytest.mark.parametrize("way", ["call", "hint"])
def test_a_prompt_that_will_come_is_read_from_the_disk_before(way, service, tmp_path):
    with followed(service, tmp_path / "disk") as world:
        world.answer([*PROMPT, 1])
        world.flood(0)
        assert world.in_host(PROMPT) == 0
        if way == "call":
            done = world.asked(lambda: world.client.prefetch(NAME, Content(PROMPT)))
            assert (done.hit_tokens, done.copied_blocks > 10, done.outcome) == (40, True, pb.PREFETCH_OUTCOME_ALL)
            again = world.asked(lambda: world.client.prefetch(NAME, Content([7] * 40)))
            assert (again.hit_tokens, again.copied_blocks) == (0, 0)
        else:
            world.answer([8] * 6, hint(hints.PREFETCH, token_ids=PROMPT))
        world.idle()
        assert world.in_host(PROMPT) == 40
        assert world.planner.host.replica.block_counts.held == 0
        world.applied()
        assert world.wrong == 0


def test_evictions_and_resets_take_effect_in_the_tiers(service, tmp_path):
    with followed(service, tmp_path / "disk") as world:
        world.answer([*PROMPT, 1])
        entries = world.planner.host.replica.entries()
        blocks = [block for block in entries.block if block < HOST]
        world.asked(lambda: world.client.evict_blocks(NAME, blocks))
        assert world.in_host(PROMPT) == 0
        world.answer([*PROMPT, 1])
        assert world.asked(lambda: world.client.reset_prefix_cache(NAME)).done
        world.applied()
        assert len(world.planner.host.replica.entries().block) == 0
        assert service.digest(NAME) == digest(world.planner.host.replica)


@pytest.mark.parametrize(
    ("action_type", "payload"),
    [
        (hints.RETAIN, {}),
        (hints.RETAIN, {"ttl_s": 0}),
        (hints.RETAIN, {"ttl_s": True}),
        (hints.RETAIN, {"ttl_s": 8 * 24 * 3600}),
        (hints.RETAIN, {"ttl_s": 1, "priority": 101}),
        (hints.RETAIN, {"ttl_s": 1, "priority": 0.5}),
        (hints.RETAIN, {"ttl_s": 1, "priority": math.inf}),
        (hints.RETAIN, {"ttl_s": 1, "priority": math.nan}),
        (hints.RETAIN, {"ttl_s": math.nan}),
        (hints.PREFETCH, {}),
        (hints.PREFETCH, {"token_ids": [1, 2, 3]}),
        (hints.PREFETCH, {"token_ids": [1] * 129}),
        (hints.PREFETCH, {"token_ids": [-1] * 8}),
        (hints.PREFETCH, {"token_ids": ["a"] * 8}),
        (hints.PREFETCH, {"token_ids": [1] * 8, "cache_salt": 5}),
    ],
)
def test_a_hint_that_is_wrong_is_named_and_changes_nothing(action_type, payload, caplog):
    spec = host_spec(engine_spec(128, 64), HOST, ())
    planner = Planner(HostAllocator(spec, [Ready(1, [0] * HOST, False, b"")]), 5.0)
    given = {"kv_hints": hint(action_type, **payload), "num_prompt_tokens": 40}
    one = Request(request_id="one", tokens=[*PROMPT], **given)
    planner.new_request(one)
    planner.finish(one)
    (record,) = caplog.records
    assert "payload" in record.getMessage()
    assert not planner.host.is_open


def test_a_salt_that_is_no_text_is_named():
    (action,) = hint(hints.PREFETCH, token_ids=[1] * 8, cache_salt="\ud800").actions
    given = {"kv_hints": SimpleNamespace(actions=[action])}
    with pytest.raises(InvalidArgument, match="salt"):
        hints.prefetches(Request(request_id="one", tokens=[*PROMPT], **given), engine_spec(128, 64))


@pytest.mark.parametrize("payload", [None, [], "text"])
def test_a_payload_that_is_no_object_is_named(payload):
    action = SimpleNamespace(action_type=hints.RETAIN, action_version=hints.VERSION, payload=payload)
    given = {"kv_hints": SimpleNamespace(actions=[action]), "num_prompt_tokens": 40}
    with pytest.raises(InvalidArgument, match="payload"):
        hints.retained(Request(request_id="one", tokens=[*PROMPT], **given), 4)


def test_hints_of_others_and_of_other_versions_are_left_alone(caplog):
    spec = host_spec(engine_spec(128, 64), HOST, ())
    planner = Planner(HostAllocator(spec, [Ready(1, [0] * HOST, False, b"")]), 5.0)
    for action_type, version, lines in (("other", "1", 0), (hints.RETAIN, "2", 1)):
        action = SimpleNamespace(action_type=action_type, action_version=version, payload={"ttl_s": 5})
        given = {"kv_hints": SimpleNamespace(actions=[action]), "num_prompt_tokens": 40}
        planner.finish(Request(request_id="one", tokens=[*PROMPT], **given))
        assert len(caplog.records) == lines
