"""The backends that the contract is checked on, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvplane_worker.ops.flashinfer_ops.entry import FlashInferEntry
from kvplane_worker.ops.torch_ops import TorchOps
from kvplane_worker.ops.triton_ops.backend import TritonOps
from tests.ops import interpreter
from tests.ops.contract import Subject


def triton_subject(device: str) -> Subject:
    """The Triton backend in the interpreter, in a process with TRITON_INTERPRET=1."""
    if device == "cpu":
        assert interpreter.is_on(), "TRITON_INTERPRET=1 is not set"
        interpreter.quicken()
    return Subject(TritonOps(), device)


def flashinfer_subject(device: str) -> Subject:
    """The FlashInfer backend, on a GPU where FlashInfer is installed."""
    assert not (why := FlashInferEntry.unfit(torch.device(device))), why
    return Subject(FlashInferEntry(), device)


SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "torch": lambda device: Subject(TorchOps(), device),
    "triton": triton_subject,
    "flashinfer": flashinfer_subject,
}
