"""The step of a recurrent state: token after token, all rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvplane_worker.ops.interface import StateInputs, StatePages, StateWeights


@dataclass(slots=True)
class State:
    """The running state of the rows, longest row first. `advance` moves the first ones on, in place.

    Attributes:
        last: [rows, channels, width - 1]; ssm: [rows, heads, head_size, state_size], both in the type of the sums.
    """

    last: Tensor
    ssm: Tensor

    def advance(self, x: Tensor, dt: Tensor, weights: StateWeights) -> Tensor:
        """One token x [n, channels], dt [n, heads] of the first n rows; returns y [n, heads, head_size]."""
        n, (_, heads, head_size, state_size) = x.shape[0], self.ssm.shape
        inputs = torch.cat([self.last[:n], x[:, :, None]], -1)
        self.last[:n] = inputs[..., 1:]
        u = silu((inputs * weights.conv_weight).sum(-1) + weights.conv_bias)
        v = u[:, : heads * head_size].reshape(n, heads, head_size)
        b, c = u[:, -2 * state_size : -state_size], u[:, -state_size:]
        decay = torch.exp(dt * weights.a)[:, :, None, None]
        self.ssm[:n] = decay * self.ssm[:n] + (dt[:, :, None] * v)[..., None] * b[:, None, None, :]
        y: Tensor = torch.einsum("nhds,ns->nhd", self.ssm[:n], c) + weights.d[:, None] * v
        return y


def step(pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
    """See `interface.StateOps.state_step`. Results do not depend on how a row's tokens are cut into launches."""
    sums = torch.float64 if inputs.x.dtype == torch.float64 else torch.float32
    x, dt, weights = inputs.x.to(sums), inputs.dt.to(sums), in_type(weights, sums)
    starts, write_block = inputs.query_start.tolist(), inputs.write_block.tolist()
    rows = longest_first(starts)
    state = initial(pages, inputs.read_block[torch.tensor(rows, dtype=torch.int64)], sums)
    y = x.new_empty((x.shape[0], *state.ssm.shape[1:3]))
    for tokens in columns(rows, starts):
        at = torch.tensor(tokens, device=x.device)
        y[at] = state.advance(x[at], dt[at], weights)
        keep(pages, state, [write_block[token] for token in tokens])
    return y.to(inputs.x.dtype)


def in_type(weights: StateWeights, dtype: torch.dtype) -> StateWeights:
    """The parameters in another type."""
    return StateWeights(
        weights.conv_weight.to(dtype), weights.conv_bias.to(dtype), weights.a.to(dtype), weights.d.to(dtype)
    )


def longest_first(starts: list[int]) -> list[int]:
    """Rows by falling number of tokens, so that the rows that still run are always the first."""
    return sorted(range(len(starts) - 1), key=lambda row: starts[row] - starts[row + 1])


def columns(rows: list[int], starts: list[int]) -> Iterator[list[int]]:
    """The first token of each row that has one, the second ones, ..."""
    index = 0
    while tokens := [starts[row] + index for row in rows if starts[row] + index < starts[row + 1]]:
        yield tokens
        index += 1


def initial(pages: StatePages, read_block: Tensor, dtype: torch.dtype) -> State:
    """Copies of the states that the rows start from: all reads are done here."""
    found = read_block.long()
    last = torch.where((found != 0)[:, None, None], pages.conv[found].to(dtype), 0)
    return State(last, torch.where((found != 0)[:, None, None, None], pages.ssm[found].to(dtype), 0))


def keep(pages: StatePages, state: State, blocks: list[int]) -> None:
    """Write the states of the first rows into their blocks, but for block 0."""
    kept = [row for row, block in enumerate(blocks) if block]
    if not kept:
        return
    rows, targets = torch.tensor([kept, [blocks[row] for row in kept]], device=pages.ssm.device)
    pages.conv[targets] = state.last[rows].to(pages.conv.dtype)
    pages.ssm[targets] = state.ssm[rows].to(pages.ssm.dtype)
