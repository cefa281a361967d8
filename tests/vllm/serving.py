"""`vllm serve` answers HTTP clients, stock or with kvplane, and this script prints what the clients saw as JSON.

python tests/vllm/serving.py MODEL stock|kvplane SEED NUM_BLOCKS

Runs in the environment of vLLM (`environment`). First one client sends requests in turn, every second one streamed: the
tokens, `cached_tokens` and the KV events on ZMQ are determined by the requests. Then 16 clients send requests at once
and some of them break off: only the tokens of the complete answers are determined.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq

MODELS = Path(__file__).resolve().parents[2] / ".tools" / "vllm" / "models"
START_S = 400
CLIENTS, IN_TURN, AT_ONCE = 16, 64, 128


class Events:
    """A subscriber of the engine's KV events: each batch without its time, in order."""

    def __init__(self, endpoint: str) -> None:
        self.batches: list[Any] = []
        self.numbers: list[int] = []
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            _, number, payload = self._socket.recv_multipart()
            _, *rest = msgspec.msgpack.decode(payload)
            self.batches.append(msgspec.msgpack.encode(rest).hex())
            self.numbers.append(int.from_bytes(number, "big"))


class Client:
    """Sends completions of token ids."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model

    async def complete(self, prompt: list[int], most: int, streamed: bool, break_off: bool = False) -> Any:
        """Tokens and cached tokens of one answer; None when this client breaks it off."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "stream": streamed}
        if streamed:
            body["stream_options"] = {"include_usage": True}
        tokens, usage = list[int](), None
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if not streamed:
                answer = await response.json()
                return answer["choices"][0]["token_ids"], _cached(answer["usage"])
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                chunk = json.loads(text)
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"] or []
                usage = chunk.get("usage") or usage
                if break_off and len(tokens) > most // 3:
                    return None
        return tokens, _cached(usage)


def _cached(usage: Any) -> int:
    details = usage["prompt_tokens_details"]
    return details["cached_tokens"] or 0 if details else 0


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Conversations: each prompt continues a beginning that others share."""
    prefixes = [[rng.randrange(3, 900) for _ in range(384)] for _ in range(5)]
    found = []
    for _ in range(count):
        prefix = rng.choice(prefixes)[: rng.randint(0, 384)]
        found.append(prefix + [rng.randrange(3, 900) for _ in range(rng.randint(8, 120))])
    return found


async def requests(url: str, model: str, seed: int, events: Events) -> dict[str, Any]:
    """Send everything."""
    rng = random.Random(seed)
    first, second = prompts(rng, IN_TURN), prompts(rng, AT_ONCE)
    breaks = [rng.random() < 0.25 for _ in second]
    limit = asyncio.Semaphore(CLIENTS)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(session, url, model)
        in_turn = [await client.complete(prompt, 24, index % 2 == 1) for index, prompt in enumerate(first)]
        seen = await batches_when_idle(events)

        async def one(index: int) -> Any:
            async with limit:
                return await client.complete(second[index], 24, breaks[index] or index % 2 == 1, breaks[index])

        at_once = await asyncio.gather(*map(one, range(AT_ONCE)))
        last = await client.complete(first[0], 24, False)
    return {
        "in_turn": in_turn,
        "events": seen,
        "numbers": events.numbers[: len(seen)],
        "at_once": [answer and answer[0] for answer in at_once],
        "broken_off": sum(breaks),
        "last": last[0],
    }


async def batches_when_idle(events: Events) -> list[Any]:
    """The batches of events so far, once no more come: the engine is idle."""
    count = -1
    while count < len(events.batches):
        count = len(events.batches)
        await asyncio.sleep(1)
    return events.batches[:count]


async def healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    async with aiohttp.ClientSession() as session:
        for _ in range(START_S):
            assert server.poll() is None, "the server ended"
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1)
    raise TimeoutError(f"{url} does not answer after {START_S} s")


def port() -> int:
    """A free port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(model: str, kind: str, seed: int, num_blocks: int) -> None:
    """Run the server and its clients."""
    http, zmq_port, path = port(), port(), str(MODELS / model)
    kv_events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{zmq_port}"})
    command = [str(Path(sys.executable).with_name("vllm")), "serve", path, "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(http), "--dtype", "float32", "--block-size", "32"]
    command += ["--max-model-len", "640", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--seed", "0"]
    command += ["--num-gpu-blocks-override", str(num_blocks), "--enable-prompt-tokens-details"]
    command += ["--kv-events-config", kv_events, "--distributed-executor-backend", "uni"]
    if kind == "kvplane":
        command += ["--scheduler-cls", "kvplane_vllm.Scheduler"]
    events, url = Events(f"tcp://127.0.0.1:{zmq_port}"), f"http://127.0.0.1:{http}"
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        asyncio.run(healthy(url, server))
        result = asyncio.run(requests(url, path, seed, events))
    finally:
        server.terminate()
        server.wait(60)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
