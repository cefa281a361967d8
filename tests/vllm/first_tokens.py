"""`python -m tests.vllm.first_tokens`: time to the first token of a prompt that a live vLLM computes, or loads.

Needs `make vllm-env`. A prompt is computed by an engine, which saves it, and asked of it again when its device
has nothing of it: loaded from its own host memory. Then it is asked of two others: one loads it from the first one's
host memory by shared memory, one by NIXL over the loopback device. One more computes it, is started again, and loads it
from its disk (up to DISK_MOST tokens). The model is Llama-like with two layers, 1 KiB of cache a token: it computes
a token in much less time than a large one, and loads it in less. Medians of prompts of each length.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
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
DISK, DISK_MOST = "own disk", 32768  # tokens
SOURCES = (*TRANSPORTS, DISK)
APPLIED_S, FINISHED_S, PEERS_S = 1.0, 60.0, 60.0
NO_SEED = -1  # of prompts that are not timed


class Engines:
    """The one that computes, and those that load."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of the longest prompt."""
        self._service = Service(log_level="ERROR")
        self._service.start()
        self._most, self._env = most, environment.variables_of_nixl(free_port())
        self._folder = tempfile.TemporaryDirectory()
        self._engines = {DISK: self._started({"disk": self._folder.name, "disk_size": "1GiB"})}
        for number, (name, transport) in enumerate(TRANSPORTS.items()):
            tiers = {"address": self._service.address, "replica": f"tiers-{number}", "peers": "2"}
            self._engines[name] = self._started(tiers | {"peer_transport": transport})
        try:
            for one in self._engines.values():
                one.answer()
            self._wait_for_peers()
        except BaseException:
            self.close()
            raise

    def _started(self, tiers: dict[str, str]) -> Driven:
        options = {"max_model_len": self._most + SPARE, "block_size": BLOCK, "max_num_batched_tokens": 2048}
        words = MODEL, "stock", self._most // BLOCK + SPARE, json.dumps({"host": "1GiB"} | tiers), json.dumps(options)
        return Driven("moving_live.py", *words, env=self._env)

    def _wait_for_peers(self) -> None:
        """Wait until the first engine is read by the others."""
        first, *others = (self._engines[name] for name in TRANSPORTS)
        waiting, until_s = others, time.monotonic() + PEERS_S
        for seed in count(NO_SEED, -1):
            self._first_token(first, seed, 2 * BLOCK + 1)
            time.sleep(APPLIED_S)
            waiting = [one for one in waiting if self._first_token(one, seed, 2 * BLOCK + 1)[1] > BLOCK]
            if not waiting:
                return
            assert time.monotonic() < until_s, "the engines do not become peers"

    def times(self, seeds: Sequence[int], length: int) -> dict[str, float]:
        """Return the median seconds of prompts: computed, and by source."""
        runs = [self._times_without_disk(seed, length) for seed in seeds]
        found = {name: median(run[name] for run in runs) for name in runs[0]}
        if length > DISK_MOST:
            return found
        for seed in seeds:
            self._first_token(self._engines[DISK], seed, length)
        time.sleep(APPLIED_S)  # until the disk has what host memory has
        self._engines[DISK].ask("step", [])
        self._engines[DISK].kill()
        self._engines[DISK] = self._started({"disk": self._folder.name, "disk_size": "1GiB"})
        self._engines[DISK].answer()
        self._first_token(self._engines[DISK], NO_SEED, 2 * BLOCK + 1)  # the first prompt of a process takes longer
        return found | {DISK: median(self._loaded(DISK, seed, length) for seed in seeds)}

    def _times_without_disk(self, seed: int, length: int) -> dict[str, float]:
        own = self._engines[next(iter(TRANSPORTS))]
        found = {"computed": self._first_token(own, seed, length)[0]}
        assert own.ask("reset")
        return found | {name: self._loaded(name, seed, length) for name in TRANSPORTS}

    def _loaded(self, name: str, seed: int, length: int) -> float:
        time.sleep(APPLIED_S)
        seconds, computed = self._first_token(self._engines[name], seed, length)
        assert computed <= BLOCK, f"{name}: {computed} tokens of {length} were computed"
        return seconds

    def _first_token(self, engine: Driven, seed: int, length: int) -> tuple[float, int]:
        """Return the seconds, and how many tokens were computed, when all is saved."""
        seconds, computed = engine.ask("first_token", seed, length)
        until_s = time.monotonic() + FINISHED_S
        while engine.ask("step", [])["busy"]:
            assert time.monotonic() < until_s, "it does not end what it saves"
        return seconds, computed

    def close(self) -> None:
        """Kill all processes, and remove the disk."""
        for engine in self._engines.values():
            engine.kill()
        self._service.kill()
        self._folder.cleanup()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.first_tokens", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    lengths = parser.parse_args(arguments).lengths
    environment.set_up()
    environment.write_models(MODEL)
    engines = Engines(max(lengths))
    print(machine_line())
    print("| tokens | computed, s | " + " | ".join(f"{name}, s" for name in SOURCES) + " |", flush=True)
    slower = dict.fromkeys(SOURCES, 0)
    try:
        for at, length in enumerate(sorted(lengths)):
            first, count = 1 + at * NUM_PROMPTS, 1 if length > FEW_ABOVE else NUM_PROMPTS
            times = engines.times(range(first, first + count), length)
            shown = (f"{times[name]:.4f}" if name in times else "" for name in ("computed", *SOURCES))
            print(f"| {length:,} | " + " | ".join(shown) + " |", flush=True)
            slower |= {name: length for name in SOURCES if times.get(name, 0) >= times["computed"]}
    finally:
        engines.close()
    found = ", ".join(f"{name} above {most:,}" for name, most in slower.items())
    print(f"loaded in less time than computed at each length measured: {found} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
