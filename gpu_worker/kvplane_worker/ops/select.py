"""Which backend works on a device: chosen once, when a worker starts, with reasons that `Worker.Describe` shows.

A backend is a class that carries out `interface.PagedOps` and says by `unfit(device)` why it cannot work there. It is
listed in `BACKENDS` and imported only when it is considered, so that what it needs may be missing. What it says of
itself is not enough: it has to prove itself beside the torch backend on the very device (`proof`), or it is not used.
It does so in a process of its own, since a kernel that fails can end the process or leave it without the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane_worker.ops.interface import PagedOps
from kvplane_worker.ops.proof import Proof, load, prove_apart

AUTO = "auto"
PACKAGE = "kvplane_worker.ops"

# Best first. "module:class", the module relative to PACKAGE. The last one works everywhere; others are proved by it.
BACKENDS: dict[str, str] = {
    "triton": "triton_ops.entry:TritonEntry",
    "flashinfer": "flashinfer_ops.entry:FlashInferEntry",
    "torch": "torch_ops:TorchOps",
}
YARDSTICK = "torch"

# "module:class", device, and the operations to try (empty = every one).
Prover = Callable[[str, torch.device, Collection[str]], Proof]


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


def choose(
    device: torch.device | str, asked: str = AUTO, operations: Collection[str] = (), prove: Prover = prove_apart
) -> Choice:
    """Return the first backend that fits the device, or the one asked for by name.

    Args:
        device: of the pages.
        asked: name of a backend, or "auto".
        operations: that the caller will use, such as `PAGE_OPERATIONS`: only these are tried; empty = every one.
        prove: tries a backend.

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
        ops, why = considered(name, device, operations, prove)
        if ops is not None:
            return Choice(ops, (*reasons, f"{name}: chosen{', asked for by name' if asked == name else ''}{why}"))
        reasons.append(f"{name}: {why}")
    remedy = f"give {AUTO!r}, or another device" if asked != AUTO else "give another device"
    raise FailedPrecondition(f"no backend for {device}: " + "; ".join(reasons), field="backend", remedy=remedy)


def considered(
    name: str, device: torch.device, operations: Collection[str], prove: Prover
) -> tuple[PagedOps | None, str]:
    """Return a backend that works on the device, and what proved it; or None, and why it does not."""
    path = f"{PACKAGE}.{BACKENDS[name]}"
    try:
        backend: Backend = load(path)
        if why_not := backend.unfit(device):
            return None, why_not
        if name == YARDSTICK:
            return backend(), ""
        proof = prove(path, device, operations)
        if proof.failure:
            return None, f"failed its start check: {proof.failure}"
        return backend(), f"; {proof.trials} trials as torch's in {proof.seconds:.1f} s"
    except ImportError as error:
        return None, str(error)
