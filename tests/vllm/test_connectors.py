"""KV connectors on a live vLLM: what stock decides with a connector, kvplane decides too."""

from __future__ import annotations

from functools import cache

import pytest

from tests.service.rig import running
from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS = "1-2"
POOLS = {"llama": 40, "gptoss": 60, "gemma3": 110}  # blocks; few enough that requests are preempted
EQUAL = [
    ("llama", "offloading"),
    ("llama", "several"),
    ("llama", "sync"),
    ("llama", "async"),
    ("llama", "async failing"),
    ("gptoss", "offloading"),
    ("gptoss", "offloading decoded"),
    ("gemma3", "offloading"),
]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def run(model, connector, kind, *target):
    found = processes.run("connected.py", model, connector, kind, SEEDS, POOLS[model], *target)
    assert found["loaded"] > 1000
    ended = [seed["aborted"] for seed in found["seeds"] if "aborted" in seed]
    assert all(one["aborted"] > 20 and one["waiting"] == 0 and one["free"] == POOLS[model] - 1 for one in ended)
    return found


stock_of = cache(lambda model, connector: run(model, connector, "stock"))


def tokens_of(found):
    """By seed and prompt: all different answers."""
    aborted = [seed["aborted"]["tokens"] for seed in found["seeds"] if "aborted" in seed]
    return [{prompt: {tuple(one) for one in answers} for prompt, answers in seed.items()} for seed in aborted]


@pytest.mark.parametrize(("model", "connector"), EQUAL)
def test_all_decisions_with_a_connector_equal_those_of_stock(model, connector):
    """Tokens, hits, loads, steps, preemptions, block tables, orders and KV events; requests are aborted while they
    load, and blocks of ended requests are kept until they are saved.
    """
    stock, ours = stock_of(model, connector), run(model, connector, "kvplane")
    assert (stock.pop("manager"), ours.pop("manager")) == ("KVCacheManager", "InProcessManager")
    print(f"{model}, {connector}: {ours['loaded']} tokens loaded, {ours.get('failed', 0)} loads failed")
    assert ours == stock
    assert ("failing" not in connector) or ours["failed"] > 5


def test_no_request_uses_a_block_whose_load_failed():
    """Tokens equal those of a run without failures. Those of stock do not always: it keeps the keys of such blocks."""
    good, ours = stock_of("llama", "sync"), run("llama", "sync failing", "kvplane")
    assert ours["failed"] > 5
    for one, other in zip(good["seeds"], ours["seeds"], strict=True):
        assert one.get("tokens") == other.get("tokens")
    for right, found in zip(tokens_of(good), tokens_of(ours), strict=True):
        common = right.keys() & found.keys()
        assert len(common) > 5
        assert {prompt: found[prompt] for prompt in common} == {prompt: right[prompt] for prompt in common}


@pytest.mark.parametrize("connector", ["offloading", "async failing", "sync failing"])
def test_a_service_follows_an_engine_with_a_connector(connector):
    with running() as service:
        ours = run("llama", connector, "mirror", service.address, "r")
    assert ours["manager"] == "MirrorManager"
    mirror = ours["mirror"]
    assert (mirror["same_state"], mirror["images"], mirror["divergences"]) == (True, 1, 0)
    if connector != "sync failing":
        assert ours["seeds"] == stock_of("llama", connector)["seeds"]


def test_each_connector_of_vllm_runs_or_is_refused_by_its_name():
    answers = processes.run("connected.py", "refusals")
    assert {name for name, answer in answers.items() if not answer} == {
        "LMCacheMPConnector",
        "MooncakeConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "PageStore",
    }
    refused = {name: answer for name, answer in answers.items() if answer}
    assert len(refused) > 10
    assert all(f"connector {name} " in answer for name, answer in refused.items())
    assert [name for name, answer in refused.items() if "there was no test with it" in answer] == []


@pytest.mark.parametrize(
    ("model", "connector", "reason"),
    [("llama", "DecodeBenchConnector", "dummy values"), ("qwen3next", "offloading", "recurrent states")],
)
def test_an_engine_with_a_refused_connector_does_not_start(model, connector, reason):
    assert reason in processes.run("connected.py", "refusal", model, connector)
