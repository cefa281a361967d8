"""The audit log: one JSON object a line, written by a thread of its own, so that no disk holds up a call.

It names peers, owners, methods, replicas and outcomes; never a token, a prompt, a hash.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from kvplane.base.errors import NotFound

MAX_WAITING = 10_000
STDERR = "-"

_log = logging.getLogger(__name__)


class AuditLog:
    """Appends to a file, which may be moved away by log rotation. Lines that find no room are counted and told."""

    def __init__(self, path: str, wall_clock_ms: Callable[[], int]) -> None:
        """`path` "-" = standard error. Raises NotFound when the file cannot be written."""
        self._write = _to_stderr if path == STDERR else _File(path).write
        self._wall_clock_ms = wall_clock_ms
        self._waiting: queue.Queue[dict[str, object] | None] = queue.Queue(MAX_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_all, name="kvplane-audit", daemon=True)
        self._thread.start()

    def tell(self, event: str, **facts: object) -> None:
        """Write what happened; empty facts are left out."""
        line = {"time_ms": self._wall_clock_ms(), "event": event, **{key: facts[key] for key in facts if facts[key]}}
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        while (line := self._waiting.get()) is not None:
            lost, self._lost = self._lost, 0
            try:
                if lost:
                    self._write(_text({"time_ms": line["time_ms"], "event": "lines_lost", "count": lost}))
                self._write(_text(line))
            except OSError as error:
                self._lost += lost + 1
                _log.error("the audit log cannot be written: %s", error)


class _File:
    """A file that its user alone may read; a new one when it was moved away."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise NotFound(
                f"{path}: {error.strerror}", field="audit_log", remedy="name a file that can be written, or `-`"
            ) from None

    def write(self, text: str) -> None:
        """Append a line. Raises OSError."""
        if not self._is_there():
            os.close(self._descriptor)
            self._descriptor = self._open()
        os.write(self._descriptor, text.encode())

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _text(line: dict[str, object]) -> str:
    at = datetime.fromtimestamp(int(str(line["time_ms"])) / 1000, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": at, **{key: value for key, value in line.items() if key != "time_ms"}}) + "\n"
