"""The backends that the contract is run against, by name."""

from __future__ import annotations

from collections.abc import Callable

from kvplane_worker.ops.torch_ops import TorchOps
from kvplane_worker.ops.triton_ops.backend import TritonOps
from tests.ops import interpreter
from tests.ops.contract import Subject


def triton_subject(device: str) -> Subject:
    """On the CPU in the interpreter, in a process that was started with TRITON_INTERPRET=1."""
    if device == "cpu":
        assert interpreter.is_on(), "TRITON_INTERPRET=1 is not set"
        interpreter.quicken()
    return Subject(TritonOps(), device)


SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "torch": lambda device: Subject(TorchOps(), device),
    "triton": triton_subject,
}
