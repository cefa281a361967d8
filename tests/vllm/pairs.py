"""Two live vLLM engines, of which one prefills and the other decodes: commands to each, and requests that pass both."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import Any

from tests.store.servers import free_port
from tests.vllm import environment

NEW = 16
NUM_PROMPTS, NUM_REQUESTS = 12, 80
MOST_STEPS = 3000
WAIT_S = 120.0
FAR = 1 << 20  # added to blocks that the prefill engine does not have
LASTING = {"kv_lease_duration": 3600}  # seconds that a prefill engine holds blocks for a decode engine


class Driven:
    """An engine in a process of its own."""

    def __init__(self, script: str, *words: object, env: dict[str, str]) -> None:
        """`script`: of this folder, with an engine of `disaggregated.Driven`."""
        command = [str(environment.PYTHON), str(Path(__file__).with_name(script)), *map(str, words)]
        self._errors = TemporaryFile("w+")  # noqa: SIM115 - closed by `kill`
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, env=env, text=True, **pipes)

    def answer(self) -> Any:
        """Return the next answer."""
        for line in self._process.stdout or ():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._errors.seek(0)
        raise AssertionError(f"vLLM ended with {self._process.wait()}\n{self._errors.read()[-4000:]}")

    def send(self, *command: Any) -> None:
        """Send a command, a method with its arguments, without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def ask(self, *command: Any) -> Any:
        """Return the answer to a command."""
        self.send(*command)
        return self.answer()

    def run(self, name: str, prompt: list[int], tokens: int, transfer: dict[str, Any] | None = None) -> Any:
        """Run one request to its end; returns its tokens, and what the other engine needs."""
        self.ask("add", name, prompt, tokens, transfer)
        until_s = time.monotonic() + WAIT_S
        while name not in (ended := self.ask("step", [])["ended"]):
            assert time.monotonic() < until_s, f"{name} does not end"
            time.sleep(0.001)
        return ended[name]

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Engine(Driven):
    """An engine with NixlConnector."""

    def __init__(self, model: str, kind: str, num_blocks: int, *target: str, **extra: Any) -> None:
        """`extra`: options of NixlConnector. With a lease that lasts, its transfers are timed."""
        words = model, kind, num_blocks, int(extra == LASTING), json.dumps(extra), *target
        super().__init__("disaggregated.py", *words, env=environment.variables_of_nixl(free_port()))


@contextmanager
def engines(*started: Engine) -> Iterator[tuple[Engine, ...]]:
    """Wait until these engines have started, and kill them at the end."""
    try:
        for one in started:
            one.answer()
        yield started
    finally:
        for one in started:
            one.kill()


def prompts(seed: int) -> list[list[int]]:
    """Prompts of random lengths, each with a random part of one of three prefixes."""
    rng = Random(seed)
    prefixes = [[rng.randrange(3, 900) for _ in range(400)] for _ in range(3)]
    lengths = [rng.randint(40, 400) for _ in range(NUM_PROMPTS)]
    cuts = [rng.randint(0, length) for length in lengths]
    return [
        rng.choice(prefixes)[:cut] + [rng.randrange(3, 900) for _ in range(length - cut)]
        for length, cut in zip(lengths, cuts, strict=True)
    ]


def computed(engine: Driven, chosen: Sequence[list[int]]) -> list[list[int]]:
    """Return the answers of an engine that computes everything."""
    found = []
    for number, prompt in enumerate(chosen):
        assert engine.ask("reset")
        found.append(engine.run(f"alone{number}", prompt, NEW)[0])
    assert engine.ask("reset")
    return found


class Passing:
    """Requests that arrive in random steps and pass both engines.

    A client leaves in any state of its request. Some hand-overs name blocks that the prefill engine does not have: the
    request is computed again. It is then sent once more, with the right blocks, unless a hit needed none of them.

    Attributes:
        tokens: of the requests that were answered, with the number of their prompt.
        aborted: number of requests whose client has left.
    """

    def __init__(self, prefill: Engine, decode: Engine, seed: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._rng, self.prompts = Random(seed), prompts(seed)
        self._first: dict[str, int] = {}  # prefilled now, with the number of the prompt
        self._second: dict[str, int] = {}  # decoded now
        self._repeated: dict[str, Any] = {}  # to be decoded once more: what it needs, and its request there
        self.tokens: list[tuple[int, list[int]]] = []
        self.aborted = 0

    def run(self) -> None:
        """Send all requests, and wait until the blocks of each are read."""
        sent, steps, is_busy = 0, 0, True
        read: list[str] = []
        while sent < NUM_REQUESTS or is_busy:
            assert steps < MOST_STEPS, (self._first, self._second)
            steps += 1
            if sent < NUM_REQUESTS and self._rng.random() < 0.4:
                self._first[str(sent)] = number = self._rng.randrange(NUM_PROMPTS)
                self._prefill.ask("add", str(sent), self.prompts[number], 1, {"do_remote_decode": True})
                sent += 1
            self._leave(self._prefill, self._first, 0.05)
            self._leave(self._decode, self._second, 0.1)
            one = self._prefill.ask("step", read)
            for name, (_, transfer) in one["ended"].items():
                self._hand_over(name, transfer)
            other = self._decode.ask("step", [])
            read = other["read"]
            self._repeated = {name: one for name, one in self._repeated.items() if one[1] not in read}
            for name, (tokens, _) in other["ended"].items():
                self._ended(name, tokens)
            is_busy = bool(one["busy"] or other["busy"] or read)

    def _leave(self, engine: Engine, names: dict[str, int], chance: float) -> None:
        leaving = [name for name in names if name not in self._repeated]
        if leaving and self._rng.random() < chance:
            name = self._rng.choice(leaving)
            del names[name]
            engine.ask("abort", name)
            self.aborted += 1

    def _hand_over(self, name: str, transfer: dict[str, Any]) -> None:
        number = self._first.pop(name)
        chance = self._rng.random()
        if chance < 0.1:
            self._repeated[name] = transfer, transfer["remote_request_id"]
            wrong = [[FAR + block for block in group] for group in transfer["remote_block_ids"]]
            transfer = transfer | {"remote_block_ids": wrong}
        self._decode.ask("add", name, self.prompts[number], NEW, transfer)
        self._second[name] = number
        if 0.1 < chance < 0.2:
            self._decode.ask("abort", name)  # before it was scheduled
            del self._second[name]
            self.aborted += 1

    def _ended(self, name: str, tokens: list[int]) -> None:
        number = self._second.pop(name)
        self.tokens.append((number, tokens))
        if name in self._repeated:
            transfer, _ = self._repeated.pop(name)
            self._second[f"{name} again"] = number
            self._decode.ask("add", f"{name} again", self.prompts[number], NEW, transfer)
