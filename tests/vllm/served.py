"""`vllm serve` as a process of its own, which clients ask over HTTP, and clients that ask it all the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.store.servers import free_port
from tests.vllm import environment

START_S, ANSWER_S = 900, 120
NEW = 12  # tokens of an answer
PREFIXES, ENDS, LENGTH = 4, 20, 160


class Vllm:
    """One `vllm serve`.

    Attributes:
        url: of its API.
        process: of its API server; the engine's processes end with it.
    """

    def __init__(self, log: Path, model: str, *options: str, **variables: str) -> None:
        """`options`: of the command line; `variables`: of its environment."""
        self.port, self._log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(environment.PYTHON.with_name("vllm")), "serve", str(environment.MODELS / model)]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "640", "--seed", "0"]
        command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--served-model-name", "m"]
        command += ["--enable-prompt-tokens-details", "--distributed-executor-backend", "uni", *options]
        with log.open("w") as file:
            # A session of its own, so that a kill reaches the processes of the engine too.
            self.process = subprocess.Popen(
                command, env=environment.variables() | variables, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises AssertionError if it ends before."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)

    def ask(self, path: str, body: Any = None, within_s: float = ANSWER_S) -> tuple[int, Any]:
        """Return status and body of an answer; 0 where there was none. `body`: None = GET."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=within_s) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        except OSError as error:
            return 0, repr(error)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def complete(self, prompt: list[int]) -> tuple[int, Any, int]:
        """Return status, tokens and cached tokens of a completion."""
        asked = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        status, body = self.ask("/v1/completions", asked | {"return_token_ids": True})
        if status != 200:
            return status, body, 0
        details = body["usage"].get("prompt_tokens_details")
        return status, body["choices"][0]["token_ids"], (details or {}).get("cached_tokens") or 0

    def engines(self) -> list[int]:
        """Return the processes that schedule."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (
                    os.getsid(int(process.name)) == self.process.pid
                    and b"EngineCore" in (process / "cmdline").read_bytes()
                ):
                    found.append(int(process.name))
        return found

    def kill(self) -> None:
        """End all its processes with SIGKILL."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def prompts() -> list[list[int]]:
    """Return prompts that share beginnings of several blocks."""
    rng = Random(5)
    prefixes = [[rng.randrange(3, 900) for _ in range(LENGTH)] for _ in range(PREFIXES)]
    return [[*prefix, 300 + end] for prefix in prefixes for end in range(ENDS)]


def answers(vllm: Vllm) -> list[list[int]]:
    """Return the tokens of all prompts, each asked once."""
    found = [vllm.complete(prompt) for prompt in prompts()]
    assert all(status == 200 for status, _, _ in found), found
    return [tokens for _, tokens, _ in found]


class Answer(NamedTuple):
    """One answer: when it was asked for and came, in seconds of time.monotonic()."""

    began: float
    ended: float
    status: int
    is_right: bool
    cached: int
    problem: str


class Load:
    """Clients that ask for random prompts all the time, and compare what they get."""

    def __init__(self, vllm: Vllm, right: list[list[int]], clients: int = 6) -> None:
        self._vllm, self._right, self._prompts = vllm, right, prompts()
        self.answers: list[Answer] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(Random(number),)) for number in range(clients)]

    def _run(self, rng: Random) -> None:
        while not self._ends.is_set():
            chosen, began = rng.randrange(len(self._prompts)), time.monotonic()
            status, tokens, cached = self._vllm.complete(self._prompts[chosen])
            is_right = status == 200 and tokens == self._right[chosen]
            problem = "" if is_right else str(tokens)[:200]
            self.answers.append(Answer(began, time.monotonic(), status, is_right, cached, problem))
            if status == 0:
                time.sleep(0.05)

    def since(self, when: float) -> list[Answer]:
        """Return the answers that came after this time."""
        return [one for one in self.answers if one.ended > when]

    def wait_for(self, count: int, when: float, within_s: float = ANSWER_S) -> float:
        """Wait for that many right answers after this time; returns when the first came."""
        until(lambda: sum(one.is_right for one in self.since(when)) >= count, within_s, lambda: self.answers[-3:])
        return min(one.ended for one in self.since(when) if one.is_right)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def until(condition: Callable[[], Any], within_s: float, state: Callable[[], Any] = lambda: "") -> None:
    """Wait for a condition. Raises AssertionError with the state if it does not come true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.05)
