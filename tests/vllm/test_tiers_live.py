"""kvplane's tiers on a live vLLM with its own scheduler: tokens equal those of an engine that computes everything."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS = "1-2"
POOLS = {"llama": 40, "gptoss": 60, "gemma3": 110}  # blocks; so few that requests are preempted
HOST = {"host": "64MiB"}
SMALL = {"llama": "3MiB", "gptoss": "3MiB", "gemma3": "6MiB"}  # so that most hits are on the disk


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def run(model, *target, pool=0, seeds=SEEDS):
    found = processes.run("tiers_live.py", model, "stock", pool or POOLS[model], seeds, *target)
    return found if "counts" not in found else found | found["counts"]


computed = cache(lambda model: run(model, "null", pool=2000))


def wrong(found, model):
    """How many answers differ from those of an engine that computes each prompt alone, and of how many."""
    pairs = [
        (one, right["tokens"][prompt][0])
        for seed, right in zip(found["seeds"], computed(model)["seeds"], strict=False)
        for prompt, answers in seed["tokens"].items()
        for one in answers
    ]
    return sum(one != right for one, right in pairs), len(pairs)


@pytest.mark.parametrize("fault", ["", "slow"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("model", POOLS)
def test_tokens_are_those_of_an_engine_that_computes_everything(model, tier, fault, tmp_path):
    disk = {"host": SMALL[model], "disk": str(tmp_path), "disk_size": "200MiB"}
    found = run(model, json.dumps(HOST if tier == "host" else disk), fault)
    differ, of = wrong(found, model)
    print(f"{model}, {tier}: {differ} of {of} differ, {found['loaded_tokens']} loaded, {found['counts']}")
    assert (differ, found["mismatched"], found["unsaved"]) == (0, 0, 0)
    assert of > 40
    assert found["preempted"] > 0
    assert found["loaded_tokens"] > 3000
    assert tier == "host" or found["from_disk"] > 500
    assert found["free"] == POOLS[model] - 1
    assert set(found["left"].values()) == {0}


def test_without_the_fence_tokens_are_wrong():
    assert wrong(run("gptoss", json.dumps(HOST), "without fence"), "gptoss")[0] > 0


def test_garbled_host_memory_is_seen_in_the_tokens():
    assert wrong(run("llama", json.dumps(HOST), "overwritten"), "llama")[0] > 0


def test_a_layout_that_is_wrong_by_one_piece_is_found_at_the_start():
    with pytest.raises(AssertionError, match="not where vLLM's config says"):
        run("llama", json.dumps(HOST), "shifted layout")
