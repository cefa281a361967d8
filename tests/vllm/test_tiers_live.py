"""kvplane's tiers on a live vLLM: tokens equal those of an engine that computes everything."""

from __future__ import annotations

from functools import cache

import pytest

from tests.service.rig import running
from tests.vllm import environment, processes, tiers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS = "1-1"
PAGE = 4096


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()
    environment.write_models("gdn", "mamba2")


right = cache(lambda model, has_ranks: tiers.computed(model, "tp2" if has_ranks else "", SEEDS))


def run(model, kind, tier, folder, fault="", more=""):
    options = tiers.options(model, tier, str(folder)).replace("}", more + "}")
    found = tiers.run(model, kind, SEEDS, options, fault)
    if "seeds" in found:
        found["differ"], found["wrong"], found["answers"] = tiers.compare(found, right(model, "tp2" in kind))
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
    assert found["free"] == tiers.POOLS[model] - 1
    assert set(found["left"].values()) == {0}


@pytest.mark.parametrize("model", ["gptoss", "gdn"])
def test_a_service_follows_an_engine_with_tiers(model, tmp_path):
    with running() as service:
        found = run(model, f"mirror {service.address} r", "disk", tmp_path)
    assert (found["differ"], set(found["left"].values())) == (0, {0})
    assert found["loaded_tokens"] > 3000


def test_a_service_knows_the_tiers_of_a_stock_engine(tmp_path):
    with running() as service:
        where = f', "address": "{service.address}", "replica": "tiers"'
        found = run("llama", "stock", "disk", tmp_path, more=where)
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
    with pytest.raises(AssertionError, match="not where vLLM's config says"):
        run("llama", "stock", "host", tmp_path, "shifted layout")


@pytest.mark.parametrize("fault", ["hung disk", "failing disk"])
def test_a_disk_that_fails_costs_hits_and_no_token(fault, tmp_path):
    found = run("llama", "stock", "disk", tmp_path, fault, more=', "load_timeout": "200ms"')
    assert found["differ"] == 0
    assert found["late_loads" if fault == "hung disk" else "failed_loads"] > 0


def test_the_disk_keeps_what_a_killed_engine_saved_and_refuses_what_is_damaged(tmp_path):
    assert run("gptoss", "stock", "disk", tmp_path, "killed")["killed"]
    (slots,) = tmp_path.glob("*.slots")
    with slots.open("r+b") as file:  # a byte of each third page
        for at in range(3 * PAGE + 77, slots.stat().st_size, 3 * PAGE):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    after_kill = run("gptoss", "stock", "disk", tmp_path)
    again = run("gptoss", "stock", "disk", tmp_path)
    assert (after_kill["differ"], again["differ"]) == (0, 0)
    assert after_kill["kept"] > 20
    assert after_kill["failed_loads"] > 0
    assert again["kept"] > 20
    assert again["failed_loads"] < after_kill["failed_loads"]


def test_without_a_disk_that_can_be_used_the_engine_continues(tmp_path):
    (tmp_path / "file").write_text("no folder")
    found = run("llama", "stock", "disk", tmp_path / "file")
    assert (found["differ"], found["from_disk"]) == (0, 0)
    assert found["loaded_tokens"] > 0
