"""One engine whose tiers a service follows is given hints, and asked through the service; prints what it did as JSON.

python tests/vllm/tier_hints_live.py ADDRESS REPLICA FOLDER

Runs in the environment of vLLM (`environment`). Each prompt is computed once; then others pass through host memory,
more than it holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tiers_live import transfer
from vllm import SamplingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from workload import engine

from kvplane.base.requests import Content
from kvplane.blocking.client import Client
from kvplane_core.face.interface import INSIDE
from kvplane_vllm.tiers.hints import PREFETCH, RETAIN, VERSION

MODEL, POOL, LENGTH, NEW = "llama", 26, 131, 4
FLOOD = 14  # prompts
HOST = "3MiB"  # 47 blocks of 32 tokens


class Hinted:
    """The engine. Prompts are named by their first token."""

    def __init__(self, address: str, replica: str, folder: str) -> None:
        options = {"host": HOST, "disk": folder, "disk_size": "200MiB", "address": address, "replica": replica}
        self.llm = engine(MODEL, "stock", POOL, kv_transfer_config=transfer(options))
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.client, self.replica = Client(grpc.insecure_channel(address)), replica
        self.sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        self.hashes: dict[int, list[bytes]] = {}
        self.count = 0
        add = self.scheduler.add_request

        def noted(request: Any) -> Any:
            self.hashes[request.prompt_token_ids[0]] = list(request.block_hashes)
            return add(request)

        self.scheduler.add_request = noted

    @staticmethod
    def prompt(name: int) -> list[int]:
        return [name, *(at % 50 + 3 for at in range(LENGTH - 1))]

    def answer(self, name: int, *actions: tuple[str, dict[str, Any]]) -> None:
        """Answer a prompt, with these hints."""
        self.count += 1
        given = [KvHintAction(str(at), kind, VERSION, payload) for at, (kind, payload) in enumerate(actions)]
        envelope = KvHintsEnvelope("1", str(self.count), given) if given else None
        prompt: Any = {"prompt_token_ids": self.prompt(name)}
        self.llm.llm_engine.add_request(str(self.count), prompt, self.sampling, kv_hints=envelope)
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()

    def flood(self) -> None:
        for _ in range(FLOOD):
            self.answer(100 + self.count)
        assert self.llm.reset_prefix_cache()

    def asked(self, call: Callable[[], Any]) -> Any:
        """Return the answer to a call of the service, while requests are answered."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call)
            while not answer.done():
                self.answer(100 + self.count)
            return answer.result()

    def in_host(self, name: int) -> int:
        """Leading tokens of a prompt that host memory has."""
        replica = self.scheduler.connector.planner.host.replica
        found: int = replica.coordinator.lookup.find(self.hashes[name], "", LENGTH - 1, INSIDE).num_tokens
        return found


def main(address: str, replica: str, folder: str) -> None:
    """Run it, and print the result."""
    one = Hinted(address, replica, folder)
    one.answer(60, (RETAIN, {"ttl_s": 600}))
    for name in (61, 62, 63):
        one.answer(name, (RETAIN, {"ttl_s": -1}))  # which is wrong: a line in the log
    content = {name: Content(one.prompt(name)) for name in (61, 62)}
    retained = one.asked(lambda: one.client.retain(replica, content[61], ttl_s=600.0))
    one.flood()
    result = {"retained": [retained.retained_tokens, one.in_host(60), one.in_host(61)]}
    result["evicted"] = [one.in_host(62), one.in_host(63)]
    prefetched = one.asked(lambda: one.client.prefetch(replica, content[62]))
    one.answer(64, (PREFETCH, {"token_ids": one.prompt(63)}))
    one.answer(65)
    result["prefetched"] = [prefetched.hit_tokens, one.in_host(62), one.in_host(63)]
    sender = one.scheduler.connector.planner.host.service.sender
    assert sender.wait_applied(60.0), sender.state
    result["divergences"] = [sender.state.divergences]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
