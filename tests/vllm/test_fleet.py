"""Claims from the KV events of a running, unmodified vLLM equal what it then hits, on every shape of model.

Each model answers KVPLANE_VLLM_HITS prompts (200) under memory pressure, and others at once between them; before each,
with all events applied, the fleet claims its hit.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryFile

import pytest

from kvplane_fleet.fleet import Fleet, Prompt, following
from kvplane_fleet.settings import PlaceSettings
from tests.store.servers import free_port
from tests.vllm import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
HITS = int(os.environ.get("KVPLANE_VLLM_HITS", "200"))
POOLS = {"llama": 40, "gptoss": 70, "gemma3": 130, "qwen3next": 30}
LENGTHS = {"qwen3next": (1200, 1990)}  # its blocks have 1152 tokens
DRAINED_S = 60


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def _answer(self):
        for line in self._process.stdout or ():
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"vLLM ended with {self._process.wait()}")

    async def ask(self, prompts, new):
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return await asyncio.to_thread(self._answer)


@contextmanager
def running(model: str, events: str, replay: str, **options: object) -> Iterator[Engine]:
    script = Path(__file__).with_name("published_hits.py")
    words = [environment.PYTHON, script, model, POOLS[model], events, replay, json.dumps(options)]
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*map(str, words)], env=environment.variables(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        try:
            yield Engine(process)
        except AssertionError as error:
            errors.seek(0)
            raise AssertionError(f"{error}\n{errors.read()[-3000:]}") from error
        finally:
            process.kill()
            process.communicate()


def prompts(model: str, rng: Random) -> Iterator[list[int]]:
    """Conversations: prompts that begin as another, continue one, or repeat one."""
    shortest, longest = LENGTHS.get(model, (40, 400))
    said = [[rng.randrange(3, 900) for _ in range(longest)] for _ in range(6)]
    while True:
        start = rng.choice(said)
        start = start[: rng.choice([len(start), rng.randint(0, len(start))])]
        more = [rng.randrange(3, 900) for _ in range(rng.choice([0, 1, 30, rng.randint(0, shortest)]))]
        prompt = [*start, *more][:longest] or [3]
        said[rng.randrange(len(said))] = prompt if len(prompt) > shortest else [rng.randrange(3, 900)] * longest
        yield prompt


async def drained(fleet: Fleet, batches: int) -> None:
    async with asyncio.timeout(DRAINED_S):
        while fleet.followed["a"].place.batches < batches:  # noqa: ASYNC110 - an event per batch would be slower
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("model", POOLS)
async def test_claims_equal_the_hits_of_the_running_engine(model):
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    rng, fleet = Random(7), Fleet()
    pairs, alone = list[tuple[int, int]](), list[int]()
    prompt = prompts(model, rng)
    bound = [one.replace("127.0.0.1", "*") for one in (events, replay)]
    with running(model, *bound) as engine:
        async with following(fleet, [PlaceSettings("a", events=events, replay=replay)]):
            await asyncio.wait_for(fleet.wait_until_current(), DRAINED_S)
            answer = await engine.ask([next(prompt)], 4)
            while len(pairs) < HITS:
                await drained(fleet, answer["batches"])
                one = next(prompt)
                (claim,) = fleet.claims("", Prompt(one))
                answer = await engine.ask([one], rng.choice([1, 4, 40]))
                pairs.append((claim.tokens, answer["cached"][0]))
                alone.append(max(claim.claim.alone) if claim.claim else 0)
                assert claim.inexact == "" or not claim.claim, claim.inexact
                if rng.random() < 0.2:
                    answer = await engine.ask([next(prompt) for _ in range(4)], 20)
            place = fleet.followed["a"].place
            print(
                f"{model}: {len(pairs)} requests, {sum(one == other for one, other in pairs)} claims equal; "
                f"{sum(other > 0 for _, other in pairs)} hits, {sum(other for _, other in pairs)} tokens, "
                f"{sum(alone)} claimed by the best single group; {place.batches} batches, {place.events} events, "
                f"{place.domain}, groups {place.formats}"
            )
            assert not place.faults.counts
    assert [claim for claim, _ in pairs] == [hit for _, hit in pairs]
    assert sum(hit > 0 for _, hit in pairs) > HITS // 5
