"""kvplane's tiers on a live vLLM: tokens equal those of an engine that computes everything."""

from __future__ import annotations

from random import Random

import pytest

from tests.service.rig import running
from tests.vllm import environment, processes, tier_faults, tier_runs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS = "1-1"


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()
    environment.write_models("gdn", "mamba2")


def run(model, kind, tier, folder, fault="", **more):
    options = tier_runs.options(model, tier, str(folder), **more)
    found = tier_runs.run(model, kind, SEEDS, options, fault)
    if "seeds" in found:
        right = tier_runs.computed(model, SEEDS, "tp2" if "tp2" in kind else "")
        found["differ"], found["wrong"], found["answers"] = tier_runs.compare(found, right)
        print(f"{model}, {kind}, {tier}, {fault}: {found['wrong']} of {found['answers']} wrong; {found['counts']}")
    return found


@pytest.mark.parametrize(
    ("model", "kind", "tier", "fault"),
    [
        ("llama", "stock", "host", "slow"),
        ("llama", "stock", "disk", ""),
        ("llama", "kvplane async", "disk", "slow"),
        ("gptoss", "stock", "disk", "slow"),
        ("gptoss", "stock async", "host", "slow"),
        ("gptoss", "kvplane", "host", ""),
        ("gemma3", "stock", "disk", ""),
        ("gdn", "stock", "disk", "slow"),
        ("gdn", "kvplane async", "host", ""),
        ("mamba2", "kvplane", "disk", ""),
    ],
)
def test_tokens_are_those_of_an_engine_that_computes_everything(model, kind, tier, fault, tmp_path):
    found = run(model, kind, tier, tmp_path, fault)
    assert (found["differ"], found["mismatched"], found["unsaved"]) == (0, 0, 0)
    assert found["answers"] > 20
    assert found["loaded_tokens"] > 3000
    assert tier == "host" or found["from_disk"] > 300
    assert found["free"] == tier_runs.POOLS[model] - 1
    assert set(found["left"].values()) == {0}


@pytest.mark.parametrize("model", ["gptoss", "gdn"])
def test_a_service_follows_an_engine_with_tiers(model, tmp_path):
    with running() as service:
        found = run(model, f"mirror {service.address} r", "disk", tmp_path)
    assert (found["differ"], set(found["left"].values())) == (0, {0})
    assert found["loaded_tokens"] > 3000


def test_a_service_knows_the_tiers_of_a_stock_engine(tmp_path):
    with running() as service:
        found = run("llama", "stock", "disk", tmp_path, address=service.address, replica="tiers")
        known = service.describe("tiers")
        mirror = service.in_loop(lambda: service.app.registry.get("tiers").host.mirror)
    assert (found["differ"], set(found["left"].values())) == (0, {0})
    assert (mirror.divergences, mirror.images > 0) == (0, True)
    assert known.tier_counts["loaded_tokens"] == found["from_disk"] > 300


def test_what_callers_and_hints_ask_for_takes_effect_in_the_tiers(tmp_path):
    """The service hashes the prompts itself: its hashes are vLLM's."""
    with running() as service:
        found = processes.run("tier_hints_live.py", service.address, "tiers", tmp_path)
    assert found["retained"] == [128, 128, 128]
    assert found["evicted"] == [0, 0]
    assert found["prefetched"] == [128, 128, 128]
    assert found["divergences"] == [0]


def test_two_ranks_keep_their_disks(tmp_path):
    run("llama", "stock tp2", "disk", tmp_path)
    again = run("llama", "stock tp2", "disk", tmp_path)
    assert (again["differ"], again["kept"] > 20) == (0, True)


def test_without_the_fence_tokens_are_wrong(tmp_path):
    assert run("gptoss", "stock", "host", tmp_path, "without fence")["differ"] > 0


@pytest.mark.parametrize("model", ["llama", "gdn", "mamba2"])
def test_garbled_host_memory_is_seen_in_the_tokens(model, tmp_path):
    assert run(model, "stock", "host", tmp_path, "overwritten")["differ"] > 0


def test_a_layout_that_is_wrong_by_one_piece_is_found_at_the_start(tmp_path):
    assert "not where vLLM's config says" in tier_faults.layout_error("llama", str(tmp_path))


@pytest.mark.parametrize("fault", ["hung disk", "failing disk"])
def test_a_disk_that_fails_costs_hits_and_no_token(fault, tmp_path):
    found = run("llama", "stock", "disk", tmp_path, fault, load_timeout="200ms")
    assert found["differ"] == 0
    assert found["late_loads" if fault == "hung disk" else "failed_loads"] > 0


def test_the_disk_keeps_what_a_killed_engine_saved_and_refuses_what_is_damaged(tmp_path):
    assert run("gptoss", "stock", "disk", tmp_path, "killed")["killed"]
    tier_faults.damage(tmp_path)
    after_kill = run("gptoss", "stock", "disk", tmp_path)
    again = run("gptoss", "stock", "disk", tmp_path)
    assert (after_kill["differ"], again["differ"]) == (0, 0)
    assert after_kill["kept"] > 20
    assert after_kill["failed_loads"] > 0
    assert again["kept"] > 20
    assert again["failed_loads"] < after_kill["failed_loads"]


@pytest.mark.parametrize(
    ("model", "kind", "victim"), [("mamba2", "kvplane", "service"), ("llama", "stock tp2", "rank")]
)
def test_what_is_killed_costs_no_token_and_the_disk_keeps_its_keys(model, kind, victim, tmp_path):
    with processes.Service(log_level="ERROR") as service:
        kills = tier_faults.Kills(service, dict.fromkeys(("mamba2", "llamatp2"), str(tmp_path)), Random(1))
        kills.live(model, kind, victim)
        kills.live(model, kind, "")
    assert (kills.problems, kills.counts["tokens"]) == ([], 0)
    assert kills.counts["keys"] > 5  # mamba2's tiers have one for the last block of a prompt
    assert kills.counts["answers"] > 60


def test_without_a_disk_that_can_be_used_the_engine_continues(tmp_path):
    (tmp_path / "file").write_text("no folder")
    found = run("llama", "stock", "disk", tmp_path / "file")
    assert (found["differ"], found["from_disk"]) == (0, 0)
    assert found["loaded_tokens"] > 0
