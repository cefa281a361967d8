"""What an operator sees of tiers: metrics, Describe and the text of `kvplane describe` and `kvplane top`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec, TierKind
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.sections import Retain
from kvplane.base.step import ExtraKeys, Part, RowFlag, Step
from kvplane.base.worker import TierUse, WorkerInfo
from kvplane.v1.replica_pb2 import TIER_KIND_DISK, TIER_KIND_HOST
from kvplane_core.face import setup
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from kvplane_service.rpc.encode import encode_description
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_tools.cli.query.replica import _description
from kvplane_tools.cli.views.samples import Trend
from kvplane_tools.cli.views.top_panels import panel
from tests.core.specification import specification_of
from tests.service.monitoring import Pages
from tests.service.tiered import DISK, FILLS, HOST, Served

USE = TierUse(TierKind.HOST, 4096, saved_blocks=7, saved_bytes=3 << 20, refused_blocks=2)
DISK_USE = TierUse(TierKind.DISK, 4096, loaded_blocks=5, loaded_bytes=1 << 30, failed_blocks=3, suspended=True)
SPEC = ReplicaSpec(
    groups=(
        GroupSpec(GroupKind.FULL_ATTENTION, 16),
        GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=32, lookup_class=1),
    ),
    num_blocks=41,
    max_model_len=512,
    hash_block_size=16,
    scheduler_block_size=16,
    max_in_flight_tokens=256,
    tiers=(replace(HOST, num_blocks=80), DISK),
)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    """The whole of these small pools is looked at for what is evicted next."""
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


@pytest.fixture
def served():
    """Prompts that came back, so that blocks were saved, moved, loaded and evicted from tiers."""
    served = Served(spec=SPEC)
    for number in range(2 * FILLS):
        for back in (0, 6, 9):  # not on the device any more, some still on the host
            served.serve((number - back) % FILLS, RowFlag.LOAD)
    served.report(USE, DISK_USE)
    return served


def metrics_of(served):
    pages = Pages(ServiceCollector(served.registry))
    pages.take()
    return {name: values[-1] for name, values in pages.series().items() if "_tier" in name}


def described(served):
    return encode_description(served.entry, StoreReport(StoreState.OFF), served.host.replica.group_counters())


def test_metrics_count_what_the_tiers_hold_and_did(served):
    metrics, tiers = metrics_of(served), specification_of(served.host.replica).tiers
    for tier, name in zip(tiers.each, ("host", "disk"), strict=True):
        assert metrics[f'kvplane_tier_info{{checkpoint_percent="0",replica="r",save="behind",tier="{name}"}}'] == 1
        slots = {
            state: metrics[f'kvplane_tier_slots{{replica="r",state="{state}",tier="{name}"}}']
            for state in ("cached", "shadow", "retained", "free", "in_use")
        }
        assert sum(slots.values()) == tier.num_slots
        assert slots["cached"] + slots["shadow"] == len(tier.key)
        held = [
            metrics[f'kvplane_tier_blocks{{group_kind="{kind}",replica="r",tier="{name}"}}']
            for kind in ("full_attention", "sliding_window")
        ]
        assert held == [sum(key[1] == group for key in tier.key.values()) for group in (0, 1)]
        assert metrics[f'kvplane_tier_hit_tokens_total{{replica="r",tier="{name}"}}'] == tier.hit_tokens > 0
        loaded = metrics[f'kvplane_tier_loaded_blocks_total{{group_kind="full_attention",replica="r",tier="{name}"}}']
        assert loaded > 0
    counters = tiers.counters
    assert sum(tier.hit_tokens for tier in tiers.each) == counters.loaded_tokens
    assert sum(use.loaded for tier in tiers.each for use in tier.uses) == counters.loaded
    assert sum(use.stored for tier in tiers.each for use in tier.uses) == counters.saved + counters.moved
    assert metrics['kvplane_tier_writes_total{outcome="saved",replica="r"}'] == counters.saved > 0
    assert metrics['kvplane_tier_loads_total{outcome="loads",replica="r"}'] == counters.loads > 0
    jobs = sum(metrics[f'kvplane_tier_jobs{{kind="{kind}",replica="r"}}'] for kind in ("load", "save", "move"))
    assert jobs == len(tiers.jobs)


def test_metrics_have_what_workers_report_by_rank(served):
    metrics = metrics_of(served)
    of_rank = 'rank="0",replica="r"'
    assert metrics[f'kvplane_worker_tier_blocks_total{{outcome="refused",{of_rank},tier="host"}}'] == 2
    assert metrics[f'kvplane_worker_tier_bytes_total{{outcome="loaded",{of_rank},tier="disk"}}'] == 1 << 30
    assert metrics[f'kvplane_worker_tier_suspended{{{of_rank},tier="disk"}}'] == 1
    served.now_ns += 10**12  # its lease expires
    assert not any(name.startswith("kvplane_worker_tier") for name in metrics_of(served))


def test_a_replica_without_tiers_has_no_sample():
    served = Served(spec=replace(SPEC, tiers=()))
    served.serve(1)
    assert not any(name.startswith("kvplane_tier") for name in metrics_of(served))
    answer = described(served)
    assert (len(answer.tiers), len(answer.tier_counts), len(answer.tier_jobs)) == (0, 0, 0)


def test_describe_has_each_tier_and_group(served):
    answer, tiers = described(served), specification_of(served.host.replica).tiers
    assert [one.kind for one in answer.tiers] == [TIER_KIND_HOST, TIER_KIND_DISK]
    for one, tier in zip(answer.tiers, tiers.each, strict=True):
        assert (one.num_blocks, one.held_blocks, one.hit_tokens) == (tier.num_slots, len(tier.key), tier.hit_tokens)
        assert sum(group.held_blocks for group in one.groups) == one.held_blocks
    assert answer.tier_counts["saved"] == tiers.counters.saved
    assert set(answer.tier_jobs) == {"load", "save", "move"}
    assert wire.decode_worker(answer.workers[0]).tiers == (USE, DISK_USE)


def test_describe_states_how_a_worker_reads_its_peers(served):
    answer = described(served)
    assert "peers:" not in "\n".join(_description(answer)), "it reads none"
    answer.workers[0].mapped.extend([b"a" * 16, b"b" * 16, b"c" * 16])
    answer.workers[0].nixl_peers = 1
    assert "rank 0, peers: 2 on this host, 1 over NIXL" in "\n".join(_description(answer))


def test_describe_prints_tiers_and_what_workers_did(served):
    answer = described(served)
    lines = [" ".join(line.split()) for line in "\n".join(_description(answer)).splitlines()]
    assert "TIER GROUP SAVE SLOTS HELD RETAINED STORED LOADED EVICTED HIT TOKENS" in lines
    host = answer.tiers[0]
    assert f"host all behind 80 {host.held_blocks} 0 {host.hit_tokens}" in lines
    assert any(line.startswith("disk 1 sliding_window ") for line in lines)
    assert "rank 0, host tier: 3 MiB saved, 0 bytes loaded; blocks: 2 refused" in lines
    assert "rank 0, disk tier: 0 bytes saved, 1 GiB loaded; blocks: 3 failed, suspended: its disk fails" in lines


def test_what_is_retained_is_shown_by_tier():
    host, disk = SPEC.tiers
    served = Served(spec=replace(SPEC, tiers=(replace(host, retained_percent=50), disk)))
    for number in range(FILLS):
        served.serve(number, RowFlag.LOAD)
    replica, hasher = served.host.replica, RequestHasher(HashScheme.of(SPEC), ExtraKeys())
    rows = Retain([4], hasher.append(pack_tokens([FILLS - 12] * 64)), until_ns=[9], percent=[100])
    replica.apply(Step(replica.epoch, replica.seq + 1, [Part(retain=rows)]))
    metrics, answer = metrics_of(served), described(served)
    assert metrics['kvplane_tier_slots{replica="r",state="retained",tier="host"}'] == 6
    assert [one.retained_blocks for one in answer.tiers] == [6, 0]
    lines = [" ".join(line.split()) for line in "\n".join(_description(answer)).splitlines()]
    held = answer.tiers[0].held_blocks
    assert any(line.startswith(f"host all behind, 50% retained per owner 80 {held} 6 ") for line in lines), lines
    console = Console(width=90, record=True)
    console.print(panel(answer, Trend()))
    assert f"{held:,} of 80 slots, 6 retained, " in console.export_text()


def test_top_shows_how_full_each_tier_is(served):
    answer = described(served)
    console = Console(width=90, record=True)
    console.print(panel(answer, Trend()))
    text = console.export_text()
    for name, tier in zip(("host", "disk"), answer.tiers, strict=True):
        assert f"{name} tier " in text
        assert f"{tier.held_blocks:,} of {tier.num_blocks:,} slots, {tier.hit_tokens:,} tokens hit by loads" in text
    assert "2 refused" in text


def test_hits_are_shown_by_their_source(served):
    """Of what hits, the tiers' part is that of their loads, and the rest is the device's."""
    for _ in range(2):  # the second one hits on the device
        served.serve(0, RowFlag.LOAD)
    served.report(USE, replace(DISK_USE, kind=TierKind.PEERS, discarded_blocks=4))
    answer = described(served)
    host, disk = answer.tiers
    device = answer.counters.hit_tokens - host.hit_tokens - disk.hit_tokens
    assert device > 0
    of_host = f"device {device:,} tokens; host {host.hit_tokens:,} tokens, 0 bytes; disk {disk.hit_tokens:,} tokens"
    assert any(line.startswith(f"hits by source: {of_host}") for line in "\n".join(_description(answer)).splitlines())
    console = Console(width=90, record=True)
    console.print(panel(answer, Trend()))
    text = " ".join(console.export_text().replace("\u2502", " ").split())
    assert f"hits {of_host}" in text
    assert "3 of peers gone" in text
    assert "4 of peers written again" in text


def test_counters_of_tiers_outlive_the_exported_state(served):
    replica = specification_of(served.host.replica)
    again = load_state(replica.spec, export_state(replica))
    for tier, other in zip(replica.tiers.each, again.tiers.each, strict=True):
        assert (tier.uses, tier.hit_tokens) == (other.uses, other.hit_tokens)


def test_a_worker_names_each_kind_of_tier_once():
    with pytest.raises(InvalidArgument, match="name each kind once") as caught:
        WorkerInfo(0, 1, "unix:/run/w", 1, "cpu", tiers=(USE, USE)).validate()
    assert caught.value.field == "worker.tiers"
