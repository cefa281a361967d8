"""Mode remote: a `kvplane serve` process decides for live engines, compared with stock.

One engine of each kind answers all seeds of a model: 20, or KVPLANE_VLLM_SEEDS.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial

import pytest

import kvplane
from tests.vllm import environment, processes
from tests.vllm.test_live import FEW_SEEDS, NGRAM_MODELS, NUM_SEEDS, POOLS, differing, stock_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
MOST_MORE_STEPS = 1.03  # with pipeline: on


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def run(model, kind, num_seeds, *more):
    return processes.run("workload.py", model, kind, f"1-{num_seeds}", POOLS[model], *more)


few_of_stock = cache(lambda model, *more: run(model, "stock", FEW_SEEDS, *more))


def remote(model, pipeline, *more, num_seeds=FEW_SEEDS, session_socket=""):
    """Run an engine, and check the number of messages of each schedule(): one if it only continues the decodes of the
    one before, else two at most. Its pool must have been short of blocks: 20 preemptions if it answers 20 seeds.
    """
    with processes.Service(session_socket=session_socket) as service:
        local = [session_socket] if session_socket else []
        found = run(model, "remote", num_seeds, *more, service.address, "r", pipeline, *local)
        with kvplane.connect(service.address) as client:
            assert client.describe_replica("r").model_name, "operators see which model it is"
    assert found["manager"] == "RemoteManager"
    steps, preempted = (sum(seed[name] for seed in found["seeds"]) for name in ("steps", "preempted"))
    print(
        f"{model}, pipeline {pipeline}: {len(found['seeds'])} seeds, {steps} steps, {preempted} preemptions, "
        f"{found['removed']} of {found['stored']} cached blocks evicted; calls of schedule() by number of messages: "
        f"{found['messages_decoding']} decoding, {found['messages_others']} others"
    )
    assert set(found["messages_decoding"]) == {"1"}
    assert set(found["messages_others"]) <= {"1", "2"}
    assert found["messages"] == Counter(found["messages_decoding"]) + Counter(found["messages_others"])
    assert preempted >= 20 * (num_seeds >= 20)
    assert found["removed"] >= 0.3 * found["stored"] > 0
    return found


@pytest.mark.parametrize("model", POOLS)
def test_all_decisions_equal_those_of_stock_without_a_pipeline(model):
    """Tokens, hits, steps, preemptions, block tables, orders and KV events; one message per schedule(), rarely two."""
    found = remote(model, "off", num_seeds=NUM_SEEDS)
    assert differing(stock_of(model), found) == {}
    assert found["messages"].get("2", 0) < 0.05 * found["messages"]["1"]
    assert found["unused"] == 0


def test_all_decisions_equal_those_of_stock_over_the_session_socket(tmp_path):
    found = remote("llama", "off", session_socket=str(tmp_path / "sessions"))
    assert differing(few_of_stock("llama"), found) == {}


@pytest.mark.parametrize("model", POOLS)
def test_tokens_equal_those_of_stock_with_a_pipeline(model):
    stock, found = stock_of(model), remote(model, "on", num_seeds=NUM_SEEDS)
    assert [seed["tokens"] for seed in found["seeds"]] == [seed["tokens"] for seed in stock["seeds"]]
    assert [seed["free"] for seed in found["seeds"]] == [seed["free"] for seed in stock["seeds"]]
    steps = [sum(seed["steps"] for seed in one["seeds"]) for one in (stock, found)]
    assert steps[1] <= MOST_MORE_STEPS * steps[0]
    assert found["messages"]["1"] > found["messages"]["2"]


@pytest.mark.parametrize("model", NGRAM_MODELS)
def test_decisions_equal_those_of_stock_with_ngram_speculation(model):
    """`pipeline: on` is switched off."""
    stock, found = few_of_stock(model, "--ngram"), remote(model, "on", "--ngram")
    assert found["drafted"] > 50
    assert differing(stock, found) == {}


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_the_service_preempts_by_priority_as_stock_does(pipeline):
    stock, found = few_of_stock("llama", "--priority"), remote("llama", pipeline, "--priority")
    if pipeline == "off":
        assert differing(stock, found) == {}
    assert [seed["tokens"] for seed in found["seeds"]] == [seed["tokens"] for seed in stock["seeds"]]


def aborts(kind, *more):
    return processes.run("remote_aborts.py", "llama", kind, 1, 60, *more)


stock_tokens = cache(lambda: {prompt: one for prompt, (one,) in aborts("stock")["tokens"].items()})


def is_as_stock(found):
    return all(one == stock_tokens()[prompt] for prompt, answers in found["tokens"].items() for one in answers)


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_tokens_are_right_when_requests_end_behind_their_grants(pipeline):
    with processes.Service() as service:
        found = aborts(pipeline, service.address, "r")
    print({name: found[name] for name in ("aborted", "steps", "cached", "messages", "unused")})
    assert found["aborted"] > 10
    assert found["cached"] > 500
    assert (found["unused"] > 10) == (pipeline == "on")
    assert set(found["messages"]) <= {"0", "1", "2"}
    assert is_as_stock(found)


def disturbed(service, disturb):
    target = service.address, "r", "disturbed"
    return processes.run("remote_aborts.py", "llama", "on", 1, 60, *target, on_step=disturb)


def test_a_restarted_service_loses_no_request():
    """Killed and restarted under load, without a store: the engine registers again, and the requests start over."""
    with processes.Service() as service:

        def restart():
            service.kill()
            service.start()

        found = disturbed(service, restart)
        print(f"{service.lives} lives of the service, {found['lives']} sessions, {found['steps']} steps")
    assert found["lives"] > 2
    assert is_as_stock(found)


def test_an_engine_waits_for_a_service_that_does_not_answer():
    """Steps in which nothing is scheduled, until it answers."""
    with processes.Service() as service:
        pause = partial(service.pause, 3.0)
        found = disturbed(service, pause)
    print({name: found[name] for name in ("steps", "messages", "lives")})
    assert found["messages"]["0"] > 4
    assert is_as_stock(found)


FAULTS = {  # name -> pipeline and blocks with which it shows
    "keys of unwritten blocks kept": ("on", 60),
    "refused row not reported": ("off", 30),
    "wrong victims": ("off", 30),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault):
    (pipeline, blocks), steps = FAULTS[fault], list[int]()
    try:
        with processes.Service() as service:
            target = (service.address, "r", fault)
            noted = partial(steps.append, 1)
            found = processes.run("remote_aborts.py", "llama", pipeline, 1, blocks, *target, on_step=noted)
        shown = "" if is_as_stock(found) else "other tokens"
        if blocks != 60 and not shown:
            with processes.Service() as service:
                good = processes.run("remote_aborts.py", "llama", pipeline, 1, blocks, service.address, "r")
            shown = "other steps" if (good["steps"], good["cached"]) != (found["steps"], found["cached"]) else ""
    except AssertionError as error:
        if not steps:  # the engine did not start
            raise
        shown = str(error).strip().splitlines()[-1]
    print(f"{fault}: {shown}")
    assert shown


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_a_reset_does_not_wait_for_a_service_that_does_not_answer(pipeline):
    """No request holds a block: the engine leaves the session, whose keys the next one does not know."""
    with processes.Service() as service:
        steps = iter([service.kill, service.start])
        found = processes.run("resets.py", service.address, pipeline, on_step=lambda: next(steps)())
    print(found)
    assert found["resets"] == [True] * 6
    assert found["took_s"] < 1.5
    assert found["waits"]
    assert found["still_waits"] == ""
    assert len({tuple(one) for one in found["tokens"]}) == 1
    assert [bool(one) for one in found["cached"]] == [False, True, False, True]
