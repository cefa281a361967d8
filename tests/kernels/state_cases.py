"""Random cases of state steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvplane_kernels.interface import StateInputs, StatePages, StateWeights
from tests.kernels import float64_states
from tests.kernels.cases import Array, ints
from tests.kernels.float64 import Result
from tests.kernels.formats import FLOAT32, FLOAT64, Format
from tests.kernels.memory import DeviceMemory, Memory, draw_page_bytes


@dataclass(frozen=True)
class StateShape:
    """Elements of one layer's state, and their types."""

    heads: int
    head_size: int
    state_size: int
    width: int
    conv_form: Format
    ssm_form: Format

    @property
    def channels(self) -> int:
        return self.heads * self.head_size + 2 * self.state_size

    @property
    def conv(self) -> tuple[int, int]:
        return (self.channels, self.width - 1)

    @property
    def ssm(self) -> tuple[int, int, int]:
        return (self.heads, self.head_size, self.state_size)

    @property
    def ssm_start(self) -> int:
        """Byte of a page at which the ssm state begins: after the convolution's, at a multiple of 8."""
        return -(-self.channels * (self.width - 1) * self.conv_form.num_bytes // 8) * 8

    @property
    def page_bytes(self) -> int:
        size = self.ssm_start + self.heads * self.head_size * self.state_size * self.ssm_form.num_bytes
        return -(-size // 8) * 8


@dataclass(frozen=True, slots=True)
class Rows(float64_states.Rows):
    """Rows of a launch and blocks of their states."""

    def on(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ints(self.query_start, device), ints(self.read_block, device), ints(self.write_block, device)


@dataclass(frozen=True)
class StateCase:
    """Tokens of a launch, the pages with earlier states, and a layer's parameters."""

    shape: StateShape
    memory: Memory
    layer: int
    rows: Rows
    x: Array
    dt: Array
    weights: dict[str, Array]

    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the convolution's and of the ssm states [num_blocks, ...], in place."""
        shape = self.shape
        conv = self.memory.part(self.layer, 0, shape.conv, shape.conv_form)
        return conv, self.memory.part(self.layer, shape.ssm_start, shape.ssm, shape.ssm_form)

    def expected(self) -> tuple[Result, float64_states.States]:
        conv, ssm = self.parts()
        weights = float64_states.Recurrence(**{name: array.values for name, array in self.weights.items()})
        pages = self.shape.conv_form.decode(conv), self.shape.ssm_form.decode(ssm)
        return float64_states.state_step(pages, self.rows, self.x.values, self.dt.values, weights)

    def on(self, device: str) -> tuple[StatePages, StateInputs, StateWeights, DeviceMemory]:
        shape, memory = self.shape, self.memory.on(device)
        conv = memory.part(self.layer, 0, shape.conv, shape.conv_form)
        pages = StatePages(conv, memory.part(self.layer, shape.ssm_start, shape.ssm, shape.ssm_form))
        inputs = StateInputs(*self.rows.on(device), self.x.on(device), self.dt.on(device))
        weights = StateWeights(**{name: array.on(device) for name, array in self.weights.items()})
        return pages, inputs, weights, memory


def draw_shape(rng: np.random.Generator, forms: tuple[Format, ...]) -> tuple[StateShape, Format]:
    """Draw sizes and types. States have the type of x or a wider one; float64 stays float64."""
    wide = [f for f in forms if not f.is_8bit]
    form = wide[int(rng.integers(0, len(wide)))]
    ssm_form = form if form is FLOAT64 or rng.random() < 0.5 else FLOAT32
    return StateShape(
        heads=int(rng.choice([1, 2, 3, 4, 8])),
        head_size=int(rng.choice([4, 5, 8, 16, 32, 64])),
        state_size=int(rng.choice([3, 8, 16, 16, 32, 64])),
        width=int(rng.choice([2, 3, 4, 4])),
        conv_form=form,
        ssm_form=ssm_form,
    ), form


def state_step(rng: np.random.Generator, forms: tuple[Format, ...]) -> StateCase:
    """Draw rows that start from zero or from a page, and store no state, the last one, or one per block of tokens."""
    shape, form = draw_shape(rng, forms)
    rows, num_blocks = draw_rows(rng)
    page_bytes, layer = draw_page_bytes(rng, shape.page_bytes, FLOAT64)
    memory = Memory.draw(rng, num_blocks, page_bytes)
    weights = draw_weights(rng, shape, FLOAT64 if form is FLOAT64 else FLOAT32 if rng.random() < 0.5 else form)
    total = rows.count
    dt = Array.draw(rng, (total, shape.heads), form if rng.random() < 0.5 or form is FLOAT64 else FLOAT32)
    steps = np.exp(dt.values) * 0.5
    if rng.random() < 0.3:  # some tokens forget everything, others nearly nothing
        steps = np.where(rng.random(steps.shape) < 0.5, steps, steps * 1e-3)
        weights["a"] = Array(weights["a"].form, weights["a"].form.encode(weights["a"].values * 1e3), is_view=False)
    dt = Array(dt.form, dt.form.encode(steps), dt.is_view)
    x = Array.draw(rng, (total, shape.channels), form)
    case = StateCase(shape, memory, layer, rows, x, dt, weights)
    for part, part_form in zip(case.parts(), (shape.conv_form, shape.ssm_form), strict=True):
        fill(rng, rows, part, part_form)
    return case


def draw_rows(rng: np.random.Generator) -> tuple[Rows, int]:
    """Draw rows, and the number of blocks of the pool."""
    count = int(rng.integers(1, 6))
    lengths = [int(rng.choice([0, 1, 1, int(rng.integers(1, 6)), int(rng.integers(1, 20))])) for _ in range(count)]
    num_blocks = 2 + 4 * count
    blocks = rng.permutation(np.arange(1, num_blocks))
    sources = blocks[:count] if rng.random() < 0.7 else rng.choice(blocks[:count], count)
    reads = np.where(rng.random(count) < 0.3, 0, sources)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Rows(starts, reads, draw_writes(rng, lengths, blocks)), num_blocks


def fill(rng: np.random.Generator, rows: Rows, part: np.ndarray, form: Format) -> None:
    """Draw the states, bytes [num_blocks, ...], that rows read."""
    named = rows.read_block[rows.read_block > 0]
    values = rng.standard_normal((len(named), *part.shape[1:-1], part.shape[-1] // form.num_bytes))
    part[named] = form.encode(values)


def draw_writes(rng: np.random.Generator, lengths: list[int], blocks: np.ndarray) -> np.ndarray:
    """Draw the block that receives the state after each token. Rows read from blocks[:rows]; a row may write to its own
    block, to its neighbour's (all reads come first), and to up to three more blocks.
    """
    rows, turn = len(lengths), int(rng.integers(0, 2))
    writes = []
    for row, length in enumerate(lengths):
        own = [blocks[(row + turn) % rows], *blocks[rows + 3 * row : rows + 3 * row + 3]]
        every = int(rng.integers(1, 6))
        named = [own[t // every] if t // every < len(own) and rng.random() < 0.6 else 0 for t in range(length)]
        if length and rng.random() < 0.8:
            named[-1] = own[min((length - 1) // every, len(own) - 1)]
        writes.extend(named)
    return np.array(writes, np.int64)


def draw_weights(rng: np.random.Generator, shape: StateShape, form: Format) -> dict[str, Array]:
    def plain(values: np.ndarray) -> Array:
        return Array(form, form.encode(values), is_view=False)

    return {
        "conv_weight": plain(rng.standard_normal((shape.channels, shape.width)) * 0.7),
        "conv_bias": plain(rng.standard_normal(shape.channels) * 0.3),
        "a": plain(-np.exp(rng.standard_normal(shape.heads))),
        "d": plain(rng.standard_normal(shape.heads)),
    }


def on_cpu(tensor: torch.Tensor, form: Format) -> np.ndarray:
    """A result as float64."""
    raw = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return form.decode(raw).reshape(tensor.shape)
