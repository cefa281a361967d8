"""Runs the reference in a separate process: requests and answers are JSON lines.

Answers have a pipe of their own, so that nothing that vLLM or a library prints can come between them.
"""

from __future__ import annotations

import json
import os
import subprocess
from types import TracebackType
from typing import Any, Protocol

from tests.conformance.live.environment import PYTHON, ROOT, set_up, variables

Record = dict[str, Any]


class ReferenceFailed(Exception):
    """The reference raised; the message has its exception. The driver made a call that no scheduler makes."""


class Reference(Protocol):
    """The reference, or a substitute in a test."""

    def ask(self, record: Record) -> Record:
        """Complete a header, or return an operation with its outputs; raises ReferenceFailed."""
        ...


class Peer:
    """Sends headers and operations to the reference and returns its answers."""

    def __init__(self, module: str = "tests.conformance.live.reference") -> None:
        """`module` answers in the reference's environment, as `reference.serve` does."""
        set_up()
        reading, writing = os.pipe()
        command = [str(PYTHON), "-m", module, str(writing)]
        with os.fdopen(writing, "w"):
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[writing],
                env=variables(),
                text=True,
            )
        self._answers = os.fdopen(reading)
        self._read()

    def ask(self, record: Record) -> Record:
        """The record with its outputs; raises ReferenceFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(record) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Record:
        line = self._answers.readline()
        if not line:
            raise ReferenceFailed(f"the process ended with {self._process.wait()}")
        answer: Record = json.loads(line)
        if "error" in answer:
            raise ReferenceFailed(answer["error"])
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()  # safe: it has no state to save, and its regular exit is slow
        self._process.wait()
        self._answers.close()
