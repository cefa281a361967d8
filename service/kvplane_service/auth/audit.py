"""Write the audit log: one JSON object per line, written by its own thread, so that a slow disk delays no call.

Lines contain client addresses, owners, methods, replicas and outcomes, and never a token, a prompt or a hash.
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
    """Appends audit lines to a file, which log rotation may move away.

    A line is lost if MAX_WAITING lines already wait for the writing thread, or if the file cannot be written. Before
    the next line, the file states the number of lost lines; the process's own log reports each outage once.
    """

    def __init__(self, path: str, wall_clock_ms: Callable[[], int]) -> None:
        """Open the file; the path "-" means standard error. Raises NotFound if the file cannot be written."""
        self._sink = _Stderr() if path == STDERR else _File(path)
        self._wall_clock_ms = wall_clock_ms
        self._waiting: queue.Queue[dict[str, object] | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0  # lines that found the queue full: incremented by callers, read by the writing thread
        self._failed = 0  # lines that could not be written; this and what follows belongs to the writing thread
        self._reported = 0  # lost lines that the file states
        self._is_failing = False  # the last line could not be written
        self._thread = threading.Thread(target=self._write_all, name="kvplane-audit", daemon=True)
        self._thread.start()

    def record(self, event: str, **facts: object) -> None:
        """Append a line with the event and those facts that are not empty."""
        line = {"time_ms": self._wall_clock_ms(), "event": event, **{key: facts[key] for key in facts if facts[key]}}
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write all waiting lines, then a line "closed", and stop the writing thread."""
        self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._write_one(line)
        self._write_one({"time_ms": self._wall_clock_ms(), "event": "closed"})
        if self._is_failing:
            lost = self._dropped + self._failed - self._reported
            _log.error("the audit log ends without its last lines: %d were lost", lost)
        self._sink.close()

    def _write_one(self, line: dict[str, object]) -> None:
        """Write a line, and before it the number of lines lost since the last report. A line that cannot be written is
        counted as lost.
        """
        lost = self._dropped + self._failed
        try:
            if lost > self._reported:
                gap = {"time_ms": line["time_ms"], "event": "lines_lost", "count": lost - self._reported}
                self._sink.write(_text(gap))
                self._reported = lost
            self._sink.write(_text(line))
        except OSError as error:
            self._failed += 1
            if not self._is_failing:
                _log.error("the audit log cannot be written, lines are lost: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False


class _File:
    """A file with mode 0600. If it was moved or removed, the next write creates a new file at its path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None  # None while no file is open
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise NotFound(
                f"{path} cannot be written: {error.strerror}", field="audit_log", remedy="name a writable file, or `-`"
            ) from None

    def write(self, text: str) -> None:
        """Append a line. Raises OSError; if the file could not be opened, each later call tries to open it."""
        if self._descriptor is not None and not self._is_there(self._descriptor):
            self.close()
        if self._descriptor is None:
            self._descriptor = self._open()
        os.write(self._descriptor, text.encode())

    def close(self) -> None:
        """Close the file if it is open. Raises OSError."""
        descriptor, self._descriptor = self._descriptor, None  # first, since its number may be in use again right away
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            return False


class _Stderr:
    def write(self, text: str) -> None:
        """Print a line."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """Do nothing: standard error stays open."""


def _text(line: dict[str, object]) -> str:
    at = datetime.fromtimestamp(int(str(line["time_ms"])) / 1000, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": at, **{key: value for key, value in line.items() if key != "time_ms"}}) + "\n"
