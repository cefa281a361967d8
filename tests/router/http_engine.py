"""An engine for tests with an HTTP interface like vLLM's: completions of token ids and of text, streamed or not.

python -m tests.router.http_engine NAME HTTP_PORT EVENTS REPLAY

It caches whole blocks of what it computed, publishes them as vLLM does, and states `cached_tokens`. A token of its text
is a character, as /tokenize states. Its answers have bytes that a proxy could break: quotes, line ends, long lines.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import zmq.asyncio

from tests.router.engine import BLOCK, DOMAIN
from tests.router.publisher import Publisher

ADAPTERS = {"sql": "/adapters/sql", "chat": "/adapters/chat"}
TEXT = 'a "cached_tokens": 7, \\"x\\" \r\n\r\n' + "é" * 3000


class HttpEngine:
    """The engine in a process of its own."""

    def __init__(self, name: str, port: int, events: str, replay: str) -> None:
        command = [sys.executable, "-m", "tests.router.http_engine", name, str(port), events, replay]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Server:
    """Answers HTTP requests."""

    def __init__(self, name: str, publisher: Publisher) -> None:
        self._name, self._publisher, self._cached = name, publisher, set[int]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                target, *lines = head.strip().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                body = await _body(reader, headers)
                await self._answer(writer, target.split()[1], headers, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes) -> None:
        if path == "/tokenize":
            asked = json.loads(body)
            _write(writer, {"tokens": _tokens(asked)})
        elif path == "/seen":
            _write(writer, {"headers": headers, "engine": self._name})
        else:
            await self._complete(writer, json.loads(body))
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        tokens = _tokens(asked)
        adapter = asked["model"] if asked["model"] in ADAPTERS else None
        keys = replace(DOMAIN, lora=(adapter, ADAPTERS[adapter]) if adapter else None).keys(tokens)
        known = next((at for at, key in enumerate(keys) if key not in self._cached), len(keys))
        cached = min(known * BLOCK, (len(tokens) - 1) // BLOCK * BLOCK)
        await self._store(keys, known, tokens, adapter)
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 3, "prompt_tokens_details": details}
        if not asked.get("stream"):
            choice = {"text": TEXT, "index": 0}
            _write(writer, {"choices": [choice], "usage": usage, "engine": self._name, "sent": asked})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        parts = [{"choices": [{"text": TEXT}], "engine": self._name}] * 3 + [{"choices": [], "usage": usage}]
        for text in [*map(json.dumps, parts), "[DONE]"]:
            data = f"data: {text}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")

    async def _store(self, keys: list[int], known: int, tokens: list[int], adapter: str | None) -> None:
        self._cached.update(keys)
        if keys[known:]:
            event = {
                "type": "BlockStored", "block_hashes": keys[known:], "block_size": BLOCK, "medium": "GPU",
                "parent_block_hash": keys[known - 1] if known else None, "group_idx": 0,
                "token_ids": tokens[known * BLOCK : len(keys) * BLOCK], "kv_cache_spec_kind": "full_attention",
                "lora_name": adapter, "extra_keys": [[adapter]] * len(keys[known:]) if adapter else None,
            }  # fmt: skip
            await self._publisher.publish(time.time(), [event])


def _tokens(asked: dict[str, Any]) -> list[int]:
    given = asked.get("prompt", json.dumps(asked.get("messages")))
    return given if isinstance(given, list) else [ord(one) for one in given]


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    if headers.get("transfer-encoding") != "chunked":
        return b""
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _write(writer: asyncio.StreamWriter, answer: object) -> None:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def _run(name: str, port: int, events: str, replay: str) -> None:
    context = zmq.asyncio.Context()
    with Publisher(context, events, replay) as publisher:
        server = await asyncio.start_server(Server(name, publisher).serve, "127.0.0.1", port)
        print("ready", flush=True)
        async with server:
            await publisher.serve_replays()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
