"""A trial, what it results in, and the random numbers and memory that trials use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane_kernels.interface import PagedOps

POISON = 0x7F  # a float whose bytes all have this value is NaN


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        memory: bytes that must be equal on all backends: pages, and integer results.
        out: floating-point result, compared with a tolerance; None if there is none.
    """

    memory: Tensor
    out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One case of one operation.

    Attributes:
        operation: name of the operation.
        name: what distinguishes the case from other cases of the operation.
        run: runs the case on new memory, with the same content each time.
        steps: largest allowed difference between two backends, in `torch.finfo.eps` of the result's type x (1 +
            |result|).
    """

    operation: str
    name: str
    run: Callable[[PagedOps], Outcome]
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """A source of random numbers. The numbers are computed on the host and copied to the device, so that they are equal
    on every device.
    """

    device: torch.device
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, seed: int) -> Source:
        """Return a source that starts from a seed."""
        return cls(device, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed numbers, float32 on the host."""
        return torch.randn(shape, generator=self.generator)

    def bytes(self, *shape: int) -> Tensor:
        """Return random bytes on the device."""
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator).to(self.device)

    def order(self, count: int) -> Tensor:
        """Return a random permutation of the numbers below `count`, on the host."""
        return torch.randperm(count, generator=self.generator)


def poisoned(source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor of NaN on the device, and a view of its bytes."""
    memory = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8, device=source.device)
    return memory.view(dtype), memory


def ints(source: Source, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Copy integers to the device."""
    return torch.as_tensor(values, dtype=dtype).to(source.device)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view as bytes, which masks and indices support for every element type."""
    return tensor.view(torch.uint8)
