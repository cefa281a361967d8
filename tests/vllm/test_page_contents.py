"""vLLM's scheduler on a model of page contents: no request reads what is not its own, in any mode.

Each mode plays 8 random schedules, or KVPLANE_VLLM_SCHEDULES.
"""

from __future__ import annotations

import os

import pytest

from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
NUM_SCHEDULES = int(os.environ.get("KVPLANE_VLLM_SCHEDULES", "8"))
MODES = ("inprocess", "mirror", "remote-on", "remote-off")
FAULTS = {  # as in `page_faults`, which needs vLLM: mode and seed that show it
    "copy lost in process": ("inprocess", 3),
    "copy lost in mode remote": ("remote-off", 3),
    "unwritten blocks keep their keys": ("remote-on", 19, "abort=0.15"),
    "copies outlive their requests": ("remote-on", 8, 'kind="state"', "spare=0", "crowd=0.05"),
    "launch counts as executed too early": ("remote-on", 3),
    "reset lost with its session": ("remote-off+pages", 3),
    "reset under requests that hold blocks": ("inprocess", 3),
    "images without an identifier are hashed": ("inprocess", 8),
    "tokens that a session drops are reported": ("inprocess", 4, "sessions=true", "is_async=true"),
}


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


@pytest.fixture(scope="module")
def address():
    with processes.Service() as service:
        yield service.address


def play(mode, seeds, address, *more):
    return processes.run("page_contents.py", mode, seeds, "--address", address, *more)


def test_the_model_of_pages_finds_nothing_wrong_with_stock(address):
    found = play("stock", f"1-{NUM_SCHEDULES}", address)
    assert found["wrong"] == {}


@pytest.mark.parametrize("mode", [*MODES, *(f"{mode}+pages" for mode in MODES)])
def test_requests_read_their_own_content(mode, address):
    found = play(mode, f"1-{NUM_SCHEDULES}", address)
    seen = found["seen"]
    print(f"{mode}: {found['schedules']} schedules, {seen}")
    assert found["wrong"] == {}
    assert seen["hits"] > 100 * NUM_SCHEDULES
    assert min(seen[name] for name in ("copies", "aborted", "resets", "refused resets", "resumed")) > 0
    assert seen["continued"] > 10  # sessions
    assert "+pages" in mode or seen.get("unfinished", 0) <= NUM_SCHEDULES // 8
    assert seen.get("resets that raised", 0) <= seen.get("lost sessions", 0)
    assert (seen.get("processes", 0) > 0) == ("+pages" in mode)
    assert (seen.get("lost sessions", 0) > 0) == ("remote" in mode)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, address):
    mode, seed, *more = FAULTS[fault]
    options = ("--fault", fault, "--only", "lost=0.03", "reset=0.08", "sessions=false", "crowd=0", *more)
    found = play(mode, f"{seed}-{seed}", address, *options)
    print(f"{fault}: {list(found['wrong'].values())}")
    assert found["wrong"]


def test_a_model_without_a_cache_gets_the_manager_of_vllm_or_is_refused_by_name():
    """Encoders have none, and vLLM builds a KV cache without groups for them."""
    found = processes.run("without_cache.py")
    assert found["fallback"] == "KVCacheManager"
    assert "no KV cache" in found["refused"]
