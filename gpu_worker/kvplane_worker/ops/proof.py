"""A backend proves itself when it is chosen: every operation beside the torch backend's, on the very device.

Tests prove a backend on the machines that tests run on. This says whether it is right on this one, with this driver and
these versions; one that is not is not used. It costs a second where kernels are compiled already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvplane_worker.ops.interface import PagedOps
from kvplane_worker.ops.torch_ops import TorchOps
from kvplane_worker.ops.trials import Outcome, Trial, trials


@dataclass(frozen=True, slots=True)
class Proof:
    """What trying a backend came to.

    Attributes:
        failure: the first trial that failed, and how; "" when none did.
        trials: that were run; seconds: that they took.
    """

    failure: str
    trials: int
    seconds: float


def prove(ops: PagedOps, device: torch.device) -> Proof:
    """Try a backend, until a trial fails."""
    begun, yardstick, tried = time.perf_counter(), TorchOps(), trials(device)
    for count, trial in enumerate(tried, 1):
        if why := difference(trial, ops, yardstick):
            return Proof(f"{trial.operation} ({trial.name}): {why}", count, time.perf_counter() - begun)
    return Proof("", len(tried), time.perf_counter() - begun)


def difference(trial: Trial, ops: PagedOps, yardstick: PagedOps) -> str:
    """How a backend's outcome differs from another's, "" when it does not."""
    want = trial.run(yardstick)
    try:
        with unwritten_is_nan():
            got = trial.run(ops)
            return unlike(got, want, trial.steps)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def unlike(got: Outcome, want: Outcome, steps: float) -> str:
    """What differs between two outcomes."""
    places = (got.memory != want.memory).nonzero() if got.memory.shape == want.memory.shape else None
    if places is None or len(places):
        return "memory of another size" if places is None else f"{len(places)} bytes of memory differ"
    if want.out is None:
        return ""
    assert got.out is not None, "outcomes of one trial are of one form"
    if got.out.shape != want.out.shape or got.out.dtype != want.out.dtype:
        return f"{got.out.dtype} {list(got.out.shape)}, not {want.out.dtype} {list(want.out.shape)}"
    error = (got.out.double() - want.out.double()).abs()
    allowed = steps * torch.finfo(want.out.dtype).eps * (1 + want.out.double().abs())
    wrong = int((~(error <= allowed)).sum())  # NaN is wrong
    return f"{wrong} of {error.numel()} elements differ, the worst by {float(error.max()):.3g}" if wrong else ""


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Within, torch fills new tensors with NaN, so that what an operation does not write is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
