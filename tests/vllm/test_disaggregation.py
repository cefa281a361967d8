"""Prefill on one live vLLM and decode on another by NixlConnector over TCP: kvplane decides what stock does."""

from __future__ import annotations

import time
from functools import cache

import pytest

from tests.service.rig import running
from tests.store.servers import free_port
from tests.vllm import environment
from tests.vllm.pairs import LASTING, NEW, Engine, Passing, computed, engines, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS = (1, 2)
POOLS = {"llama": 40, "gptoss": 60, "gemma3": 130}  # blocks; few enough that requests wait and are preempted
LEASE_S = 6
PAIRS = [
    ("llama", "kvplane", "kvplane"),
    ("llama", "kvplane", "stock"),
    ("llama", "stock", "kvplane"),
    ("gptoss", "kvplane", "kvplane"),
    ("gemma3", "kvplane", "kvplane"),
]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def passed(model, *kinds, address=""):
    """What each engine decided by seed, and the prompts that were answered with other tokens."""
    pool, found, wrong = POOLS[model], [], []
    targets = [(address, f"engine-{number}") if address else () for number in range(2)]
    pair = [Engine(model, kind, pool, *target, **LASTING) for kind, target in zip(kinds, targets, strict=True)]
    with engines(*pair) as (prefill, decode):
        for seed in SEEDS:
            right = computed(prefill, prompts(seed))
            one = Passing(prefill, decode, seed)
            one.run()
            wrong += [number for number, tokens in one.tokens if tokens != right[number]]
            assert len(one.tokens) > 30
            assert one.aborted > 20
            found.append([engine.ask("state") for engine in (prefill, decode)])
    assert all(one["free"] == pool - 1 and not one["requests"] for states in found for one in states)
    assert found[-1][1]["loaded"] > 10_000
    assert min(found[-1][1][name] for name in ("failed", "preempted")) > 0
    managers = [[one.pop("manager") for one in states] for states in found][-1]
    return found, wrong, managers


stock_of = cache(lambda model: passed(model, "stock", "stock"))


@pytest.mark.parametrize(("model", "prefill", "decode"), PAIRS)
def test_all_decisions_of_a_pair_equal_those_of_stock(model, prefill, decode):
    """Steps, preemptions, block tables, KV events, loads and failed loads of each engine; and the tokens equal those of
    an engine that computes everything.
    """
    managers = {"stock": "KVCacheManager", "kvplane": "InProcessManager"}
    ours = passed(model, prefill, decode)
    print(f"{model}: {ours[0][-1][1]}")
    assert ours == (stock_of(model)[0], [], [managers[prefill], managers[decode]])


def test_services_follow_both_engines():
    with running() as service:
        found, wrong, managers = passed("llama", "mirror", "mirror", address=service.address)
    assert (wrong, managers) == ([], ["MirrorManager"] * 2)
    for state in (one for states in found for one in states):
        mirror = state.pop("mirror")
        assert (mirror["same_state"], mirror["images"], mirror["divergences"]) == (True, 1, 0)
    assert found == stock_of("llama")[0]


def test_blocks_of_a_prompt_that_are_free_at_its_end_show_in_the_tokens():
    """A planted fault: the decode engine reads what the next prompts write there."""
    assert passed("llama", "freed early", "kvplane")[1]


@pytest.mark.parametrize("kind", ["stock", "kvplane"])
def test_engines_that_die_cost_no_tokens_and_no_blocks(kind):
    pool, chosen = POOLS["llama"], prompts(1)
    pair = [Engine("llama", kind, pool, kv_lease_duration=LEASE_S) for _ in range(3)]
    with engines(*pair) as (prefill, dies, decode):
        right = computed(prefill, chosen)

        def answered(engine, number, **changed):
            _, transfer = prefill.run(str(number), chosen[number], 1, {"do_remote_decode": True})
            return lambda: engine.run(str(number), chosen[number], NEW, transfer | changed)[0] == right[number]

        assert answered(dies, 0)()

        begin = time.monotonic()
        _, transfer = prefill.run("1", chosen[1], 1, {"do_remote_decode": True})
        dies.ask("add", "1", chosen[1], NEW, transfer)
        dies.kill()  # before it fetches
        assert prefill.ask("state")["free"] < pool - 1, "held for a decode engine"
        while prefill.ask("step", [])["busy"]:
            time.sleep(0.01)
        assert time.monotonic() - begin >= LEASE_S
        assert prefill.ask("state")["free"] == pool - 1

        assert answered(decode, 2)()
        assert answered(decode, 3, remote_engine_id="gone", remote_port=free_port())()
        late = answered(decode, 4)
        prefill.kill()
        assert late()
        state = decode.ask("state")
        assert (state["free"], state["requests"], state["failed"]) == (pool - 1, [], 2)
