"""A live vLLM whose pages LMCache's server keeps: every token is that of stock vLLM without a connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.service.rig import running
from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS, POOL = "1-3", 40
STOPPED_S = 15.0
IMPATIENT = {"LMCACHE_HEARTBEAT_S": "1", "LMCACHE_TIMEOUT_S": "8"}  # less than STOPPED_S


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


@cache
def computed() -> list[list[list[int]]]:
    """The tokens of stock vLLM without a connector, by seed and prompt."""
    return [one["tokens"] for one in processes.run("workload.py", "llama", "stock", SEEDS, POOL)["seeds"]]


def connected(kind: str, server: processes.LmCache, *target: str, **given: Any) -> dict[str, Any]:
    arguments = "llama", "lmcache", kind, SEEDS, POOL, *target
    return dict(processes.run("connected.py", *arguments, env=server.env, **given))


def check(found: dict[str, Any]) -> None:
    """Tokens of both rounds, and of requests that run while others are aborted; no request and no block is left."""
    rounds = [one for one in found["seeds"] if "tokens" in one]
    assert [one["tokens"] for one in rounds] == computed()
    ended = [one["aborted"] for one in found["seeds"] if "aborted" in one]
    assert all(one["aborted"] > 20 and one["waiting"] == 0 and one["free"] == POOL - 1 for one in ended)
    answers = [{tuple(tokens) for tokens in all_of_one} for one in ended for all_of_one in one["tokens"].values()]
    assert len(answers) > 10
    assert max(map(len, answers)) == 1, "a prompt that was sent twice has one answer"


@pytest.mark.parametrize("kind", ["stock", "kvplane"])
def test_tokens_with_lmcache_equal_those_without(kind):
    with processes.LmCache() as server:
        found = connected(kind, server)
    print(f"{kind}: {found['loaded']} tokens loaded")
    assert found["loaded"] > 1000
    check(found)


def test_a_service_follows_an_engine_with_lmcache():
    with processes.LmCache() as server, running() as service:
        found = connected("mirror", server, service.address, "r")
    assert (found["manager"], found["mirror"]["same_state"]) == ("MirrorManager", True)
    assert found["loaded"] > 1000
    check(found)


def restart(server: processes.LmCache) -> None:
    server.kill()
    server.start()


# What happens to a server behind a look-up, before the load that it promised; and whether it loads anything later.
OUTAGES: dict[str, tuple[Callable[[processes.LmCache], None], bool]] = {
    "killed": (processes.LmCache.kill, False),
    "killed and started again": (restart, True),
    "stopped": (lambda server: server.pause(STOPPED_S), True),
}


@pytest.mark.parametrize("kind", ["stock", "kvplane"])
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_server_that_fails_in_the_middle_of_requests_costs_no_token(outage, kind):
    """It costs time: on a CPU LMCache waits for its server within vLLM's step, on stock too, 300 s by default."""
    happens, comes_back = OUTAGES[outage]
    began, late = time.monotonic(), list[Callable[[processes.LmCache], None]]([happens])
    with processes.LmCache(**IMPATIENT) as server:
        found = connected(kind, server, on_step=lambda: late.pop()(server) if late else None)
    print(f"{outage}, {kind}: {found['loaded']} tokens loaded, {time.monotonic() - began:.0f} s")
    assert not late
    assert (found["loaded"] > 1000) == comes_back
    check(found)


@pytest.mark.parametrize("connector", ["lmcache", "lmcache's own"])
def test_a_model_with_windows_is_refused_with_the_reason(connector):
    """Where LMCache would take it: its server copies the pages, as it does on GPUs."""
    with processes.LmCache("lmcache_driven") as server:
        answer = processes.run("connected.py", "refusal", "gptoss", connector, env=server.env)
    assert "LMCacheMPConnector" in answer
    assert "2 groups of layers" in answer
    assert "gave other tokens" in answer
