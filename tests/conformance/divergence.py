"""The error that ends a replay whose outputs differ from its recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.conformance.forms import Record


@dataclass
class Divergence(Exception):
    """The first output that differs."""

    line: int
    op: Record
    name: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"line {self.line}: {self.name}: expected {_short(self.expected)}, got {_short(self.got)}\n"
            f"  operation: {_short(self.op)}"
        )


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 600 else text[:600] + "..."
