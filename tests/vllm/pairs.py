"""Two live vLLM engines, of which one prefills and the other decodes: commands to each, and requests that pass both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from tests.store.servers import free_port
from tests.vllm import environment

NEW = 16
NUM_PROMPTS, NUM_REQUESTS = 12, 80
MOST_STEPS = 3000
WAIT_S = 120.0
FAR = 1 << 20  # added to blocks that the prefill engine does not have
LASTING_S = 3600  # that an engine holds blocks for the other one
GONE = "gone"  # an engine that never was
CONNECTORS: dict[str, dict[str, Any]] = {
    "pull": {"kv_connector": "NixlConnector"},
    "both ways": {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"bidirectional_kv_xfer": True}},
    "push": {"kv_connector": "NixlPushConnector"},
    "mooncake": {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}},
}


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

    def run(self, name: str, prompt: list[int], tokens: int, transfer: Any = None, other: Driven | None = None) -> Any:
        """Run one request to its end, with steps of the other engine; returns its tokens, and what that needs."""
        self.ask("add", name, prompt, tokens, transfer)
        until_s = time.monotonic() + WAIT_S
        while name not in (ended := self.ask("step", [])["ended"]):
            assert time.monotonic() < until_s, f"{name} does not end"
            time.sleep(0.001)
            if other is not None:
                other.ask("step", [])
        return ended[name]

    def pause(self, seconds: float) -> None:
        """Stop it, and the processes that it has started, for some seconds, without waiting for them."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        Timer(seconds, _signal, [(self._process.pid, *children), signal.SIGCONT]).start()
        _signal((self._process.pid, *children), signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Engine(Driven):
    """An engine with one of `CONNECTORS`."""

    def __init__(
        self, connector: str, model: str, kind: str, num_blocks: int, *target: str, lease_s: int = LASTING_S
    ) -> None:
        """With a lease that lasts, its transfers are timed."""
        self._port = port = free_port()
        self._name = f"at-{port}"
        options = CONNECTORS[connector] | {"engine_id": self._name}
        if connector == "mooncake":
            variables = environment.variables_of_mooncake(port, lease_s)
        else:
            variables = environment.variables_of_nixl(port)
            extra = {"kv_lease_duration": lease_s, "decoder_kv_blocks_ttl": lease_s}
            options["kv_connector_extra_config"] = options.get("kv_connector_extra_config", {}) | extra
        words = model, kind, num_blocks, int(lease_s == LASTING_S), json.dumps(options), *target
        super().__init__("disaggregated.py", *words, env=variables)

    def prefill(self, name: str) -> dict[str, Any]:
        """Return what this engine needs of a request that it prefills; `transfer_id` is for Mooncake."""
        return {"do_remote_decode": True, "transfer_id": name}

    def decode(self, name: str, transfer: dict[str, Any] | None) -> dict[str, Any]:
        """Return what another engine needs to decode it: the answer of this one, which is none with Mooncake."""
        known = {"do_remote_prefill": True, "remote_engine_id": self._name, "remote_request_id": name}
        return transfer or known | {"transfer_id": name, "remote_bootstrap_addr": f"http://127.0.0.1:{self._port}"}


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

    A client leaves in any state of its request. Some hand-overs name blocks that the prefill engine does not have, or,
    where the connector gives no blocks, another engine: the request is computed again. It is then sent once more, as
    it should be, unless a hit needed none of the blocks. What a decode engine is handed waits for a step of the other
    one, in which that learns of it.

    Attributes:
        tokens: of the requests that were answered, with the number of their prompt.
        aborted: number of requests whose client has left.
    """

    def __init__(self, prefill: Engine, decode: Engine, prompts: Sequence[list[int]], seed: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._rng, self._prompts = Random(seed), prompts
        self._first: dict[str, int] = {}  # prefilled now, with the number of the prompt
        self._second: dict[str, int] = {}  # decoded now
        self._repeated: dict[str, Any] = {}  # to be decoded once more: what it needs, and its request there
        self._unread: list[str] = []  # requests of the decode engine whose blocks are not read, since its last step
        self.tokens: list[tuple[int, list[int]]] = []
        self.aborted = 0

    def run(self) -> None:
        """Send all requests, and wait until the blocks of each are read."""
        sent, steps, is_busy = 0, 0, True
        handed: list[tuple[str, int, Any]] = []
        other: dict[str, Any] = {"read": [], "unread": []}
        while sent < NUM_REQUESTS or is_busy:
            assert steps < MOST_STEPS, (self._first, self._second)
            steps += 1
            if sent < NUM_REQUESTS and self._rng.random() < 0.4:
                self._send(str(sent), self._rng.randrange(NUM_PROMPTS), {})
                sent += 1
            self._leave(self._prefill, self._first, 0.05)
            self._leave(self._decode, self._second, 0.1)
            one = self._prefill.ask("step", other["read"], [name for name in other["unread"] if name != GONE])
            self._asked(one["asked"])
            for name, number, transfer in handed:
                self._hand_over(name, number, transfer)
            handed = [(name, self._first.pop(name), transfer) for name, (_, transfer) in one["ended"].items()]
            for name, _, _ in handed:
                self._leaves_unread(name)
            unread, self._unread = self._unread, []
            other = self._decode.ask("step", one["read"], unread)
            self._repeated = {name: one for name, one in self._repeated.items() if one[1] not in other["read"]}
            for name, (tokens, transfer) in other["ended"].items():
                self._ended(name, tokens, transfer)
            is_busy = any((one["busy"], other["busy"], one["read"], other["read"], other["unread"], handed))

    def _send(self, name: str, number: int, transfer: dict[str, Any]) -> None:
        self._first[name] = number
        self._prefill.ask("add", name, self._prompts[number], 1, self._prefill.prefill(name) | transfer)

    def _leave(self, engine: Engine, names: dict[str, int], chance: float) -> None:
        leaving = [name for name in names if name not in self._repeated]
        if leaving and self._rng.random() < chance:
            name = self._rng.choice(leaving)
            del names[name]
            engine.ask("abort", name)
            self.aborted += 1
            if engine is self._prefill:
                self._leaves_unread(name)

    def _asked(self, names: list[str]) -> None:
        """Take the requests of the decode engine whose blocks the prefill engine reads."""

    def _leaves_unread(self, name: str) -> None:
        """Let the decode engine free what a request that has left the prefill engine has not asked for."""

    def _hand_over(self, name: str, number: int, transfer: Any) -> None:
        transfer = self._prefill.decode(name, transfer)
        chance = self._rng.random()
        if chance < 0.1:
            self._repeated[name] = transfer, transfer["remote_request_id"]
            transfer = wrong(transfer)
        self._decode.ask("add", name, self._prompts[number], NEW, transfer)
        self._second[name] = number
        if 0.1 < chance < 0.2:
            self._decode.ask("abort", name)  # before it was scheduled
            del self._second[name]
            self.aborted += 1

    def _ended(self, name: str, tokens: list[int], transfer: Any) -> None:
        number = self._second.pop(name)
        self.tokens.append((number, tokens))
        if name in self._repeated:
            again, _ = self._repeated.pop(name)
            self._second[name] = number
            self._decode.ask("add", name, self._prompts[number], NEW, again)
        if transfer is not None:
            self._answered(name, number, transfer)

    def _answered(self, name: str, number: int, transfer: dict[str, Any]) -> None:
        """Continue a request whose blocks the decode engine holds."""


class Conversing(Passing):
    """As `Passing`, with a second turn of some requests, of which the prefill engine reads the first from the decode
    engine. Its prompt is `longer` with the number of the first one. None of these reads fails: vLLM's connector can let
    such a request wait forever.
    """

    _held: tuple[str, str] = "", ""  # a request that continues, and that of the decode engine which holds its blocks

    def _asked(self, names: list[str]) -> None:
        if self._held[1] in names:
            self._held = "", ""

    def _leaves_unread(self, name: str) -> None:
        if name == self._held[0]:
            self._unread.append(self._held[1])
            self._held = "", ""

    def _answered(self, name: str, number: int, transfer: dict[str, Any]) -> None:
        held = transfer["remote_request_id"]
        if self._held[0] or number >= NUM_PROMPTS or name in self._second or self._rng.random() < 0.3:
            self._unread.append(held)
            return
        self._held = f"{name} more", held
        self._send(self._held[0], number + NUM_PROMPTS, transfer)


def longer(seed: int, chosen: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
    """Prompts of second turns: the first one, its answer, and more.

    None has a length at which kvplane decides otherwise than stock (`at_the_edge_of_a_window`).
    """
    rng, found = Random(f"longer {seed}"), []
    for prompt, answer in zip(chosen, answers, strict=True):
        one = [*prompt, *answer, *(rng.randrange(3, 900) for _ in range(rng.randint(1, 100)))]
        found.append([*one, 3] if at_the_edge_of_a_window(len(one)) else one)
    return found


def at_the_edge_of_a_window(length: int) -> bool:
    """Whether the last token of a loaded prompt attends to a block that windows of 64 tokens do not hold by then.

    vLLM computes the last token of a prompt that is loaded whole.
    """
    return (length - 63) % 32 == 0


def wrong(transfer: dict[str, Any]) -> dict[str, Any]:
    """Return a transfer that fails."""
    if transfer.get("remote_block_ids") and transfer["transfer_mode"] == "pull":
        return transfer | {"remote_block_ids": [[FAR + one for one in group] for group in transfer["remote_block_ids"]]}
    return transfer | {"remote_engine_id": GONE, "remote_request_id": GONE}
