"""The start check of a backend: its results of every trial are compared with PyTorch's, on the device in use.

The tests check a backend on the machines that run tests. The start check runs on the machine at hand, with its driver
and library versions; a backend that fails is not used. The check takes some seconds if kernels are compiled already.

    python -m kvplane_kernels.proof MODULE:CLASS DEVICE [OPERATION ...]     one JSON object on standard output
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvplane_kernels.interface import PagedOps
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.trial import Outcome, Trial
from kvplane_kernels.trials import trials

LIMIT_S = 1800.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a backend's start check.

    Attributes:
        failure: the first trial that failed, and how; "" = none failed.
        trials: number of trials that ran.
        seconds: time that the trials took, in seconds.
    """

    failure: str
    trials: int
    seconds: float


def load(path: str) -> Any:  # noqa: ANN401
    """Import a class, given as "module:class". Raises ImportError."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def prove_in_subprocess(
    path: str, device: torch.device, operations: Collection[str] = (), stop: threading.Event | None = None
) -> Proof:
    """Run `prove` in a child process, for a backend given as "module:class".

    So a kernel that crashes its process, corrupts the CUDA context or never returns only excludes the backend. Setting
    `stop` ends the trials, which counts as a failure.
    """
    command = [sys.executable, "-m", __name__, path, str(device), *operations]
    begun = time.perf_counter()

    def failed(why: str) -> Proof:
        return Proof(why, 0, time.perf_counter() - begun)

    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while True:
            try:
                out, errors = child.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                stopped = stop is not None and stop.is_set()
                if not stopped and time.perf_counter() - begun < LIMIT_S:
                    continue
                child.kill()
                child.communicate()
                return failed("it was stopped" if stopped else f"no end within {LIMIT_S:.0f} s")
    if child.returncode:
        return failed(_end_of(child.returncode, errors.decode(errors="replace")))
    return Proof(**json.loads(out.splitlines()[-1]))


def _end_of(code: int, errors: str) -> str:
    """Return how a child process ended, with the last line of its standard error."""
    last = next(reversed([line for line in errors.splitlines() if line.strip()]), "")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"its process ended with {how}: {last.strip()}"


def prove(ops: PagedOps, device: torch.device, operations: Collection[str] = ()) -> Proof:
    """Run the trials of the given operations (empty = all operations) until a trial fails."""
    begun, reference = time.perf_counter(), TorchOps()
    tried = [trial for trial in trials(device) if not operations or trial.operation in operations]
    for count, trial in enumerate(tried, 1):
        if why := difference(trial, ops, reference):
            return Proof(f"{trial.operation} ({trial.name}): {why}", count, time.perf_counter() - begun)
    return Proof("", len(tried), time.perf_counter() - begun)


def difference(trial: Trial, ops: PagedOps, reference: PagedOps) -> str:
    """Return how a trial's outcome on the backend differs from the outcome on the reference, PyTorch; "" if it does
    not.
    """
    want = trial.run(reference)
    try:
        with unwritten_is_nan():
            got = trial.run(ops)
            return mismatch(got, want, trial.steps)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def mismatch(got: Outcome, want: Outcome, steps: float) -> str:
    """Return what differs between two outcomes of a trial, rounding excepted; "" if nothing does."""
    places = (got.memory != want.memory).nonzero() if got.memory.shape == want.memory.shape else None
    if places is None or len(places):
        return "memory has another size" if places is None else f"{len(places)} bytes of memory differ"
    if want.out is None:
        return ""
    assert got.out is not None, "outcomes of one trial have the same form"
    if got.out.shape != want.out.shape or got.out.dtype != want.out.dtype:
        found, expected = (f"{one.dtype} {list(one.shape)}" for one in (got.out, want.out))
        return f"the result is {found}, expected {expected}"
    error = (got.out.double() - want.out.double()).abs()
    allowed = steps * torch.finfo(want.out.dtype).eps * (1 + want.out.double().abs())
    wrong = int((~(error <= allowed)).sum())  # NaN is wrong
    return f"{wrong} of {error.numel()} elements differ, the worst by {float(error.max()):.3g}" if wrong else ""


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Run the `with` block with new tensors filled with NaN, so that elements that a kernel does not write are
    detected.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def main() -> None:
    """Run the start check that the command line asks for."""
    path, device, *operations = sys.argv[1:]
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    sys.stdout.write(json.dumps(asdict(prove(load(path)(), where, operations))) + "\n")


if __name__ == "__main__":
    main()
