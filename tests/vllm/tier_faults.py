"""Faults of engines with tiers: processes that are killed, slots that are damaged, and controls that must be seen.

`python -m tests.vllm.tiers` prints the last two, with `--kills N` the first.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm import processes
from tests.vllm.tier_runs import compare, computed, left_of, options, run

PAGE, SEEDS = 4096, "1-1"
REPLICA = "tiers"
STEPS = 100, 600  # of the allocator, between which an engine or a rank is killed
RANKS = ("llama", "gptoss")  # models whose heads two ranks can share


def damage(folder: Path) -> int:
    """Change a byte in each third page of the slots of a disk; returns how many."""
    (slots,) = folder.glob("*.slots")
    places = range(3 * PAGE + 77, slots.stat().st_size, 3 * PAGE)
    with slots.open("r+b") as file:
        for at in places:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    return len(places)


def layout_error(model: str, folder: str) -> str:
    """Return why an engine did not start whose layout is wrong by one piece; "" = it did."""
    try:
        run(model, "stock", SEEDS, options(model, "host", folder), "shifted layout")
    except AssertionError as error:
        found = re.search(r"WrongLayout: (.*)", str(error))
        return found[1] if found else f"another error: {str(error)[-300:]}"
    return ""


def controls(models: list[str]) -> bool:
    """Print a line for each fault of each model; returns whether all were seen, and damaged slots changed no token."""
    seen = [is_seen for model in models for is_seen in _controls(model)]
    return all(seen)


def _controls(model: str) -> Iterator[bool]:
    right = computed(model, SEEDS)
    with tempfile.TemporaryDirectory() as folder:
        garbled = run(model, "stock", SEEDS, options(model, "host", folder), "overwritten")
        tokens, wrong, answers = compare(garbled, right)
        print(f"{model}: host memory overwritten: {wrong} of {answers} answers differ, {tokens} tokens", flush=True)
        yield tokens > 0
        error = layout_error(model, folder)
        print(f"{model}: layout wrong by one piece: {error or 'NOT SEEN'}", flush=True)
        yield "not where vLLM's config says" in error
        assert run(model, "stock", SEEDS, options(model, "disk", folder), "killed")["killed"]
        damaged = damage(Path(folder))
        found = run(model, "stock", SEEDS, options(model, "disk", folder))
        tokens, _, answers = compare(found, right)
        numbers = f"{found['kept']} keys kept, {found['failed_loads']} loads refused, {tokens} tokens differ"
        print(f"{model}: {damaged} bytes of slots damaged: {numbers} of {answers} answers", flush=True)
        yield found["failed_loads"] > 0 and not tokens and not left_of(model, found)


@dataclass(slots=True)
class Kills:
    """One service that follows, and kills of processes of engines that share disks.

    Attributes:
        counts: kills by what is killed, and answers and tokens that were compared.
        problems: what must not be.
    """

    service: processes.Service
    folders: dict[str, str]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)  # disks that were used before

    def live(self, model: str, kind: str, victim: str) -> None:
        """Let an engine run on the disk of the one before, and kill `victim` ("": nothing) in the middle of work."""
        ranks, steps = kind.partition("tp2")[1], self.rng.randrange(*STEPS)
        fault = {"engine": [f"killed {steps}"], "rank": [f"rank killed {steps}"]}.get(victim, [])
        names = {} if ranks else {"address": self.service.address, "replica": f"{REPLICA}-{model}"}
        again = _KilledService(self.service, self.rng.randrange(1, 3)) if victim == "service" else None
        more: dict[str, Any] = {"on_step": again} if again else {}
        found = run(model, kind, SEEDS, options(model, "disk", self.folders[model + ranks], **names), *fault, **more)
        tokens, wrong, answers = compare(found, computed(model, SEEDS, ranks))
        self.counts += Counter({victim: 1, "answers": answers, "tokens": tokens, "keys": found["kept"]})
        numbers = f"{found['kept']} keys kept, {found['loaded_tokens']} tokens loaded; {wrong} of {answers} differ"
        print(
            f"{model}, {kind}: {numbers}; {victim or 'nothing'} killed{f' at step {steps}' if fault else ''}",
            flush=True,
        )
        self._check(model, found, f"{model}, {kind}, {victim}", is_first=model + ranks not in self.begun)
        if again and (again.calls <= again.first or found["followed"]["images"] < 2):
            self.problems.append(f"{model}, {kind}: the service was not away, {again}, {found['followed']}")
        self.begun.add(model + ranks)

    def _check(self, model: str, found: dict[str, Any], name: str, is_first: bool) -> None:
        if not is_first and not found["kept"]:
            self.problems.append(f"{name}: the disk has kept nothing")
        if "killed" in found:
            return
        if left := left_of(model, found):
            self.problems.append(f"{name}: left {left}")
        followed = found.get("followed", {})
        if followed and (followed["divergences"] or not followed["same_state"]):
            self.problems.append(f"{name}: the service has not the engine's state: {followed}")


@dataclass(slots=True)
class _KilledService:
    """Kills the service when an engine notifies a step, and starts it again when it notifies the next."""

    service: processes.Service
    first: int
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.first:
            self.service.kill()
        elif self.calls == self.first + 1:
            self.service.start()


def kill_all(models: list[str], number: int) -> int:
    """Kill processes in the middle of work, each with the disk of the model as the one before left it; then let an
    engine of each model end well. Prints a line for each; returns the status.
    """
    ranks = [model for model in models if model in RANKS]
    schedulers = itertools.cycle(("stock", "stock async", "kvplane"))
    cases = itertools.cycle(
        [(model, "engine") for model in models]
        + [(model, "service") for model in models]
        + [(model, "engine") for model in models]
        + [(model, "rank") for model in ranks]
    )
    with ExitStack() as stack:
        folders = {
            name: stack.enter_context(tempfile.TemporaryDirectory())
            for name in [*models, *(f"{model}tp2" for model in ranks)]
        }
        service = stack.enter_context(processes.Service(log_level="ERROR"))
        kills = Kills(service, folders, random.Random(number))
        for model, victim in itertools.islice(cases, number):
            kills.live(model, next(schedulers) + (" tp2" if victim == "rank" else ""), victim)
        for name in [one for one in folders if one in kills.begun]:
            kills.live(name.removesuffix("tp2"), "stock tp2" if name.endswith("tp2") else "kvplane", "")
        counts = kills.counts
        victims = ", ".join(f"{counts[one]} of {one}s" for one in ("engine", "rank", "service"))
        print(f"{number} kills ({victims}), {counts['keys']} keys kept over them")
        print(f"{counts['answers']} answers compared, {counts['tokens']} tokens differ")
        print("\n".join(kills.problems or ["nothing else is wrong"]))
        return int(counts["tokens"] > 0 or bool(kills.problems))
