"""A fault planted in a correct backend, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvplane_kernels.interface import PagedOps

FaultyCall = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A fault of one operation."""

    operation: str
    name: str
    faulty: FaultyCall

    def planted(self, ops: PagedOps) -> Any:
        """The backend with this fault."""
        return FaultyOps(self, ops)


@dataclass(frozen=True)
class FaultyOps:
    """A backend with one faulty operation."""

    fault: Fault
    ops: PagedOps

    @property
    def name(self) -> str:
        return f"{self.ops.name} ({self.fault.name})"

    def __getattr__(self, operation: str) -> Any:
        original = getattr(self.ops, operation)
        return partial(self.fault.faulty, original) if operation == self.fault.operation else original


FAULTS: list[Fault] = []


def plant(name: str, *operations: str) -> Callable[[FaultyCall], FaultyCall]:
    """Add a fault to the list, for each of the operations."""

    def enter(faulty: FaultyCall) -> FaultyCall:
        FAULTS.extend(Fault(operation, name, faulty) for operation in operations)
        return faulty

    return enter
