"""Short recordings of the kinds that the traces lack, each on all three paths.

Retention by intervals, context parallelism, drafts with states, states that are not cached, cross attention, rings,
reference windows, reserved blocks, weak hashes, held requests: `python -m tests.conformance.live --keep` made them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.planting import records_of
from tests.conformance.replay import Replayer, replay_file
from tests.conformance.rpc import make_replayer

KINDS = sorted((Path(__file__).parent / "kinds").glob("*.jsonl.gz"))


@pytest.fixture(scope="module")
def paths(client):
    over = {way: make_replayer(way, client) for way in ("session", "unary")}
    return {"in process": Replayer} | over


@pytest.mark.parametrize("way", ["in process", "session", "unary"])
@pytest.mark.parametrize("path", KINDS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_short_recording_replays_equal(path, way, paths):
    assert replay_file(path, paths[way]).values > 350


def test_short_recordings_contain_what_the_traces_lack():
    headers, operations = [], []
    for path in KINDS:
        header, *rest = records_of(path)
        headers.append(header)
        operations += rest
    groups = [group for header in headers for group in header["groups"]]
    arguments = [header["manager_args"] for header in headers]
    assert {group["manager"] for group in groups} >= {"RSWAManager", "CircularBufferManager", "CrossAttentionManager"}
    assert {group["mamba_cache_mode"] for group in groups} == {None, "align", "none"}
    assert any(group["num_speculative_blocks"] and group["mamba_cache_mode"] == "align" for group in groups)
    assert {header["hash_algo"] for header in headers} >= {"xxhash", "xxhash_cbor"}
    assert any(header["retention_interval"] for header in headers)
    assert {one["dcp_world_size"] for one in arguments} == {1, 2}
    assert any(one["num_prefill_lookahead"] for one in arguments)
    assert any(one.get("num_hash_lookahead_tokens") for one in arguments)
    assert {one["op"] for one in operations} >= {"hold", "release", "evict", "preempt"}
    given = {name for one in operations for name in one if one["op"] in ("alloc", "new")}
    assert given >= {"reserved", "enc", "skip", "ext", "delay", "infl", "look", "full", "has_sched"}
