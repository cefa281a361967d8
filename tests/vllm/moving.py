"""Conversations that move between three live vLLM engines on two services, while processes are killed.

    python -m tests.vllm.moving [MODEL] --turns 60 --kills 20

Needs `make vllm-env`. The engines have kvplane's connector with `peers`: two have vLLM's scheduler, one kvplane's. Two
are known to one service, the third to another; the services follow each other. Each turn of a conversation is answered
by an engine that is chosen at random, and every answer is compared with that of an engine that computes everything. A
kill is of the engine that has answered before, of the one that is to answer, or of a service, before the answer. Ends
with status 1 if a token differs, something is left, or a service has not the state of its engines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import Any

from tests.vllm import environment, tier_runs
from tests.vllm.pairs import NEW, Driven
from tests.vllm.processes import Service

KINDS = "stock", "kvplane", "stock"
# Blocks of the device, for a few requests. In bfloat16 tokens depend on the ends of chunks, on stock vLLM too.
POOLS = {model: blocks for model, blocks in tier_runs.POOLS.items() if model != "gdn"}
ROOMY = 2000
VICTIMS = "source", "service 0", "target", "service 1"
SPEAKERS, MOST_TOKENS, THINKS_S, FINISHED_S = 6, 560, 0.4, 30.0
OF_PEERS = "loaded", "discarded", "refused", "failed"


class Moving:
    """Three engines and two services.

    Attributes:
        counts: of kills by victim, answers, tokens that differ, tokens computed, blocks of peers.
        problems: what must not be.
    """

    def __init__(self, model: str, seed: int) -> None:
        self._model, self._rng = model, Random(seed)
        self.services = [Service(log_level="ERROR") for _ in range(2)]
        for service, other in zip(self.services, reversed(self.services), strict=True):
            service.settings["peer_services"] = other.address
            service.start()
        self.counts, self.problems = Counter[str](), list[str]()
        self.engines = [self._engine(number) for number in range(len(KINDS))]
        for engine in self.engines:
            engine.answer()

    def _engine(self, number: int) -> Driven:
        options = {"host": "64MiB", "address": self.services[number % 2].address, "peers": "4"}
        return self._started(KINDS[number], json.dumps(options | {"replica": f"tiers-{number}"}))

    def _started(self, kind: str, options: str, num_blocks: int = 0) -> Driven:
        words = self._model, kind, num_blocks or POOLS[self._model], options
        return Driven("moving_live.py", *words, env=environment.variables())

    @property
    def share(self) -> float:
        """Of what an engine with room for all conversations hits, how much was not computed."""
        return (self.counts["alone"] - self.counts["computed"]) / max(1, self.counts["hit"])

    def serve(self, num_turns: int, num_kills: int) -> None:
        """Let conversations move, and kill processes on the way; then look for what is left."""
        chosen = self._conversations(num_turns)
        kills = dict(zip(self._rng.sample(range(1, num_turns), num_kills), cycle(VICTIMS), strict=False))
        last = dict[int, int]()
        for number, (speaker, prompt, right) in enumerate(chosen):
            source = last.get(speaker, 0)
            target = self._rng.choice([one for one in range(len(self.engines)) if one != source])
            last[speaker] = answering = self._after_kill(kills.get(number, ""), source, target)
            time.sleep(THINKS_S)
            tokens, _ = self.engines[answering].run(f"turn {number}", prompt, NEW)
            self._finish(answering)
            self._restart(kills.get(number, ""), source, target)
            self.counts += Counter(answers=1, differ=sum(a != b for a, b in zip(tokens, right, strict=True)))
            self.counts += Counter(tokens=len(prompt))
        for number in range(len(self.engines)):
            self._retire(number)

    def _conversations(self, num_turns: int) -> list[tuple[int, list[int], list[int]]]:
        """Return turns: the conversation, all of it, and the right answer."""
        alone, found = self._started("stock", "null", ROOMY), []
        said = [self._new() for _ in range(SPEAKERS)]
        try:
            alone.answer()
            for number in range(num_turns):
                speaker = self._rng.randrange(SPEAKERS)
                if len(said[speaker]) > MOST_TOKENS:
                    said[speaker] = self._new()
                assert alone.ask("reset")
                answer, _ = alone.run(f"turn {number}", said[speaker], NEW)
                found.append((speaker, list(said[speaker]), answer))
                said[speaker] += [*answer, *self._words(30)]
            self.counts["alone"] = alone.ask("state")["computed"]
            for number, (_, prompt, _) in enumerate(found):
                alone.run(f"again {number}", prompt, NEW)
            self.counts["hit"] = 2 * self.counts["alone"] - alone.ask("state")["computed"]
        finally:
            alone.kill()
        return found

    def _new(self) -> list[int]:
        return self._words(self._rng.randint(100, 300))

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 900) for _ in range(count)]

    def _after_kill(self, victim: str, source: int, target: int) -> int:
        """Kill what is to be killed; returns the engine that answers."""
        self.counts[f"{victim or 'nothing'} killed"] += 1
        if victim.startswith("service"):
            self.services[int(victim[-1])].kill()
        elif victim:
            killed = source if victim == "source" else target
            state = self.engines[killed].ask("state")
            self._count(state)
            self.engines[killed].kill()
        return target if victim != "target" else next(one for one in range(3) if one not in (source, target))

    def _restart(self, victim: str, source: int, target: int) -> None:
        if victim.startswith("service"):
            self.services[int(victim[-1])].start()
        elif victim:
            number = source if victim == "source" else target
            self.engines[number] = self._engine(number)
            self.engines[number].answer()

    def _count(self, state: dict[str, Any]) -> None:
        self.counts += Counter(computed=state["computed"])
        self.counts += Counter({f"peers {name}": count for name, count in state["peers"].items()})

    def _retire(self, number: int) -> None:
        """Compare an engine's state with its service's."""
        self._count(self.engines[number].ask("state"))
        # A service that was started again learns the state of an idle engine from its next step.
        self.engines[number].run("last", self._new(), 1)
        busy, state = self._finish(number), self.engines[number].ask("state")
        mirror = self.engines[number].ask("mirror")
        if busy or state["free"] != POOLS[self._model] - 1 or state["held"] or state["mismatched"]:
            self.problems.append(f"engine {number}: it has not ended all: {state}")
        if not mirror["same_state"] or mirror["divergences"]:
            self.problems.append(f"engine {number}: its service has another state: {mirror}")

    def _finish(self, number: int) -> bool:
        """Let an engine end what it saves; returns whether it has not."""
        until_s = time.monotonic() + FINISHED_S
        while (is_busy := self.engines[number].ask("step", [])["busy"]) and time.monotonic() < until_s:
            time.sleep(0.01)
        return bool(is_busy)

    def close(self) -> None:
        """Kill all processes."""
        for engine in self.engines:
            engine.kill()
        for service in self.services:
            service.kill()


def moved(model: str, num_turns: int, num_kills: int, seed: int = 1) -> Moving:
    """Return what was seen."""
    environment.set_up()
    one = Moving(model, seed)
    try:
        one.serve(num_turns, num_kills)
    finally:
        one.close()
    return one


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was seen; returns the status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="llama", choices=POOLS)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args(arguments)
    one = moved(given.model, given.turns, given.kills)
    counts = one.counts
    print(f"{given.kills} kills: " + ", ".join(f"{name} {counts[f'{name} killed']}" for name in VICTIMS))
    print(f"prompts of {counts['tokens']} tokens, {counts['alone']} computed by an engine without a cache")
    print(
        f"{counts['computed']} computed here; of the {counts['hit']} hit by an infinite cache {one.share:.0%} were not"
    )
    print(", ".join(f"{counts[f'peers {name}']} blocks of peers {name}" for name in OF_PEERS))
    print("\n".join(one.problems or ["nothing is left"]))
    print(f"{counts['answers']} answers, {counts['differ']} tokens differ")
    return int(counts["differ"] > 0 or bool(one.problems))


if __name__ == "__main__":
    sys.exit(main())
