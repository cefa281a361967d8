"""The choice of a backend for a device, made once when a worker starts. `Worker.Describe` returns it with its reasons.

A backend is a class that implements `interface.PagedOps`; its `unfit(device)` returns why it cannot work on a device.
Backends are listed in `BACKENDS` and imported only when they are considered, so their dependencies are optional. A
backend is used only after it passed the start check on the device (`proof`). The check runs in a child process, because
a kernel that fails can crash its process or corrupt the CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane_kernels.interface import PagedOps
from kvplane_kernels.proof import Proof, load, prove_in_subprocess

AUTO = "auto"
PACKAGE = "kvplane_kernels"

# In order of preference. "module:class", the module relative to PACKAGE. The last one works on every device and is the
# reference of the start check.
BACKENDS: dict[str, str] = {
    "cudnn": "cudnn_ops.entry:CudnnEntry",
    "triton": "triton_ops.entry:TritonEntry",
    "torch": "torch_ops:TorchOps",
}
REFERENCE = "torch"
# Not tried by "auto" for a caller that uses no attention, such as a worker.
FOR_ATTENTION = ("cudnn",)

# Arguments: "module:class", device, operations to check (empty = all).
Prover = Callable[[str, torch.device, Collection[str]], Proof]


class Backend(Protocol):
    """The interface of a backend's class, as far as this module uses it."""

    def __call__(self) -> PagedOps:
        """Create the backend."""

    def unfit(self, device: torch.device) -> str:
        """Return why the backend cannot work on a device; "" if it can. A static method."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend, with the reasons for the choice.

    Attributes:
        ops: the backend.
        reasons: a line for each backend that was considered, in order: "triton: needs CUDA", "torch: chosen".
    """

    ops: PagedOps
    reasons: tuple[str, ...]

    @property
    def explained(self) -> tuple[str, ...]:
        """The reasons for the choice, and the chosen backend's own lines: which operations it has passed to another
        backend, and why.
        """
        lines: tuple[str, ...] = getattr(self.ops, "explained", ())
        return (*self.reasons, *(f"{self.ops.name}: {line}" for line in lines))


def choose(
    device: torch.device | str, asked: str = AUTO, operations: Collection[str] = (), prove: Prover = prove_in_subprocess
) -> Choice:
    """Return the first backend that works on the device, or the backend with the given name.

    Args:
        device: device of the pages.
        asked: name of a backend, or "auto".
        operations: operations that the caller will use, such as `PAGE_OPERATIONS`; only these are checked; empty = all.
        prove: the function that runs the start check.

    Raises:
        InvalidArgument: no backend has this name.
        FailedPrecondition: the named backend, or every backend, does not work on the device; the message has reasons.
    """
    if asked != AUTO and asked not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise InvalidArgument(f"there is no backend {asked!r}", field="backend", remedy=f"give one of {known}")
    device = torch.device(device)
    reasons: list[str] = []
    needs_attention = not operations or "prefill_attention" in operations
    tried = [one for one in BACKENDS if needs_attention or one not in FOR_ATTENTION]
    for name in tried if asked == AUTO else (asked,):
        ops, why = considered(name, device, operations, prove)
        if ops is not None:
            return Choice(ops, (*reasons, f"{name}: chosen{', requested by name' if asked == name else ''}{why}"))
        reasons.append(f"{name}: {why}")
    remedy = f"give {AUTO!r}, or another device" if asked != AUTO else "give another device"
    raise FailedPrecondition(f"no backend works on {device}: " + "; ".join(reasons), field="backend", remedy=remedy)


def considered(
    name: str, device: torch.device, operations: Collection[str], prove: Prover
) -> tuple[PagedOps | None, str]:
    """Consider one backend: return (the backend, a note on its start check) if it works on the device, otherwise (None,
    the reason).
    """
    path = f"{PACKAGE}.{BACKENDS[name]}"
    try:
        backend: Backend = load(path)
        if why_not := backend.unfit(device):
            return None, why_not
        if name == REFERENCE:
            return backend(), ""
        proof = prove(path, device, operations)
        if proof.failure:
            return None, f"failed its start check: {proof.failure}"
        return backend(), f"; {proof.trials} trials equal to torch in {proof.seconds:.1f} s"
    except ImportError as error:
        return None, str(error)
