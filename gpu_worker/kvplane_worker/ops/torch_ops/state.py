"""Steps of recurrent states: the convolution of all tokens at once, then the recurrence, one token of every row at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvplane_worker.ops.interface import StateInputs, StatePages, StateWeights


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which tokens are processed: the first token of every row, then the second of every row that has one,
    ...

    Rows are sorted by descending length, so that the rows that still have tokens are always the first ones.

    Attributes:
        rows: row indices, by descending length.
        tokens: token indices in the order of processing, column by column; column i has the i-th token of each row.
        columns: slice of each column in `tokens`.
    """

    rows: list[int]
    tokens: list[int]
    columns: list[slice]

    @classmethod
    def of(cls, starts: list[int]) -> Schedule:
        """Return the schedule of rows whose tokens are [starts[r], starts[r + 1])."""
        rows = sorted(range(len(starts) - 1), key=lambda row: starts[row] - starts[row + 1])
        longest = starts[rows[0] + 1] - starts[rows[0]] if rows else 0
        tokens: list[int] = []
        columns = []
        for i in range(longest):
            begun = len(tokens)
            tokens += [starts[row] + i for row in rows if starts[row] + i < starts[row + 1]]
            columns.append(slice(begun, len(tokens)))
        return cls(rows, tokens, columns)


def step(pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
    """Advance each row's state over its tokens; for the shapes see `interface.StateOps.state_step`."""
    sums = torch.float64 if inputs.x.dtype == torch.float64 else torch.float32
    heads, head_size, state_size = pages.ssm.shape[1:]
    schedule = Schedule.of(inputs.query_start.tolist())
    blocks = inputs.read_block.long()
    order = index(schedule.tokens, blocks)
    history = histories(initial(pages.conv, blocks, sums), inputs, sums)[order]
    u = silu((history * weights.conv_weight.to(sums).T).sum(1) + weights.conv_bias.to(sums))
    v = u[:, : heads * head_size].reshape(-1, heads, head_size)
    b, c = u[:, None, None, -2 * state_size : -state_size], u[:, None, -state_size:, None]
    dt = inputs.dt[order].to(sums)
    decay, dt_v = torch.exp(dt * weights.a.to(sums))[..., None, None], (dt[..., None] * v)[..., None]
    state = initial(pages.ssm, blocks[index(schedule.rows, blocks)], sums)
    kept = inputs.write_block[order].tolist()
    y = weights.d.to(sums)[:, None] * v
    for column in schedule.columns:
        running = state[: column.stop - column.start]
        running.mul_(decay[column]).addcmul_(dt_v[column], b[column])
        y[column] += (running @ c[column])[..., 0]
        if any(kept[column]):
            keep(pages, running, history[column, 1:], kept[column])
    out = torch.empty_like(y, dtype=inputs.x.dtype)
    out[order] = y.to(out.dtype)
    return out


def index(values: list[int], like: Tensor) -> Tensor:
    """Return the integers as an int64 index tensor on the device of `like`."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def initial(states: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return copies of the states in the given blocks, as the initial states of rows; zero states for block 0."""
    found = (blocks != 0).reshape(-1, *[1] * (states.dim() - 1))
    return torch.where(found, states[blocks].to(dtype), 0)


def histories(last: Tensor, inputs: StateInputs, dtype: torch.dtype) -> Tensor:
    """Return the inputs of the convolution, [tokens, width, channels]: each token after the width - 1 inputs before it.

    The earlier inputs come from the launch's tokens of the same row, or from the row's stored state. They are selected
    from

        known:  [row 0: width - 1 inputs before it][row 1: ...] ... [the launch's tokens]
    """
    rows, channels, before = last.shape
    start = inputs.query_start.long()
    row = torch.repeat_interleave(torch.arange(rows, device=last.device), start.diff(), output_size=len(inputs.x))
    token = torch.arange(len(inputs.x), device=last.device)
    # Offset of each input from the row's first token; negative offsets are in the state.
    offset = (token - start[row])[:, None] + torch.arange(-before, 1, device=last.device)
    in_state = row[:, None] * before + offset + before
    in_launch = rows * before + start[row][:, None] + offset
    known = torch.cat([last.transpose(1, 2).reshape(-1, channels), inputs.x.to(dtype)])
    return known[torch.where(offset < 0, in_state, in_launch)]


def keep(pages: StatePages, state: Tensor, last: Tensor, targets: list[int]) -> None:
    """Write states [rows, ...] and last inputs [rows, width - 1, channels] into the rows' blocks, except block 0."""
    rows = index([row for row, block in enumerate(targets) if block], state)
    blocks = index([block for block in targets if block], state)
    pages.conv[blocks] = last[rows].transpose(1, 2).to(pages.conv.dtype)
    pages.ssm[blocks] = state[rows].to(pages.ssm.dtype)
