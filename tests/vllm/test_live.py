"""The same requests on an unmodified vLLM and on one with kvplane's scheduler: everything that both decide is equal.

One engine of each kind answers all seeds: 20, or KVPLANE_VLLM_SEEDS.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from kvplane_core.face import loader
from kvplane_vllm.engine_lock import EngineLock
from tests.service.rig import running
from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
NUM_SEEDS = int(os.environ.get("KVPLANE_VLLM_SEEDS", "20"))
# Blocks in the pool: few enough that requests are preempted.
POOLS = {"llama": 28, "gptoss": 50, "gemma3": 105, "qwen3next": 22}
FEW_SEEDS = 3  # with a service, and with speculation
NGRAM_MODELS = ["llama", "gptoss"]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def run(model, kind, num_seeds, *target):
    result = processes.run("workload.py", model, kind, f"1-{num_seeds}", POOLS[model], *target)
    assert len(result["seeds"]) == num_seeds
    return result


stock_of = cache(lambda model: run(model, "stock", NUM_SEEDS))


def differing(stock, ours):
    """Names of what differs, by seed."""
    pairs = enumerate(zip(stock["seeds"], ours["seeds"], strict=False), 1)
    found = {seed: [name for name in one if one[name] != other[name]] for seed, (one, other) in pairs}
    return {seed: names for seed, names in found.items() if names}


def check_core(ours):
    """The compiled core decided, unless KVPLANE_CORE selects another."""
    is_compiled = os.environ.get(loader.VARIABLE) != "python"
    assert ours["core"] == ("NativeReplica" if is_compiled else "Replica")


def summary(model, stock, ours):
    check_core(ours)
    requests = sum(len(seed["tokens"]) for seed in ours["seeds"])
    hits = sum(sum(seed["cached"]) for seed in ours["seeds"])
    preempted, steps = (sum(seed[name] for seed in ours["seeds"]) for name in ("preempted", "steps"))
    print(
        f"{model}: {len(ours['seeds'])} seeds, {requests} requests, {steps} steps, {preempted} preemptions, "
        f"{ours['removed']} of {ours['stored']} cached blocks evicted, {hits} tokens hit, {ours['drafted']} drafted; "
        f"median schedule() at batches <= 8: {stock['schedule_us']} us stock, {ours['schedule_us']} us kvplane"
    )
    return requests, preempted


@pytest.mark.parametrize("model", POOLS)
def test_all_decisions_equal_those_of_stock(model):
    """Tokens, hits, steps, preemptions, block tables, orders and KV events."""
    stock, ours = stock_of(model), run(model, "kvplane", NUM_SEEDS)
    requests, preempted = summary(model, stock, ours)
    assert (stock["manager"], ours["manager"]) == ("KVCacheManager", "InProcessManager")
    assert differing(stock, ours) == {}
    if NUM_SEEDS >= 20:
        assert requests >= 200
        assert preempted >= 20
    assert ours["removed"] >= 0.3 * ours["stored"] > 0


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_hits_are_announced_again_to_clients_that_ask_for_it(model):
    """`kv_cache_report_mode`: "full"."""
    stock, ours, without = (
        run(model, "stock", 2, "--full"),
        run(model, "kvplane", 2, "--full"),
        run(model, "kvplane", 2),
    )
    assert differing(stock, ours) == {}
    assert ours["stored"] > without["stored"]


@pytest.mark.parametrize("model", POOLS)
def test_a_service_follows_the_engine(model):
    """Mode mirror: everything equals stock, one message per schedule(), and the service has the engine's state."""
    with running() as service:
        stock, ours = stock_of(model), run(model, "mirror", min(FEW_SEEDS, NUM_SEEDS), service.address, "r")
        status = service.describe()
    assert ours["manager"] == "MirrorManager"
    summary(model, stock, ours)
    mirror, messages, steps = ours["mirror"], ours["messages"], sum(seed["steps"] for seed in ours["seeds"])
    print(f"{model}: {mirror['steps']} digests compared, {messages} messages in {steps} iterations")
    assert mirror["same_state"]
    keys, left = ours["evicted"]
    assert keys > left == 0
    assert (mirror["images"], mirror["divergences"]) == (1, 0)
    assert status.epoch == 1
    assert status.model_name, "operators see which model it is"
    assert messages <= steps
    assert differing(stock, ours) == {}


def test_a_second_engine_process_is_refused_by_the_lock_of_its_replica():
    with running() as service:
        lock = EngineLock(service.address, "r")
        try:
            with pytest.raises(AssertionError, match=f"the engine process {os.getpid()} writes the replica 'r'"):
                run("llama", "mirror", 1, service.address, "r")
        finally:
            lock.release()


@pytest.mark.parametrize("model", NGRAM_MODELS)
def test_all_decisions_equal_those_of_stock_with_ngram_speculation(model):
    stock, ours = (run(model, kind, FEW_SEEDS, "--ngram") for kind in ("stock", "kvplane"))
    summary(model, stock, ours)
    assert differing(stock, ours) == {}
    assert ours["drafted"] > 50


def test_tokens_differ_where_pages_are_overwritten():
    """The negative control: hits read pages, so a hit on a page with other content changes tokens."""
    kinds = "kvplane", "overwritten"
    good, bad = (processes.run("workload.py", "llama", kind, "1-1", 200)["seeds"][0] for kind in kinds)
    half = len(good["tokens"]) // 2
    assert good["cached"] == bad["cached"]
    assert good["tokens"][:half] == bad["tokens"][:half]
    assert good["tokens"][half:] != bad["tokens"][half:]
