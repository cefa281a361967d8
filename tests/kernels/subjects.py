"""The backends that the contract is checked on, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvplane_kernels.cudnn_ops.backend import CudnnOps
from kvplane_kernels.cudnn_ops.entry import CudnnEntry
from kvplane_kernels.cudnn_ops.rows import Limits
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops.backend import TritonOps
from tests.kernels import interpreter
from tests.kernels.contract import Subject
from tests.kernels.cudnn_twin import Library
from tests.kernels.formats import FORMATS

HALVES = tuple(form for form in FORMATS if form.name in ("float16", "bfloat16"))


def triton_subject(device: str) -> Subject:
    """The Triton backend in the interpreter, in a process with TRITON_INTERPRET=1."""
    if device == "cpu":
        assert interpreter.is_on(), "TRITON_INTERPRET=1 is not set"
        interpreter.quicken()
    return Subject(TritonOps(), device)


def cudnn_subject(device: str, room_bytes: int = 1 << 20) -> Subject:
    """The cuDNN backend on a GPU where cuDNN's frontend is installed; on a CPU a fake of cuDNN, and the rest by torch.

    Every row is long, some have several spans.
    """
    limits = Limits(products=1, pairs=1, shared=1, room_bytes=room_bytes)
    if device == "cpu":
        return Subject(CudnnOps(TorchOps(), Library(), limits), device, HALVES)
    assert not (why := CudnnEntry.unfit(torch.device(device))), why
    import cudnn

    return Subject(CudnnOps(TritonOps(), cudnn, limits), device, HALVES)


SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "torch": lambda device: Subject(TorchOps(), device),
    "triton": triton_subject,
    "cudnn": cudnn_subject,
}
