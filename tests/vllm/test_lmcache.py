"""A live vLLM whose pages LMCache's server keeps: every token is that of stock vLLM without a connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import pytest

from tests.service.rig import running
from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
SEEDS, POOL = "1-3", 40


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


# What happens to the server, by how often an engine in the middle of requests has notified its steps.
OUTAGES: dict[str, dict[int, Callable[[processes.LmCache], None]]] = {
    "killed": {2: processes.LmCache.kill},
    "killed and started again": {2: processes.LmCache.kill, 8: processes.LmCache.start},
    "stopped": {2: lambda server: server.pause(6.0)},
}


@pytest.mark.parametrize("kind", ["stock", "kvplane"])
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_server_that_fails_in_the_middle_of_requests_costs_no_token(outage, kind):
    numbers = count(1)
    with processes.LmCache(heartbeat_s=1.0) as server:
        began = time.monotonic()
        found = connected(kind, server, on_step=lambda: OUTAGES[outage].get(next(numbers), lambda _: None)(server))
    print(f"{outage}, {kind}: {found['loaded']} tokens loaded in {time.monotonic() - began:.0f} s, {next(numbers)}")
    check(found)


@pytest.mark.parametrize("connector", ["lmcache", "lmcache's own"])
def test_a_model_with_windows_is_refused_with_the_reason(connector):
    """Where LMCache would take it: its server copies the pages, as it does on GPUs."""
    with processes.LmCache("lmcache_driven") as server:
        answer = processes.run("connected.py", "refusal", "gptoss", connector, env=server.env)
    assert "LMCacheMPConnector" in answer
    assert "2 groups of layers" in answer
    assert "gave other tokens" in answer
