"""The backend and the memory with which the engine runs: any backend, and pages that another process allocated."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from kvplane.base.layer_spec import DType
from kvplane_kernels.interface import PagedOps
from kvplane_kernels.select import choose
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.memory import Memory, allocate_memory, open_memory
from kvplane_worker.memory.shared import CPU, SHM_FOLDER
from tests.engine.reference.config import ModelConfig

TORCH, CUDNN = "torch", "cudnn"
# Workspace of cuDNN for 192 tokens of the kinds of models in `stress`, so that long rows have two spans.
ROOM_BYTES = 12 << 10


def backend_of(name: str, device: str) -> PagedOps:
    """Return a backend: on a GPU chosen as a worker chooses it. Only tests use Triton on a CPU, in its interpreter, and
    cuDNN for every row it can compute (no row of a small model is long), on a CPU by its fake.
    """
    if name == TORCH:
        return TorchOps()
    if device != CPU and name != CUDNN:
        return choose(device, name).ops
    from tests.kernels.subjects import SUBJECTS, cudnn_subject

    return cudnn_subject(device, ROOM_BYTES).ops if name == CUDNN else SUBJECTS[name](device).ops


def suited(model: ModelConfig, backend: str) -> ModelConfig:
    """Return the model with elements that the backend's kernels support: float64 by PyTorch alone."""
    return model if backend == TORCH else replace(model, dtype=DType.FLOAT32)


def default_backend(device: str) -> str:
    """Return the backend that a device uses unless another one is given."""
    return TORCH if device == CPU else "triton"


@dataclass
class Lender:
    """Another process, which allocates pages on any device and lends them by handles, as a worker does."""

    connection: Connection
    mapped: list[Memory] = field(default_factory=list)

    def lend(self, device: str, size_bytes: int) -> Tensor:
        """Return zeroed memory of the other process, uint8 [size_bytes], mapped into this one."""
        self.connection.send((device, size_bytes))
        self.mapped.append(open_memory(self.connection.recv()))
        return self.mapped[-1].tensor()


@contextmanager
def lender() -> Iterator[Lender]:
    """Start the other process, and end it at the end. Its memory must not be used afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend_until_closed, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    made = Lender(ours)
    try:
        yield made
    finally:
        for memory in made.mapped:
            memory.close()
        ours.close()
        process.join()


def lend_until_closed(connection: Connection) -> None:
    """Allocate memory for each (device, bytes) that is asked for, until the other end closes the connection."""
    with tempfile.TemporaryDirectory(dir=SHM_FOLDER, prefix="kvplane-lender-") as folder, ExitStack() as stack:
        number = 0
        while True:
            try:
                device, size_bytes = connection.recv()
            except EOFError:
                return
            memory = allocate_memory(device, size_bytes, Path(folder) / str(number))
            stack.callback(memory.close)
            connection.send(memory.handle)
            number += 1


@dataclass(frozen=True)
class Place:
    """Where an engine runs.

    Attributes:
        device: device of pages and model; the dense model runs on the CPU.
        backend: name of the backend of operations on pages.
        lender: the process that allocates the pages; None = this process.
    """

    device: str = CPU
    backend: str = TORCH
    lender: Lender | None = None

    def allocate(self, size_bytes: int) -> Tensor:
        """Return memory for pages, in which every float is NaN."""
        if self.lender:
            return self.lender.lend(self.device, size_bytes).fill_(0xFF)
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device=self.device)
