"""`make demo-vllm`: vLLM engines are killed and come back with their cache.

Four engines answer the same conversations over HTTP: "a" and "b" with kvplane (mode mirror, pages of a kvplane worker);
"tiers" with vLLM's own scheduler and kvplane's connector, whose pages have room for a third of the conversations; and a
stock one. Then all but a are killed by SIGKILL and started again, and the conversations continue: b has its pages,
"tiers" loads from its disk what it evicted. The table has what was hit and the time to the first token (TTFT); every
token is compared with those of the stock engine.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from kvplane_tools.cli.child import ServiceChild
from tests.vllm import environment

MODEL = "llama"
KVPLANE = [sys.executable, "-W", "ignore", "-c", "from kvplane_tools.cli import main; main()"]
CONVERSATIONS, TURNS, NEW_TOKENS = 8, 3, 16
FIRST, FURTHER = 3072, 48  # tokens of the first message of a conversation, and of each further one
START_S = 300.0
BLOCKS, FEW_BLOCKS = 1000, 280  # all conversations have 8 x 103 at their end


@dataclass
class Turn:
    """What one engine answered in one turn of all conversations."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0  # mean of the conversations
    answers: list[list[int]] = field(default_factory=list)


class Engine:
    """A `vllm serve` process."""

    def __init__(self, name: str, *options: str, num_blocks: int = BLOCKS) -> None:
        self.name, self._options, self._num_blocks = name, options, num_blocks
        self._log = tempfile.NamedTemporaryFile(prefix=f"vllm-{name}-", suffix=".log")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        """Start the process, without waiting for it."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        model = str(environment.MODELS / MODEL)
        command = [str(environment.PYTHON.with_name("vllm")), "serve", model]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--block-size", "32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--seed", "0"]
        command += ["--num-gpu-blocks-override", str(self._num_blocks), "--enable-prompt-tokens-details"]
        command += ["--distributed-executor-backend", "uni", *self._options]
        env = environment.variables() | {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait(self) -> None:
        """Wait until the engine answers. Raises RuntimeError with the end of its log if it does not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self._is_healthy():
                    return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"engine {self.name} did not start:\n{Path(self._log.name).read_text()[-3000:]}")

    def _is_healthy(self) -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200

    def complete(self, prompt: list[int], request_id: str) -> tuple[list[int], int, float]:
        """Answer one prompt; returns the new tokens, how many prompt tokens were cached, and the TTFT in s."""
        body = {"model": str(environment.MODELS / MODEL), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        body |= {
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens, cached, ttft_s, begin = list[int](), 0, 0.0, time.monotonic()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"engine {self.name} answered {answer.status}: {answer.read(500).decode()}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                ttft_s = ttft_s or (time.monotonic() - begin if new else 0.0)
                tokens += new
                cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
        return tokens, cached, ttft_s

    def life(self) -> str:
        """The line of the engine's log that says what its last start kept."""
        lines = [line for line in Path(self._log.name).read_text().splitlines() if "keys kept" in line]
        return lines[-1][lines[-1].index("epoch") :] if lines else "no key was kept"

    def kill(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """End the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, sign)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def connector(disk: Path) -> str:
    """The options of kvplane's connector: tiers with room for all conversations."""
    options = {
        "kv_connector": "KvplaneConnector",
        "kv_connector_module_path": "kvplane_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host": "256MiB", "disk": str(disk), "disk_size": "1GiB"},
    }
    return json.dumps(options)


def prompts(turn: int) -> list[list[int]]:
    """The messages of the clients in this turn, one per conversation."""
    rng = random.Random(turn)
    length = FURTHER if turn else FIRST
    return [[rng.randrange(3, 900) for _ in range(length)] for _ in range(CONVERSATIONS)]


def answer(engine: Engine, turn: int, histories: list[list[int]]) -> Turn:
    """Let the engine answer one message of every conversation, after everything that was said in it before."""
    asked = [history + new for history, new in zip(histories, prompts(turn), strict=True)]
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        names = [f"{engine.name}-{number}-{turn}" for number in range(CONVERSATIONS)]
        found = list(pool.map(engine.complete, asked, names))
    tokens, cached, ttft_s = zip(*found, strict=True)
    return Turn(sum(map(len, asked)), sum(cached), fmean(ttft_s), list(tokens))


def converse(engines: list[Engine], turns: range, histories: list[list[int]], done: list[list[Turn]]) -> None:
    """Let each engine answer these turns; the stock engine, the last one, decides how the conversations continue."""
    for turn in turns:
        for engine, answered in zip(engines, done, strict=True):
            answered.append(answer(engine, turn, histories))
        for history, new, reply in zip(histories, prompts(turn), done[-1][-1].answers, strict=True):
            history += new + reply


def main() -> int:
    """Run the demonstration; returns 1 if a token differs."""
    console, begin = Console(), time.monotonic()
    environment.set_up()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-demo-")))
        service = stack.enter_context(ServiceChild())
        engines = []
        for name in ("a", "b"):
            run_dir = str(folder / name)
            worker = subprocess.Popen([*KVPLANE, "worker", "--opaque", "--replica", name, "--run-dir", run_dir])
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
            options = {"mode": "mirror", "address": service.address, "replica": name}
            options |= {"pages": "worker", "worker": run_dir}
            classes = "--scheduler-cls", "kvplane_vllm.Scheduler", "--worker-cls", "kvplane_vllm.Worker"
            engines.append(Engine(name, *classes, "--additional-config", json.dumps({"kvplane": options})))
        disk = folder / "disk"
        disk.mkdir()
        engines.append(Engine("tiers", "--kv-transfer-config", connector(disk), num_blocks=FEW_BLOCKS))
        engines.append(Engine("stock"))
        for engine in engines:
            stack.callback(engine.kill, signal.SIGTERM)
        console.print(f"service {service.address}; four vLLM engines start (a minute): a, b, tiers, and a stock one")
        for engine in engines:
            engine.wait()
        histories = [list[int]() for _ in range(CONVERSATIONS)]
        done = [list[Turn]() for _ in engines]
        console.print(f"{CONVERSATIONS} conversations, {TURNS} turns at each engine")
        converse(engines, range(TURNS), histories, done)
        console.print("[bold]kill -9[/bold] of all engines but a; they are started again")
        for engine in engines[1:]:
            engine.kill()
            engine.start()
        for engine in engines[1:]:
            engine.wait()
        console.print(f"engine b: {engines[1].life()}")
        converse(engines, range(TURNS, TURNS + 1), histories, done)
        show(console, engines, done)
        request = ["b", "--request", f"cmpl-b-0-{TURNS}-0", "--service", service.address]
        console.print(f"\n[bold]Why did this request hit?[/bold]  kvplane explain {' '.join(request)}", highlight=False)
        subprocess.run([*KVPLANE, "explain", *request], check=False)
        console.print("\n[bold]What would this conversation hit at engine a now?[/bold]  kvplane explain a --tokens -")
        tokens = " ".join(map(str, histories[0]))
        explain = [*KVPLANE, "explain", "a", "--tokens", "-", "--service", service.address]
        subprocess.run(explain, input=tokens, text=True, check=False)
        differing = sum(
            got != wanted
            for answered in done[:-1]
            for turn, stock in zip(answered, done[-1], strict=True)
            for got, wanted in zip(turn.answers, stock.answers, strict=True)
        )
        total = (len(engines) - 1) * CONVERSATIONS * (TURNS + 1)
        took_s = time.monotonic() - begin
        console.print(f"{differing} of {total} answers differ from those of stock vLLM; {took_s:.0f} s")
        return int(differing > 0)


def show(console: Console, engines: list[Engine], done: list[list[Turn]]) -> None:
    """Print the table of hits and times."""
    table = Table("engine", "turn", "prompt tokens", "cached", "mean TTFT")
    for engine, answered in zip(engines, done, strict=True):
        for number, turn in enumerate(answered):
            restarted = number == TURNS and engine.name != "a"
            share = f"{turn.cached_tokens} ({100 * turn.cached_tokens // turn.prompt_tokens} %)"
            label = f"{number + 1}" + (", after kill -9" if restarted else "")
            table.add_row(engine.name, label, str(turn.prompt_tokens), share, f"{turn.ttft_s:.2f} s")
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
