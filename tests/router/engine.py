"""An engine for tests: publishes the events of a cache of random prompts, as fast as it is asked, and can be killed.

python -m tests.router.engine EVENTS REPLAY SEED      one line on standard input = that number of batches
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import zmq.asyncio

from kvplane.base.groups import HashAlgorithm
from kvplane_fleet.domains import Domain
from tests.router.publisher import Publisher

DOMAIN = Domain(HashAlgorithm.SHA256, "", 16)
BLOCK = 16


def batches(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Batches of a full group and a window group, of which the oldest prompts are removed again."""
    rng, held = Random(seed), list[dict[str, Any]]()
    shared = [rng.randrange(1000) for _ in range(4 * BLOCK)]
    while True:
        length = BLOCK * rng.randrange(1, 8)
        prompt = shared[: BLOCK * rng.randrange(5)] + [rng.randrange(1000) for _ in range(length)]
        keys = DOMAIN.keys(prompt)
        common = {"parent_block_hash": None, "token_ids": prompt, "block_size": BLOCK, "medium": "GPU"}
        full = {"block_hashes": keys, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        window = {"block_hashes": keys[-2:], "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
        window["kv_cache_spec_sliding_window"] = 32
        stored = [{"type": "BlockStored", **common, **one} for one in (full, window)]
        held += stored
        removed = []
        while len(held) > 60:
            old = held.pop(rng.randrange(len(held)))
            removed += [{"type": "BlockRemoved", "medium": "GPU", **_removal(old, key)} for key in old["block_hashes"]]
        yield stored + removed


def _removal(stored: dict[str, Any], key: int) -> dict[str, Any]:
    return {"block_hashes": [key], "group_idx": stored["group_idx"]}


class EngineProcess:
    """The engine in a process of its own."""

    def __init__(self, events: str, replay: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.router.engine", events, replay, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        assert self._stdout.readline() == "ready\n"

    def publish(self, count: int) -> None:
        """Publish batches, and wait until they are sent."""
        self._stdin.write(f"{count}\n")
        self._stdin.flush()
        assert self._stdout.readline() == "sent\n"

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout):
            stream.close()


async def _serve(events: str, replay: str, seed: int) -> None:
    context = zmq.asyncio.Context()
    made = batches(seed)
    with Publisher(context, events, replay) as publisher:
        replays = asyncio.create_task(publisher.serve_replays())
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            for _ in range(int(line)):
                await publisher.publish(time.time(), next(made))
            print("sent", flush=True)
        replays.cancel()
    context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
