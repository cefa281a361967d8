"""Whether an engine of mode "remote" can schedule: `vllm serve ... --middleware kvplane_vllm.Ready`, then GET /ready.

The engine's process notes in a file why it waits for its service, and the API server's process, on the same machine,
reads it. /health stays as it is: an orchestrator that restarts an engine because its service is away loses the cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvplane_vllm.engine_lock import lock_folder

PATH = "/ready"


class Notice:
    """Why this engine, of one rank of data parallelism, schedules nothing now."""

    def __init__(self, vllm_config: Any) -> None:
        """Nothing is noted."""
        self._path = Path(f"{_prefix(vllm_config)}{vllm_config.parallel_config.data_parallel_index}")
        self._reason = ""
        self._path.unlink(missing_ok=True)  # of an engine that was killed

    def say(self, reason: str) -> None:
        """Note a reason; "" = the engine schedules."""
        if reason == self._reason:
            return
        self._reason = reason
        if not reason:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}")
        part.write_text(f"{os.getpid()} {reason}")
        part.replace(self._path)


def why_waiting(vllm_config: Any) -> str:
    """Return what the living engines of this configuration have noted; "" if nothing."""
    prefix, reasons = _prefix(vllm_config), []
    for path in sorted(prefix.parent.glob(f"{prefix.name}*")):
        with suppress(FileNotFoundError):
            pid, _, reason = path.read_text().partition(" ")
            if Path(f"/proc/{pid}").exists():
                reasons.append(reason)
    return "; ".join(dict.fromkeys(reasons))


def _prefix(vllm_config: Any) -> Path:
    given = vllm_config.additional_config["kvplane"]
    name = hashlib.sha256(f"{given.get('address')} {given.get('replica')}".encode()).hexdigest()[:16]
    return lock_folder() / f"waits-{name}-"


class Ready:
    """ASGI middleware: /ready answers 503 with the reason while an engine waits for its service, else as /health."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http" and scope["path"] == PATH:
            config = scope["app"].state.vllm_config
            reason = why_waiting(config) if "kvplane" in (config.additional_config or {}) else ""
            if reason:
                headers = [(b"content-type", b"text/plain")]
                await send({"type": "http.response.start", "status": 503, "headers": headers})
                await send({"type": "http.response.body", "body": reason.encode()})
                return
            scope = scope | {"path": "/health", "raw_path": b"/health"}
        await self._app(scope, receive, send)
