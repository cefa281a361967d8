"""Conversations that move between three live vLLM engines on two services, while processes are killed.

    python -m tests.vllm.moving [MODEL] --turns 60 --kills 20 --at-once 3

Needs `make vllm-env`. The engines have kvplane's connector with `peers`, and the schedulers that `--kinds` names. The
first and the third are known to one service, the second to another; the services follow each other. A turn of a
conversation is answered by an engine that is chosen at random, and every answer is compared with that of an engine that
computes everything. A kill is of the engine that has answered before, of the one that answers, or of a service, before
or while they answer; with `--hangs` such a process, with those that it has started, is stopped for up to 20 s.
Ends with status 1 if a token differs, something is left, or a service has not the state of its engines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product, starmap
from random import Random
from typing import Any

from tests.store.servers import free_port
from tests.vllm import environment, tier_runs
from tests.vllm.pairs import NEW, WAIT_S, Driven
from tests.vllm.processes import Service

KINDS = "stock,kvplane,stock async"
POOLS = tier_runs.POOLS  # blocks of the device, for a few requests
INEXACT = ("gdn",)  # in bfloat16: tokens depend on the ends of chunks, on stock vLLM too
BLOCK = 32  # tokens
ROOMY = 2000
VICTIMS = "source", "service 0", "target", "service 1"
SPEAKERS, MOST_TOKENS, THINKS_S, FINISHED_S = 6, 560, 0.4, 30.0
MOST_STEPS = 6  # of a wave, before a kill
HANGS_S = 0.5, 4.0, 20.0  # less and more than calls, reads and leases last
OF_PEERS = "loaded", "discarded", "failed"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a process while a group of turns is answered.

    Attributes:
        victim: one of VICTIMS; "" = nothing happens.
        seconds: that it hangs; 0 = it is killed.
    """

    victim: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Of what is counted."""
        return f"{self.victim or 'nothing'} {'hung' if self.seconds else 'killed'}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs.

    Attributes:
        kinds: of the engines, as of `tiers_live`.
        host: memory of each rank.
        transport: how peers are read.
        at_once: number of requests that are sent together.
    """

    model: str
    kinds: str = KINDS
    host: str = tier_runs.LARGE
    transport: str = "shared-memory"
    at_once: int = 1
    seed: int = 1


@dataclass(slots=True)
class Turn:
    """The next words of a conversation.

    Attributes:
        prompt: the conversation, all of it.
        answers: what is right. In bfloat16 also the answers of an engine that computes in other chunks.
        hit: tokens of the prompt that an infinite cache hits.
    """

    name: str
    speaker: int
    prompt: list[int]
    answers: list[list[int]]
    hit: int = 0


class Moving:
    """Three engines and two services.

    Attributes:
        counts: of kills and hangs by victim, answers, tokens that differ, tokens computed, blocks of peers.
        problems: what must not be.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._model, self._rng = setting, setting.model, Random(setting.seed)
        self.services = [Service(log_level="ERROR") for _ in range(2)]
        for service, other in zip(self.services, reversed(self.services), strict=True):
            service.settings["peer_services"] = other.address
            service.start()
        self.counts, self.problems = Counter[str](), list[str]()
        self._kinds, self._lives = setting.kinds.split(","), Counter[int]()
        self._known = dict[tuple[int, int, int], int]()  # tokens by speaker, engine and its life
        self.engines = [self._engine(number) for number in range(len(self._kinds))]
        for engine in self.engines:
            engine.answer()

    def _engine(self, number: int) -> Driven:
        options = {"host": self._setting.host, "address": self.services[number % 2].address}
        options |= {"peers": str(len(self._kinds) - 1), "peer_transport": self._setting.transport}
        return self._started(self._kinds[number], json.dumps(options | {"replica": f"tiers-{number}"}))

    def _started(self, kind: str, options: str, num_blocks: int = 0) -> Driven:
        words = self._model, kind, num_blocks or POOLS[self._model], options
        over_network = self._setting.transport != "shared-memory"
        env = environment.variables_of_nixl(free_port()) if over_network else environment.variables()
        return Driven("moving_live.py", *words, env=env)

    @property
    def not_computed(self) -> int:
        """Tokens of prompts."""
        return self.counts["alone"] - self.counts["computed"]

    @property
    def share(self) -> float:
        """Of what an engine with room for all conversations hits, how much was not computed."""
        return self.not_computed / max(1, self.counts["hit"])

    @property
    def living_share(self) -> float:
        """The same of what an engine had computed that lived when the request was sent."""
        return self.not_computed / max(1, self.counts["living"])

    def serve(self, num_turns: int, num_kills: int, num_hangs: int = 0) -> None:
        """Let conversations move, and kill and stop processes on the way; then look for what is left."""
        waves, num_faults = list(self._waves(self._conversations(num_turns))), num_kills + num_hangs
        assert num_faults < len(waves), f"{len(waves)} groups of turns have no room for {num_faults} kills and hangs"
        killed, hung = cycle(map(Fault, VICTIMS)), cycle(starmap(Fault, product(VICTIMS, HANGS_S)))
        chosen = [*islice(killed, num_kills), *islice(hung, num_hangs)]
        faults = dict(zip(self._rng.sample(range(1, len(waves)), num_faults), chosen, strict=True))
        last = dict[int, int]()
        for number, wave in enumerate(waves):
            others = [self._others(last.get(turn.speaker, 0)) for turn in wave]
            places = {turn.name: self._rng.choice(some) for turn, some in zip(wave, others, strict=True)}
            time.sleep(THINKS_S)
            self._note_living(wave)
            self._answer(wave, places, faults.get(number, Fault()), last.get(wave[0].speaker, 0))
            for turn in wave:
                last[turn.speaker] = engine = places[turn.name]
                self._known[turn.speaker, engine, self._lives[engine]] = len(turn.prompt) + NEW - 1
        time.sleep(max(HANGS_S) if num_hangs else 0)  # a service that hangs is asked below
        for number in range(len(self.engines)):
            self._retire(number)

    def _others(self, engine: int) -> list[int]:
        return [one for one in range(len(self.engines)) if one != engine]

    def _waves(self, turns: Sequence[Turn]) -> Iterator[list[Turn]]:
        """Divide turns into groups that are sent together, of different conversations."""
        wave: list[Turn] = []
        for turn in turns:
            if len(wave) == self._setting.at_once or turn.speaker in [one.speaker for one in wave]:
                yield wave
                wave = []
            wave.append(turn)
        yield wave

    def _conversations(self, num_turns: int) -> list[Turn]:
        alone, found = self._started("stock", "null", ROOMY), list[Turn]()
        said = [self._new() for _ in range(SPEAKERS)]
        try:
            alone.answer()
            for number in range(num_turns):
                speaker = self._rng.randrange(SPEAKERS)
                if len(said[speaker]) > MOST_TOKENS:
                    said[speaker] = self._new()
                assert alone.ask("reset")
                answer, _ = alone.run(f"turn {number}", said[speaker], NEW)
                found.append(Turn(f"turn {number}", speaker, list(said[speaker]), [answer]))
                said[speaker] += [*answer, *self._words(30)]
            before = self.counts["alone"] = alone.ask("state")["computed"]
            assert alone.ask("reset")
            for turn in found:
                again, _ = alone.run(f"again {turn.name}", turn.prompt, NEW)
                turn.answers += [again] if self._model in INEXACT else []
                after = alone.ask("state")["computed"]
                turn.hit, before = len(turn.prompt) + NEW - 1 - (after - before), after
            for turn in found if self._model in INEXACT else ():
                turn.answers += _in_two_parts(alone, turn)
        finally:
            alone.kill()
        self.counts += Counter(hit=sum(turn.hit for turn in found), tokens=sum(len(turn.prompt) for turn in found))
        return found

    def _new(self) -> list[int]:
        return self._words(self._rng.randint(100, 300))

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 900) for _ in range(count)]

    def _note_living(self, wave: Sequence[Turn]) -> None:
        for turn in wave:
            lives = [(turn.speaker, number, self._lives[number]) for number in range(len(self.engines))]
            known = max(self._known.get(one, 0) for one in lives)
            self.counts["living"] += min(turn.hit, known)

    def _answer(self, wave: Sequence[Turn], places: dict[str, int], fault: Fault, source: int) -> None:
        """Let engines answer a group of turns, and kill or stop a process before or meanwhile. Those of an engine that
        is killed are sent to another; `places` is changed.
        """
        victim = "" if fault.seconds else fault.victim  # that is killed
        target, wait = places[wave[0].name], self._rng.randrange(MOST_STEPS)
        rights, steps, until_s = {turn.name: turn for turn in wave}, 0, time.monotonic() + WAIT_S
        for turn in wave:
            self._send(turn, places)
        while rights or steps <= wait:
            assert time.monotonic() < until_s, f"{rights} do not end"
            if fault.seconds and steps == wait:
                self._process(fault.victim, source, target).pause(fault.seconds)
            elif victim and steps == wait:
                self._kill(victim, source, target)
                for turn in rights.values():
                    if (victim, places[turn.name]) in (("source", source), ("target", target)):
                        places[turn.name] = self._rng.choice(self._others(places[turn.name]))
                        self._send(turn, places)
            steps += 1
            for name, (tokens, _) in self._step({places[name] for name in rights}).items():
                self.counts += Counter(answers=1, differ=_differ(tokens, rights.pop(name).answers))
        self.counts[fault.name] += 1
        for number in {*places.values()} - {source if victim == "source" else target if victim == "target" else -1}:
            self._finish(number)
        self._restart(victim, source, target)

    def _send(self, turn: Turn, places: dict[str, int]) -> None:
        self.engines[places[turn.name]].ask("add", turn.name, turn.prompt, NEW, None)

    def _step(self, numbers: set[int]) -> dict[str, Any]:
        """Run a step of these engines; returns what has ended in it."""
        time.sleep(0.001)
        for number in numbers:
            self.engines[number].send("step", [])
        return {name: one for number in numbers for name, one in self.engines[number].answer()["ended"].items()}

    def _process(self, victim: str, source: int, target: int) -> Service | Driven:
        if victim.startswith("service"):
            return self.services[int(victim[-1])]
        return self.engines[source if victim == "source" else target]

    def _kill(self, victim: str, source: int, target: int) -> None:
        process = self._process(victim, source, target)
        if isinstance(process, Driven):
            self._count(process.ask("state"))
            self._lives[self.engines.index(process)] += 1
        process.kill()

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
        mirror = self.engines[number].ask("mirror")
        busy, state = self._finish(number), self.engines[number].ask("state")
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


def _in_two_parts(alone: Driven, turn: Turn) -> Iterator[list[int]]:
    """Yield the answers of an engine that has computed the prompt up to the end of each block before the rest."""
    for end in range(BLOCK, len(turn.prompt), BLOCK):
        assert alone.ask("reset")
        alone.run(f"first {end} of {turn.name}", turn.prompt[:end], 1)
        yield alone.run(f"behind {end} of {turn.name}", turn.prompt, NEW)[0]


def _differ(tokens: Sequence[int], rights: Sequence[Sequence[int]]) -> int:
    return min(sum(a != b for a, b in zip(tokens, right, strict=True)) for right in rights)


def moved(setting: Setting, num_turns: int, num_kills: int, num_hangs: int = 0) -> Moving:
    """Return what was seen."""
    environment.set_up()
    one = Moving(setting)
    try:
        one.serve(num_turns, num_kills, num_hangs)
    finally:
        one.close()
    return one


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was seen; returns the status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="llama", choices=POOLS)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=0)
    parser.add_argument("--kinds", default=KINDS, help="of the three engines, each stock or kvplane, with async or tp2")
    parser.add_argument("--host", default=tier_runs.LARGE, help="memory of each rank")
    parser.add_argument("--transport", default="shared-memory", choices=["shared-memory", "nixl", "nixl-only"])
    parser.add_argument("--at-once", type=int, default=1, help="requests that are sent together")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    setting = Setting(given.model, given.kinds, given.host, given.transport, given.at_once, given.seed)
    one = moved(setting, given.turns, given.kills, given.hangs)
    counts = one.counts
    print(f"{given.kills} kills: " + ", ".join(f"{name} {counts[f'{name} killed']}" for name in VICTIMS))
    print(f"{given.hangs} hangs: " + ", ".join(f"{name} {counts[f'{name} hung']}" for name in VICTIMS))
    print(f"prompts of {counts['tokens']} tokens, {counts['alone']} computed by an engine without a cache")
    print(f"{counts['computed']} computed here, {one.not_computed} not", end=": ")
    print(f"{one.share:.0%} of the {counts['hit']} that an infinite cache hits", end=", ")
    print(f"{one.living_share:.0%} of the {counts['living']} that a living engine had computed")
    print(", ".join(f"{counts[f'peers {name}']} blocks of peers {name}" for name in OF_PEERS))
    print("\n".join(one.problems or ["nothing is left"]))
    print(f"{counts['answers']} answers, {counts['differ']} tokens differ")
    return int(counts["differ"] > 0 or bool(one.problems))


if __name__ == "__main__":
    sys.exit(main())
