"""Random cases of convolutions and of the recurrences that follow them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvplane_kernels.interface import DeltaInputs, ScanInputs, StateRows
from tests.kernels import float64_states
from tests.kernels.cases import Array
from tests.kernels.float64 import Result
from tests.kernels.formats import FLOAT32, FLOAT64, Format
from tests.kernels.memory import DeviceMemory, Memory, draw_page_bytes
from tests.kernels.state_cases import Rows, draw_rows, fill


@dataclass(frozen=True)
class StatePart:
    """The states of one layer in pages.

    Attributes:
        shape: shape of a state in memory.
        is_turned: whether the operation sees its last two axes exchanged.
    """

    memory: Memory
    layer: int
    shape: tuple[int, ...]
    form: Format
    is_turned: bool = False

    @classmethod
    def draw(cls, rng: np.random.Generator, rows: tuple[Rows, int], shape: tuple[int, ...], form: Format) -> StatePart:
        """Place states in pages, and draw those that rows read; all others are poison."""
        page_bytes, layer = draw_page_bytes(rng, -(-int(np.prod(shape)) * form.num_bytes // 8) * 8, FLOAT64)
        part = cls(Memory.draw(rng, rows[1], page_bytes), layer, shape, form)
        fill(rng, rows[0], part.bytes(), form)
        return part

    def bytes(self, memory: Memory | None = None) -> np.ndarray:
        """The bytes of the states [num_blocks, *shape], in place."""
        return (memory or self.memory).part(self.layer, 0, self.shape, self.form)

    def turned(self, states: np.ndarray) -> np.ndarray:
        return np.swapaxes(states, -1, -2) if self.is_turned else states

    @property
    def values(self) -> np.ndarray:
        """The states as the operation sees them."""
        return self.turned(self.form.decode(self.bytes()))

    def on(self, device: str) -> tuple[torch.Tensor, DeviceMemory]:
        memory = self.memory.on(device)
        states = memory.part(self.layer, 0, self.shape, self.form)
        return states.mT if self.is_turned else states, memory


@dataclass(frozen=True)
class ConvolutionCase:
    """Tokens of a launch, the pages with the last inputs, and weights."""

    conv: StatePart
    rows: Rows
    x: Array
    weight: Array
    bias: Array

    def expected(self) -> tuple[Result, dict[int, np.ndarray]]:
        arrays = (self.x.values, self.weight.values, self.bias.values)
        return float64_states.convolve(self.conv.values, self.rows, *arrays)

    def on(self, device: str) -> tuple[tuple[Any, ...], DeviceMemory]:
        """The arguments of the operation, and the memory of the states."""
        conv, memory = self.conv.on(device)
        x, weight, bias = (array.on(device) for array in (self.x, self.weight, self.bias))
        return (conv, StateRows(*self.rows.on(device)), x, weight, bias), memory


def convolve(rng: np.random.Generator, forms: tuple[Format, ...]) -> ConvolutionCase:
    """Draw a convolution, whose last inputs are stored by channel or by token."""
    form = draw_form(rng, forms)
    rows, num_blocks = draw_rows(rng)
    channels, width = int(rng.choice([1, 5, 16, 40, 300])), int(rng.choice([2, 3, 4, 4]))
    is_turned = bool(rng.random() < 0.5)
    shape = (width - 1, channels) if is_turned else (channels, width - 1)
    part = StatePart.draw(rng, (rows, num_blocks), shape, form)
    part = replace(part, is_turned=is_turned)
    of_weights = wider(rng, form)
    return ConvolutionCase(
        part,
        rows,
        Array.draw(rng, (rows.count, channels), form),
        plain(rng.standard_normal((channels, width)) * 0.7, of_weights),
        plain(rng.standard_normal(channels) * 0.3, of_weights),
    )


@dataclass(frozen=True)
class ScanCase:
    """Tokens of a launch, the pages with earlier states, and weights of a selective scan."""

    states: StatePart
    rows: Rows
    tokens: dict[str, Array]
    a: Array
    d: Array

    def expected(self) -> tuple[Result, dict[int, Result]]:
        tokens = {name: array.values for name, array in self.tokens.items()}
        return float64_states.selective_scan(self.states.values, self.rows, tokens, self.a.values, self.d.values)

    def on(self, device: str) -> tuple[tuple[Any, ...], DeviceMemory]:
        """The arguments of the operation, and the memory of the states."""
        states, memory = self.states.on(device)
        inputs = ScanInputs(*self.rows.on(device), **{name: array.on(device) for name, array in self.tokens.items()})
        return (states, inputs, self.a.on(device), self.d.on(device)), memory


def selective_scan(rng: np.random.Generator, forms: tuple[Format, ...]) -> ScanCase:
    """Draw a selective scan. States have the type of x or a wider one; float64 stays float64."""
    form = draw_form(rng, forms)
    rows, num_blocks = draw_rows(rng)
    channels, size = int(rng.choice([1, 7, 16, 64, 70])), int(rng.choice([1, 3, 8, 16, 16]))
    states = StatePart.draw(rng, (rows, num_blocks), (channels, size), wider(rng, form))
    dt = Array.draw(rng, (rows.count, channels), wider(rng, form))
    dt = Array(dt.form, dt.form.encode(np.exp(dt.values) * 0.5), dt.is_view)
    b, c = (Array.draw(rng, (rows.count, size), wider(rng, form)) for _ in range(2))
    of_weights = wider(rng, form)
    return ScanCase(
        states,
        rows,
        {"x": Array.draw(rng, (rows.count, channels), form), "dt": dt, "b": b, "c": c},
        plain(-np.exp(rng.standard_normal((channels, size))), of_weights),
        plain(rng.standard_normal(channels), of_weights),
    )


@dataclass(frozen=True)
class DeltaCase:
    """Tokens of a launch, and the pages with earlier states, of a gated delta rule."""

    states: StatePart
    rows: Rows
    tokens: dict[str, Array]

    def expected(self) -> tuple[Result, dict[int, Result]]:
        tokens = {name: array.values for name, array in self.tokens.items()}
        return float64_states.gated_delta_rule(self.states.values, self.rows, tokens)

    def on(self, device: str) -> tuple[tuple[Any, ...], DeviceMemory]:
        """The arguments of the operation, and the memory of the states."""
        states, memory = self.states.on(device)
        tokens = {name: array.on(device) for name, array in self.tokens.items()}
        return (states, DeltaInputs(*self.rows.on(device), **tokens)), memory


def gated_delta_rule(rng: np.random.Generator, forms: tuple[Format, ...]) -> DeltaCase:
    """Draw a gated delta rule, with a gate per head or per element of a key; with normalised keys and queries, which
    are sometimes all nearly the same.
    """
    form = draw_form(rng, forms)
    rows, num_blocks = draw_rows(rng)
    key_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 1, 2, 3]))
    heads, key_size = key_heads * group, int(rng.choice([3, 8, 16, 48]))
    value_size = int(rng.choice([4, 5, 16, 40]))
    states = StatePart.draw(rng, (rows, num_blocks), (heads, value_size, key_size), wider(rng, form))
    of_gates = wider(rng, form)
    q, k = rng.standard_normal((2, rows.count, key_heads, key_size))
    if rng.random() < 0.3:
        k = k[:1] + 0.1 * k
    q, k = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    g = -np.exp(rng.standard_normal((rows.count, heads, *[key_size][: rng.integers(0, 2)]))) * 0.3
    if rng.random() < 0.5:  # some gates forget everything
        strong = np.maximum(g * rng.choice([30.0, 300.0, 1e4]), -6e4)
        g = np.where(rng.random(g.shape) < rng.choice([0.1, 0.5, 0.9]), strong, g)
    beta = 2 / (1 + np.exp(-rng.standard_normal((rows.count, heads))))
    tokens = {
        "q": Array(form, form.encode(q), bool(rng.random() < 0.3)),
        "k": Array(form, form.encode(k), bool(rng.random() < 0.3)),
        "v": Array.draw(rng, (rows.count, heads, value_size), form),
        "g": Array(of_gates, of_gates.encode(g), bool(rng.random() < 0.3)),
        "beta": Array(of_gates, of_gates.encode(beta), bool(rng.random() < 0.3)),
    }
    return DeltaCase(states, rows, tokens)


def draw_form(rng: np.random.Generator, forms: tuple[Format, ...]) -> Format:
    wide = [form for form in forms if not form.is_8bit]
    return wide[int(rng.integers(0, len(wide)))]


def wider(rng: np.random.Generator, form: Format) -> Format:
    """The type of x, or float32."""
    return form if form is FLOAT64 or rng.random() < 0.5 else FLOAT32


def plain(values: np.ndarray, form: Format) -> Array:
    return Array(form, form.encode(values), is_view=False)
