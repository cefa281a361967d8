"""An example: a proxy that has each prompt prefilled where the most of it is cached, and decoded on another engine.

    python -m tests.vllm.pd_proxy PORT PLACES

PLACES is a JSON file: [{"name": "a", "url": "http://...", "events": "tcp://...", "replay": "tcp://..."}, ...] of vLLM
engines with NixlConnector and KV events. It answers `POST /v1/completions` for prompts of token ids. The answer has the
headers x-prefill and x-decode, the engines, and x-claimed and x-cached, the tokens of the hit that was expected at the
first one and that it had. An engine that fails is left out: the next one computes the prompt. Not for production: it
has no limits and no TLS, one model, and still asks an engine that is dead.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvplane_fleet.fleet import Fleet, Prompt, following
from kvplane_fleet.settings import PlaceSettings

ANSWER_S = 600
CHUNK = 1 << 16


class Engines:
    """The engines, what they have cached, and the tokens that are under way at each."""

    def __init__(self, places: list[dict[str, str]]) -> None:
        """Follow the engines in a thread; returns when all are known."""
        self.urls = {one["name"]: one["url"] for one in places}
        self._under_way: Counter[str] = Counter(dict.fromkeys(self.urls, 0))
        self._fleet, self._lock, self._known = Fleet(), threading.Lock(), threading.Event()
        self._settings = [PlaceSettings(one["name"], events=one["events"], replay=one["replay"]) for one in places]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_until_complete, args=[self._follow()], daemon=True).start()
        self._known.wait()

    async def _follow(self) -> None:
        async with following(self._fleet, self._settings) as tasks:
            await self._fleet.wait_until_current()
            self._known.set()
            await asyncio.gather(*tasks)

    async def _claims(self, tokens: list[int]) -> dict[str, int]:
        return {claim.place: claim.tokens for claim in self._fleet.claims("", Prompt(tokens))}

    def to_prefill(self, tokens: list[int]) -> tuple[str, int]:
        """Return the engine that has to compute the least before it has this prompt, and what it would hit."""
        claims = asyncio.run_coroutine_threadsafe(self._claims(tokens), self._loop).result()
        with self._lock:
            name = min(self.urls, key=lambda one: self._under_way[one] - claims.get(one, 0))
        return name, claims.get(name, 0)

    def to_decode(self, prefill: str) -> list[str]:
        """Return the engines in the order of their tokens under way, the one that has prefilled last."""
        with self._lock:
            return sorted(self.urls, key=lambda one: (one == prefill, self._under_way[one]))

    @contextmanager
    def under_way(self, name: str, num_tokens: int) -> Iterator[str]:
        """Count these tokens at an engine while the context is entered; yields its URL."""
        with self._lock:
            self._under_way[name] += num_tokens
        try:
            yield self.urls[name]
        finally:
            with self._lock:
                self._under_way[name] -= num_tokens


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the open answer of an engine. Raises OSError."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=ANSWER_S)


class Handler(BaseHTTPRequestHandler):
    """Answers one client."""

    engines: Engines

    def do_POST(self) -> None:
        """Pass a prompt to two engines, and the answer of the second to the client."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = body.get("prompt")
        if not (isinstance(tokens, list) and all(type(one) is int for one in tokens)):
            return self.send_error(400, "prompt must be a list of token ids")
        prefill, claimed = self.engines.to_prefill(tokens)
        said: dict[str, Any] = {"x-prefill": prefill, "x-claimed": claimed}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        first.pop("stream_options", None)
        try:
            with self.engines.under_way(prefill, len(tokens)) as url, post(url, first) as answer:
                found = json.load(answer)
            body["kv_transfer_params"] = found["kv_transfer_params"]
            said["x-cached"] = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        except OSError:
            said["x-prefill"] = "failed"
        for decode in self.engines.to_decode(prefill):
            with self.engines.under_way(decode, len(tokens)) as url:
                try:
                    opened = post(url, body)
                except OSError:
                    body.pop("kv_transfer_params", None)  # the next one computes, or has what it prefilled
                    continue
                with opened:
                    return self._pass_on(opened, said | {"x-decode": decode})
        return self.send_error(502, "no engine answers")

    def _pass_on(self, answer: Any, headers: dict[str, Any]) -> None:
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers["content-type"])
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        while part := answer.read1(CHUNK):
            self.wfile.write(part)
            self.wfile.flush()


def main(port: int, places: str) -> None:
    """Serve."""
    Handler.engines = Engines(json.loads(Path(places).read_text()))
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"serving on {port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
