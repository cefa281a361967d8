"""An engine in mode remote whose clients give up: prints the tokens of the requests that were answered, as JSON.

python tests/vllm/remote_aborts.py MODEL stock|on|off SEED NUM_BLOCKS [ADDRESS REPLICA [FAULT|disturbed [WORKER]]]

Runs in the environment of vLLM (`environment`). Requests arrive between steps; some are given up at once, in the middle
of their prompt or of their answer, and the same prompt arrives again, so that blocks of a launch that did not run would
be hit. "stock" answers all prompts, without aborts. FAULT names a fault to plant (`FAULTS`).

"disturbed": it prints lines "STEP", at which the service can be killed or drained while requests run, and
continues until DISTURBANCES of these lines were answered by a line on standard input. WORKER is the directory of a
kvplane worker that lends the pages.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from workload import engine, prompts

NUM_PROMPTS, NEW_TOKENS, NUM_REQUESTS = 12, 20, 60
MOST_STEPS = 4000
STEPS_BETWEEN, DISTURBANCES = 20, 4  # lines "STEP"


def keep_unwritten() -> None:
    """The keys of blocks that no launch writes are kept."""
    from kvplane_vllm.remote.books import Books

    Books.unwritten = lambda *_: []  # type: ignore[method-assign, assignment]


def lose_denials() -> None:
    """A refused row counts as granted."""
    from kvplane_vllm.remote.driver import Driver

    run = Driver.run
    Driver.run = lambda self, request, num_tokens: (  # type: ignore[method-assign]
        run(self, request, num_tokens) or self._books.entries[request.request_id]
    )


def other_victims() -> None:
    """The service preempts the requests that vLLM preempts last."""
    from kvplane_vllm.remote.program import Planner

    Planner._victims = lambda self, num_rows: [  # type: ignore[method-assign]
        self._books.entries[one.request_id].slot for one in self._scheduler.running
    ]


FAULTS: dict[str, Callable[[], None]] = {
    "keys of unwritten blocks kept": keep_unwritten,
    "refused row not reported": lose_denials,
    "wrong victims": other_victims,
}


class Said(logging.Handler):
    """Keeps what the adapter logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("vllm.kvplane")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def main(model: str, kind: str, seed: int, num_blocks: int, *target: str) -> None:
    """Run the requests, and print the result."""
    more: dict[str, Any] = {}
    if kind != "stock":
        if target[2:] and target[2] != "disturbed":
            FAULTS[target[2]]()
        options = {"mode": "remote", "address": target[0], "replica": target[1], "pipeline": kind, "step_timeout": "1"}
        if len(target) > 3:
            options |= {"pages": "worker", "worker": target[3]}
            more["worker_cls"] = "kvplane_vllm.Worker"
        more["additional_config"] = {"kvplane": options}
    llm = engine(model, "stock" if kind == "stock" else "kvplane", num_blocks, **more)
    said = Said()  # after vLLM has configured its loggers
    chosen = prompts(model, seed, NUM_PROMPTS)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    result: dict[str, Any] = {}
    if kind == "stock":
        answers = llm.generate(chosen, sampling, use_tqdm=False)
        result["tokens"] = {str(number): [list(one.outputs[0].token_ids)] for number, one in enumerate(answers)}
    else:
        disturbances = DISTURBANCES if "disturbed" in target else 0
        result = gives_up(llm, chosen, sampling, random.Random(seed), Disturbed(disturbances))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        books = scheduler.kv_cache_manager.books
        result |= {"messages": scheduler.on_service.driver.messages, "unused": books.num_unused}
        result |= {"lives": scheduler.kv_cache_manager.link.life, "said": said.lines}
    print("RESULT " + json.dumps(result))


class Disturbed:
    """Asks for disturbances, one after another.

    Attributes:
        left: how many are still to come.
    """

    def __init__(self, count: int) -> None:
        self.left, self._is_needed = count, count > 0
        self._wait = STEPS_BETWEEN
        threading.Thread(target=self._answered, daemon=True).start()

    def _answered(self) -> None:
        for _ in sys.stdin:
            self.left -= 1
            self._wait = STEPS_BETWEEN

    def step(self) -> None:
        """Count a step; ask for a disturbance if the last one was answered STEPS_BETWEEN steps ago."""
        self._wait -= 1
        if self._wait == 0 and (self.left > 0 or not self._is_needed):
            sys.stdout.write("STEP\n")
            sys.stdout.flush()


def gives_up(
    llm: Any, chosen: list[Any], sampling: SamplingParams, rng: random.Random, disturbed: Disturbed
) -> dict[str, Any]:
    """Send requests and give some of them up; returns the tokens of the others, by prompt."""
    running: dict[str, int] = {}
    tokens: dict[int, list[list[int]]] = {}
    sent = aborted = steps = cached = 0
    again: list[int] = []  # prompts of requests that were given up
    while sent < NUM_REQUESTS or disturbed.left > 0 or running:
        assert steps < MOST_STEPS, "the requests do not end"
        if (sent < NUM_REQUESTS or disturbed.left > 0) and (not running or rng.random() < 0.5):
            number = again.pop() if again and rng.random() < 0.8 else rng.randrange(len(chosen))
            llm.llm_engine.add_request(str(sent), chosen[number], sampling)
            running[str(sent)] = number
            sent += 1
        if running and rng.random() < 0.3:
            name = list(running)[-1] if rng.random() < 0.7 else rng.choice(list(running))
            llm.llm_engine.abort_request([name])
            again.append(running.pop(name))
            aborted += 1
        for one in llm.llm_engine.step():
            if one.finished and one.request_id in running:
                tokens.setdefault(running.pop(one.request_id), []).append(list(one.outputs[0].token_ids))
                cached += one.num_cached_tokens or 0
        steps += 1
        disturbed.step()
    return {"tokens": tokens, "sent": sent, "aborted": aborted, "steps": steps, "cached": cached}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
