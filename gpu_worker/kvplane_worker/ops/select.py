"""Which backend works on a device: chosen once, when a worker starts, with reasons that `Worker.Describe` shows.

A backend is a class that carries out `interface.PagedOps` and says by `unfit(device)` why it cannot work there. It is
listed in `BACKENDS` and imported only when it is considered, so that what it needs may be missing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane_worker.ops.interface import PagedOps

AUTO = "auto"
PACKAGE = "kvplane_worker.ops"

# Best first. "module:class", the module relative to PACKAGE. The last one works everywhere.
BACKENDS: dict[str, str] = {
    "triton": "triton_ops.entry:TritonEntry",
    "torch": "torch_ops:TorchOps",
}


class Backend(Protocol):
    """The class of a backend."""

    def __call__(self) -> PagedOps:
        """Make the backend."""

    def unfit(self, device: torch.device) -> str:
        """Return why the backend cannot work on a device, "" when it can. A static method."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and how it came to be chosen.

    Attributes:
        reasons: one line for each backend that was considered, in order: "triton: needs CUDA", "torch: chosen".
    """

    ops: PagedOps
    reasons: tuple[str, ...]

    @property
    def explained(self) -> tuple[str, ...]:
        """The reasons, and what the backend has to say of its work so far: what it left to another one, and why."""
        lines: tuple[str, ...] = getattr(self.ops, "explained", ())
        return (*self.reasons, *(f"{self.ops.name}: {line}" for line in lines))


def choose(device: torch.device | str, asked: str = AUTO) -> Choice:
    """Return the first backend that fits the device, or the one asked for by name.

    Raises:
        InvalidArgument: no backend has this name.
        FailedPrecondition: the one asked for cannot work here, or none can; the message says why.
    """
    if asked != AUTO and asked not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise InvalidArgument(f"no backend is named {asked!r}", field="backend", remedy=f"give one of {known}")
    device = torch.device(device)
    reasons: list[str] = []
    for name in BACKENDS if asked == AUTO else (asked,):
        backend, why_not = considered(name, device)
        if backend:
            return Choice(backend(), (*reasons, f"{name}: chosen" + (", asked for by name" if asked == name else "")))
        reasons.append(f"{name}: {why_not}")
    remedy = f"give {AUTO!r}, or another device" if asked != AUTO else "give another device"
    raise FailedPrecondition(f"no backend for {device}: " + "; ".join(reasons), field="backend", remedy=remedy)


def considered(name: str, device: torch.device) -> tuple[Backend | None, str]:
    """Return the class of a backend when it fits the device, else None and why not."""
    module, _, class_name = BACKENDS[name].partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(f"{PACKAGE}.{module}"), class_name)
    except ImportError as error:
        return None, str(error)
    why_not = backend.unfit(device)
    return (None, why_not) if why_not else (backend, "")
