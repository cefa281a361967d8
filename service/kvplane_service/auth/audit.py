"""The audit log: one JSON object per line, written by a thread of its own, so that a slow disk delays no call.

It contains peers, owners, methods, replicas and outcomes; never a token, a prompt or a hash.
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
    """Appends to a file, which log rotation may move. Lines lost to a full queue are counted and reported in
    the log.
    """

    def __init__(self, path: str, wall_clock_ms: Callable[[], int]) -> None:
        """`path` "-" = standard error. Raises NotFound when the file cannot be written."""
        self._sink = _Stderr() if path == STDERR else _File(path)
        self._wall_clock_ms = wall_clock_ms
        self._waiting: queue.Queue[dict[str, object] | None] = queue.Queue(MAX_WAITING)
        self._lost = 0  # incremented by callers, read by the writing thread
        self._thread = threading.Thread(target=self._write_all, name="kvplane-audit", daemon=True)
        self._thread.start()

    def record(self, event: str, **facts: object) -> None:
        """Append a line; empty facts are omitted."""
        line = {"time_ms": self._wall_clock_ms(), "event": event, **{key: facts[key] for key in facts if facts[key]}}
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write pending lines and stop."""
        self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        reported = 0
        while (line := self._waiting.get()) is not None:
            reported = self._write_one(line, reported)
        self._write_one({"time_ms": self._wall_clock_ms(), "event": "closed"}, reported)
        self._sink.close()

    def _write_one(self, line: dict[str, object], reported: int) -> int:
        """Write a line, preceded by a report of newly lost ones. Returns the number of lost lines reported so far."""
        lost = self._lost
        try:
            if lost > reported:
                gap = {"time_ms": line["time_ms"], "event": "lines_lost", "count": lost - reported}
                self._sink.write(_text(gap))
            self._sink.write(_text(line))
        except OSError as error:
            _log.error("the audit log cannot be written: %s", error)
        return lost


class _File:
    """A file with mode 0600, reopened when it was moved or removed."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise NotFound(
                f"{path}: {error.strerror}", field="audit_log", remedy="name a writable file, or `-`"
            ) from None

    def write(self, text: str) -> None:
        """Append a line. Raises OSError."""
        if not self._is_there():
            os.close(self._descriptor)
            self._descriptor = self._open()
        os.write(self._descriptor, text.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


class _Stderr:
    def write(self, text: str) -> None:
        """Print a line."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """Standard error stays open."""


def _text(line: dict[str, object]) -> str:
    at = datetime.fromtimestamp(int(str(line["time_ms"])) / 1000, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": at, **{key: value for key, value in line.items() if key != "time_ms"}}) + "\n"
