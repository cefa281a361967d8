"""The backends that the contract is run against, by name."""

from __future__ import annotations

from collections.abc import Callable

from kvplane_worker.ops.torch_ops import TorchOps
from tests.ops.contract import Subject

SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "torch": lambda device: Subject(TorchOps(), device),
}
