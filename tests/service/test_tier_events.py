"""Events of tiers: a follower of all events knows what each slot of each tier holds, and takes no copy for a page."""

from __future__ import annotations

import msgspec
import pytest

from kvplane.base.events import EventBatch
from kvplane.base.groups import Medium
from kvplane.base.step import Cache, CacheEvent, End, EventKind, RemoveReason
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, part_of
from kvplane_core.face import setup
from kvplane_fleet.faults import Faults
from kvplane_fleet.follow.replica_source import ReplicaSource
from kvplane_fleet.hits import claims
from kvplane_fleet.index import Index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import GroupFormat, Removed, Stored, Tier
from kvplane_fleet.wire.msgpack import BatchDecoder
from tests.core.specification import specification_of
from tests.router.fleets import content, finished
from tests.router.publisher import wire_events
from tests.service.tiered import Served


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    """The whole of these small pools is looked at for what is evicted next."""
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


def test_a_follower_knows_what_each_tier_holds():
    served = Served()
    for fill in range(60):
        served.serve(fill)
    host, disk = served.of(Medium.HOST), served.of(Medium.DISK)
    assert (EventKind.STORED, RemoveReason.NONE) in host
    assert (EventKind.REMOVED, RemoveReason.EVICTED) in host
    assert (EventKind.STORED, RemoveReason.NONE) in disk
    assert (EventKind.REMOVED, RemoveReason.EVICTED) in disk
    assert {event.block_size for event in served.events if event.tier and event.kind is EventKind.STORED} == {16}
    counted = served.host.tally.removals[RemoveReason.EVICTED]
    device = [event for event in served.events if not event.tier and event.kind is EventKind.REMOVED]
    assert counted == sum(len(event.hashes) for event in device)  # a copy that is dropped is no eviction


def test_a_key_that_is_not_trusted_leaves_the_tiers_too():
    served = Served()
    for fill in range(12):
        served.serve(fill)
    pool = specification_of(served.host.replica).coordinator.pool
    saved = {key for tier in specification_of(served.host.replica).tiers.each for key, _ in tier.in_order()}
    block = next(block for block in range(1, pool.num_blocks) if pool.key_of(block) in saved)
    served.step(evicted=[block])
    assert (EventKind.REMOVED, RemoveReason.DROPPED) in served.of(Medium.HOST)


def test_an_engine_that_asks_for_no_events_gets_none_of_tiers():
    served, events = Served(), list[CacheEvent]()
    for fill in range(60):
        served.serve(fill)
        events += served.step().tier_events
    assert served.of(Medium.DISK)
    assert events == []


def test_a_reset_is_one_event():
    served = Served()
    for fill in range(12):
        served.serve(fill)
    before = len(served.events)
    served.step(reset=True)
    assert [event.kind for event in served.events[before:]] == [EventKind.CLEARED]
    assert not served.follower.view


@pytest.mark.parametrize("core", ["python", "native"])
def test_a_reset_behind_the_ends_of_saves_leaves_a_follower_nothing(core, monkeypatch):
    """In one step: a part stores keys in tiers, the next one resets."""
    monkeypatch.setenv("KVPLANE_CORE", core)
    served = Served()
    for fill in range(8):
        served.serve(fill)
    served.step(NewsRow(0, [99] * 65), AdmitRow(0))  # its blocks are those of others, which are saved
    first, second = part_of(FactRow(0, end=End.FREE)), part_of()
    first.cache, second.cache = Cache(jobs_done=list(served._writes)), Cache(reset=True)
    assert [part.reset_done for part in served.engine.step(first, second).parts] == [False, True]
    batches = served.subscription.take()
    shown = [(event.kind, bool(event.tier)) for batch in batches for event in batch.events]
    assert (EventKind.STORED, True) in shown
    assert shown[-1] == (EventKind.CLEARED, False)
    served.follower.read(batches)
    assert not served.follower.view


@pytest.mark.parametrize(
    "shown", ["all", "none", "other pages", "another memory", "another memory and disk", "a disk without a number"]
)
def test_a_new_life_says_what_the_tiers_keep(shown):
    served = Served()
    for fill in range(20):
        served.serve(fill)
    stamps = served.stamps
    match shown:
        case "all":
            served.reopen(stamps)
        case "none":
            served.reopen(())
        case "other pages":  # none has a key: the tiers still have theirs
            served.reopen([0] * 21 + stamps[21:])
        case "another memory":  # of a worker whose disk kept its slots; that the others have their stamps is chance
            served.reopen(stamps, incarnation=6)
        case "another memory and disk":
            served.reopen(stamps, incarnation=6, disks=51)
        case "a disk without a number":
            served.reopen(stamps, incarnation=6, disks=0)
    of_tiers = {entry.tier for entry in served.follower.view if entry.tier}
    both = {Medium.HOST, Medium.DISK}
    assert of_tiers == {"all": both, "other pages": both, "another memory": {Medium.DISK}}.get(shown, set())
    assert any(not entry.tier for entry in served.follower.view) is (shown == "all")
    for fill in range(20, 40):
        served.serve(fill)


def test_a_router_takes_no_copy_in_a_tier_for_a_page():
    served = Served()
    prompts = [served.serve(fill) for fill in range(12)]
    host = served.host
    place = Place(PlaceSettings("r", service="127.0.0.1:1"), Index())
    source = ReplicaSource("127.0.0.1:1", "r", place)
    source._forms = {0: GroupFormat("full_attention", 16, 0)}
    place.use(host.replica.spec)
    for batch in host.events.after(0):
        finished(source._taking(EventBatch(batch.seq, batch.epoch, tuple(batch.events))))
    only_outside = 0
    for tokens in prompts:
        assert place.domain is not None
        (claim,) = claims(place._index, place.domain.keys(tokens), len(tokens), [place.asked()])
        held = content(place)
        keys = place.domain.keys(tokens)[:3]
        hit = host.replica.lookup(host.replica.digests_of(part_of(NewsRow(0, tokens)).news), "", len(tokens))
        assert claim.tokens == hit.num_tokens
        only_outside += claim.tokens == 0 and all(key in held[Tier.HOST, 0] for key in keys)
    assert only_outside


@pytest.mark.parametrize(
    ("medium", "name", "tier"),
    [(Medium.DEVICE, "GPU", Tier.DEVICE), (Medium.HOST, "CPU", Tier.HOST), (Medium.DISK, "STORAGE", Tier.DISK)],
)
def test_events_in_vllm_form_name_the_medium(medium, name, tier):
    """As vLLM 0.33 writes: MEDIUM_GPU, MEDIUM_CPU and MEDIUM_STORAGE (vllm.distributed.kv_events)."""
    form = GroupFormat("full_attention", 16, 0)
    stored = CacheEvent(EventKind.STORED, 0, (b"k" * 16,), (3,), block_size=16, tier=medium)
    gone = CacheEvent(EventKind.REMOVED, 0, (b"k" * 16,), (3,), tier=medium)
    sent = [*wire_events(stored, [form], [] if medium else range(16)), *wire_events(gone, [form], ())]
    assert {one["medium"] for one in sent} == {name}
    assert sent[0]["block_size"] == (0 if medium else 16)
    batch = finished(BatchDecoder(Faults()).decoding(msgspec.msgpack.encode([1.0, sent, 0])))
    assert batch is not None
    first, second = batch.events
    assert isinstance(first, Stored)
    assert isinstance(second, Removed)
    assert (first.tier, second.tier) == (tier, tier)
    assert first.keys == second.keys
