"""Recurrent states in float64, one token at a time, with magnitudes as in `float64`. No argument is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.kernels.float64 import Result

# From a state and its magnitude to those after a token, by the token's index.
Step = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a launch and blocks of their states; see `interface.StateRows`."""

    query_start: np.ndarray
    read_block: np.ndarray
    write_block: np.ndarray

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.write_block)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Parameters of a layer of Mamba-2; see `interface.StateWeights`."""

    conv_weight: np.ndarray
    conv_bias: np.ndarray
    a: np.ndarray
    d: np.ndarray


@dataclass(frozen=True, slots=True)
class States:
    """States that a launch writes, by block id."""

    conv: dict[int, np.ndarray]
    ssm: dict[int, Result]


def run(states: np.ndarray, rows: Rows, step: Step) -> tuple[list[Result], dict[int, Result]]:
    """Advance the states [num_blocks, ...]. Returns the state after each token, and those that are stored, by block."""
    after: list[Result] = []
    kept = {}
    for row, block in enumerate(rows.read_block):
        state = states[block] if block else np.zeros(states.shape[1:])
        bound = np.abs(state)
        for t in range(rows.query_start[row], rows.query_start[row + 1]):
            state, bound = step(state, bound, t)
            after.append(Result(state, bound))
            if rows.write_block[t]:
                kept[int(rows.write_block[t])] = after[-1]
    return after, kept


def state_step(
    pages: tuple[np.ndarray, np.ndarray], rows: Rows, x: np.ndarray, dt: np.ndarray, weights: Recurrence
) -> tuple[Result, States]:
    """Mamba-2: conv [num_blocks, channels, width - 1] and ssm [num_blocks, heads, head_size, state_size]."""
    conv, ssm = pages
    _, heads, head_size, state_size = ssm.shape
    u, last = convolve(conv, rows, x, weights.conv_weight, weights.conv_bias)
    inner = heads * head_size
    v, v_bound = (part[:, :inner].reshape(-1, heads, head_size) for part in (u.values, u.magnitude))
    (b, c), (b_bound, c_bound) = (np.split(part[:, inner:], [state_size], axis=1) for part in (u.values, u.magnitude))

    def step(state: np.ndarray, bound: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        decay, by = np.exp(dt[t] * weights.a)[:, None, None], dt[t][:, None, None]
        bound = decay * bound + by * v_bound[t][:, :, None] * b_bound[t]
        return decay * state + by * v[t][:, :, None] * b[t], bound

    after, kept = run(ssm, rows, step)
    y, y_magnitude = np.zeros_like(v), np.zeros_like(v)
    for t, one in enumerate(after):
        y[t] = one.values @ c[t] + weights.d[:, None] * v[t]
        y_magnitude[t] = one.magnitude @ c_bound[t] + np.abs(weights.d)[:, None] * v_bound[t]
    return Result(y, y_magnitude), States(last, kept)


def convolve(
    conv: np.ndarray, rows: Rows, x: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> tuple[Result, dict[int, np.ndarray]]:
    """Causal convolution with SiLU [tokens, channels], its magnitude, and the last inputs that are stored, by block."""
    total, bound, kept = np.zeros_like(x), np.zeros_like(x), {}
    for row, block in enumerate(rows.read_block):
        last = conv[block] if block else np.zeros(conv.shape[1:])
        for t in range(rows.query_start[row], rows.query_start[row + 1]):
            inputs = np.concatenate([last, x[t][:, None]], axis=1)
            total[t] = (inputs * weight).sum(axis=1) + bias
            bound[t] = (np.abs(inputs) * np.abs(weight)).sum(axis=1) + np.abs(bias)
            last = inputs[:, 1:]
            if rows.write_block[t]:
                kept[int(rows.write_block[t])] = last
    return Result(total / (1 + np.exp(-total)), bound), kept


def gated_delta_rule(states: np.ndarray, rows: Rows, tokens: dict[str, np.ndarray]) -> tuple[Result, dict[int, Result]]:
    """States [num_blocks, heads, value_size, key_size]; `tokens` has q, k, v, g and beta of `interface.DeltaInputs`.

    The magnitude of all elements of a row of a state is one number. A step multiplies a row's norm by at most `most`,
    and rounds v and S k, which are as large as they and the norm of the row say.
    """
    group = states.shape[1] // tokens["k"].shape[1]
    q, k = (np.repeat(tokens[name], group, axis=1) for name in ("q", "k"))
    v, beta, decay = tokens["v"], tokens["beta"], np.exp(tokens["g"])
    decay = decay[:, :, None, :] if decay.ndim == 3 else decay[:, :, None, None]

    def step(state: np.ndarray, bound: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        by = beta[t][:, None, None]
        state = decay[t] * state
        norm = np.linalg.norm(k[t], axis=-1)[:, None, None]
        most = decay[t].max(-1, keepdims=True) * np.maximum(1, np.abs(1 - by * norm**2))
        size = np.linalg.norm(state, axis=-1, keepdims=True)
        rounded = by * norm * (np.abs(v[t])[..., None] + norm * size)
        new = by * (v[t][..., None] - state @ k[t][..., None])
        return state + new * k[t][:, None], most * bound.max(-1, keepdims=True) + np.broadcast_to(rounded, state.shape)

    after, kept = run(states, rows, step)
    y, magnitude = np.zeros_like(v), np.zeros_like(v)
    for t, one in enumerate(after):
        y[t] = (one.values @ q[t][..., None])[..., 0]
        size = one.magnitude[..., 0] + np.linalg.norm(one.values, axis=-1)
        magnitude[t] = np.linalg.norm(q[t], axis=-1)[:, None] * size
    return Result(y, magnitude), kept


def selective_scan(
    states: np.ndarray, rows: Rows, tokens: dict[str, np.ndarray], a: np.ndarray, d: np.ndarray
) -> tuple[Result, dict[int, Result]]:
    """Mamba-1: states [num_blocks, channels, state_size]; `tokens` has x, dt, b and c of `interface.ScanInputs`."""
    x, dt, b, c = (tokens[name] for name in ("x", "dt", "b", "c"))

    def step(state: np.ndarray, bound: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        decay, added = np.exp(dt[t][:, None] * a), (dt[t] * x[t])[:, None] * b[t]
        return decay * state + added, decay * bound + np.abs(added)

    after, kept = run(states, rows, step)
    y, magnitude = np.zeros_like(x), np.zeros_like(x)
    for t, one in enumerate(after):
        y[t] = one.values @ c[t] + d * x[t]
        magnitude[t] = one.magnitude @ np.abs(c[t]) + np.abs(d * x[t])
    return Result(y, magnitude), kept
