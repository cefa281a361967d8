"""`python -m tests.vllm.first_tokens`: time to the first token of a prompt that a live vLLM computes, or loads.

Needs `make vllm-env`. A prompt is computed by an engine, which saves it, and asked of it again when its device
has nothing of it: loaded from its own host memory. Then it is asked of two others: one loads it from the first one's
host memory by shared memory, one by NIXL over the loopback device. The model is Llama-like with two layers, 1 KiB of cache a token:
it computes a token in much less time than a large one, and loads it in less. Medians of prompts of each length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import count
from statistics import median

from tests.bench.machine import machine_line
from tests.store.servers import free_port
from tests.vllm import environment
from tests.vllm.pairs import Driven
from tests.vllm.processes import Service

LENGTHS = (64, 256, 1024, 4096, 16384, 32768, 65536, 131072)
MODEL = "long"
FEW_ABOVE = 16384  # tokens, above which one prompt is enough
NUM_PROMPTS = 3
BLOCK, SPARE = 32, 64
TRANSPORTS = {"own host": "nixl", "a peer, shared memory": "nixl", "a peer, NIXL": "nixl-only"}
APPLIED_S, FINISHED_S, PEERS_S = 1.0, 60.0, 60.0
NO_SEED = -1  # of prompts that are not timed


class Engines:
    """The one that computes, and those that load."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of the longest prompt."""
        self._service = Service(log_level="ERROR")
        self._service.start()
        options = {"max_model_len": most + SPARE, "block_size": BLOCK, "max_num_batched_tokens": 2048}
        env = environment.variables_of_nixl(free_port())
        self._engines = {}
        for number, (name, transport) in enumerate(TRANSPORTS.items()):
            tiers = {"host": "1GiB", "address": self._service.address, "replica": f"tiers-{number}", "peers": "2"}
            words = MODEL, "stock", most // BLOCK + SPARE, json.dumps(tiers | {"peer_transport": transport})
            self._engines[name] = Driven("moving_live.py", *words, json.dumps(options), env=env)
        try:
            for one in self._engines.values():
                one.answer()
            self._wait_for_peers()
        except BaseException:
            self.close()
            raise

    def _wait_for_peers(self) -> None:
        """Wait until the first engine is read by the others."""
        first, *others = self._engines.values()
        waiting, until_s = others, time.monotonic() + PEERS_S
        for seed in count(NO_SEED, -1):
            self._first_token(first, seed, 2 * BLOCK + 1)
            time.sleep(APPLIED_S)
            waiting = [one for one in waiting if self._first_token(one, seed, 2 * BLOCK + 1)[1] > BLOCK]
            if not waiting:
                return
            assert time.monotonic() < until_s, "the engines do not become peers"

    def times(self, seed: int, length: int) -> dict[str, float]:
        """Return the seconds of a prompt: computed, and by source."""
        (first, own), *others = self._engines.items()
        found = {"computed": self._first_token(own, seed, length)[0]}
        assert own.ask("reset")
        for name, engine in ((first, own), *others):
            time.sleep(APPLIED_S)
            found[name], computed = self._first_token(engine, seed, length)
            assert computed <= BLOCK, f"{name}: {computed} tokens of {length} were computed"
        return found

    def _first_token(self, engine: Driven, seed: int, length: int) -> tuple[float, int]:
        """Return the seconds, and how many tokens were computed, when all is saved."""
        seconds, computed = engine.ask("first_token", seed, length)
        until_s = time.monotonic() + FINISHED_S
        while engine.ask("step", [])["busy"]:
            assert time.monotonic() < until_s, "it does not end what it saves"
        return seconds, computed

    def close(self) -> None:
        """Kill all processes."""
        for engine in self._engines.values():
            engine.kill()
        self._service.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.first_tokens", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    lengths = parser.parse_args(arguments).lengths
    environment.set_up()
    environment.write_models(MODEL)
    engines = Engines(max(lengths))
    print(machine_line())
    print("| tokens | computed, s | " + " | ".join(f"{name}, s" for name in TRANSPORTS) + " |", flush=True)
    faster = dict.fromkeys(TRANSPORTS, 0)
    try:
        for at, length in enumerate(sorted(lengths)):
            seeds = range(1 + at * NUM_PROMPTS, 1 + at * NUM_PROMPTS + (1 if length > FEW_ABOVE else NUM_PROMPTS))
            runs = [engines.times(seed, length) for seed in seeds]
            times = {name: median(run[name] for run in runs) for name in runs[0]}
            print(f"| {length:,} | " + " | ".join(f"{value:.4f}" for value in times.values()) + " |", flush=True)
            for name in TRANSPORTS:
                faster[name] = 0 if times[name] >= times["computed"] else faster[name] or length
    finally:
        engines.close()
    print("faster than computing from: " + ", ".join(f"{name} {count:,} tokens" for name, count in faster.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
