"""How many steps and messages it takes in mode remote until all waiting requests run, as JSON.

python tests/vllm/waiting_requests.py ADDRESS REPLICA PIPELINE sync|async

Runs in the environment of vLLM (`environment`). While one request decodes, others come: with an adapter each, with a
grammar that is ready, or with an adapter every second one. There is room for all of them.
"""

from __future__ import annotations

import json
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import page_contents
from page_world import Client, World
from vllm.config import LoRAConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

NUM_WAITING, MOST_STEPS = 12, 40


def options_of(mode: str) -> page_contents.Options:
    """Return an engine with room for all requests and adapters."""
    options = page_contents.Options(random.Random(1), "remote-on", {"kind": "full"})
    options.kind, options.is_async, options.drafts, options.policy = "full", mode == "async", 0, "fcfs"
    options.seqs, options.batched, options.threshold, options.active = 64, 4096, 0, None
    options.num_blocks, options.has_adapters = 4000, True
    options.specs = options._specs(random.Random(1))
    return options


def client(name: str, adapter: int) -> Client:
    """Return a client with a prompt of its own."""
    rng = random.Random(name)
    prompt = [rng.randrange(5, 900) for _ in range(40)]
    return Client(name, prompt, most=400, priority=0, salt=None, arrival=0.0, image=None, adapter=adapter)


def measure(kind: str, mode: str, settings: dict[str, str]) -> tuple[int, int]:
    """Return the steps until all run, MOST_STEPS if they do not, and the messages of these steps."""
    options = options_of(mode)
    scheduler = options.scheduler("remote", settings)
    world, depth = World(scheduler, options.specs, options.hash_block_size, 0), 1 + options.is_async

    def step() -> None:
        output = world.schedule()
        for request in scheduler.running:
            request.structured_output_request = None  # its output is not constrained here
        world.launch(output)
        while len(world.flight) >= depth:
            world.update()

    world.send(client("first", 0))
    for _ in range(4):
        step()
    for number in range(NUM_WAITING):
        has_adapter = kind == "adapters" or (kind == "mixed" and number % 2 == 0)
        world.clients[str(number)] = one = client(str(number), number + 1 if has_adapter else 0)
        request: Any = one.request(options.hash_block_size)
        if kind == "grammar":
            request.structured_output_request = SimpleNamespace(grammar=object(), reasoning_ended=None)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        scheduler.add_request(request)
    link = scheduler.on_service.driver._link
    before, steps = link.num_messages, 0
    while len(scheduler.running) <= NUM_WAITING and steps < MOST_STEPS:
        step()
        steps += 1
    messages = link.num_messages - before
    scheduler.shutdown()
    return steps, messages


def main(address: str, replica: str, pipeline: str, mode: str) -> None:
    """Measure all kinds, and print the result."""
    os.chdir(page_contents.SOURCE)
    sys.path.insert(0, str(page_contents.SOURCE))
    init_none_hash(sha256)
    page_contents.LoRAConfig = lambda **_: LoRAConfig(max_lora_rank=8, max_loras=64)  # type: ignore[assignment,misc]
    settings = {"mode": "remote", "address": address, "pipeline": pipeline, "step_timeout": "5"}
    kinds = "adapters", "grammar", "mixed"
    found = {kind: measure(kind, mode, settings | {"replica": f"{replica}-{kind}"}) for kind in kinds}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
