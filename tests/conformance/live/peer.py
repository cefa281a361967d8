"""The reference as a process of its own, spoken to in JSON lines."""

from __future__ import annotations

import json
import subprocess
from types import TracebackType
from typing import Any, Protocol

from tests.conformance.live.environment import PYTHON, ROOT, set_up, variables

Record = dict[str, Any]


class ReferenceFailed(Exception):
    """The reference raised; the text says what. The driver asked for something that no scheduler asks for."""


class Asked(Protocol):
    """Whoever stands in for the reference."""

    def ask(self, record: Record) -> Record:
        """A header with what follows from it, or an operation with its outputs; raises ReferenceFailed."""
        ...


class Peer:
    """Carries headers and operations to the reference and brings its answers back."""

    def __init__(self, module: str = "tests.conformance.live.reference") -> None:
        """`module` answers in the reference's environment, as `reference.serve` does."""
        set_up()
        command = [str(PYTHON), "-m", module]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables(), text=True
        )
        self._read()

    def ask(self, record: Record) -> Record:
        """The record with its outputs; raises ReferenceFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(record) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Record:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ReferenceFailed(f"the process ended with {self._process.wait()}")
        answer: Record = json.loads(line)
        if "error" in answer:
            raise ReferenceFailed(answer["error"])
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()  # it has nothing to save, and takes its time to leave
        self._process.wait()
