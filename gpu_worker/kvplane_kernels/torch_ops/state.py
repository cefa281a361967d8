"""Steps of recurrent states: convolutions of all tokens at once, and recurrences, one token of every row at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvplane_kernels.interface import DeltaInputs, ScanInputs, StateInputs, StatePages, StateRows, StateWeights


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


# Advances the states of some rows in place by one token each, and returns their outputs.
Advance = Callable[[Tensor, Tensor], Tensor]


def step(pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
    """Advance each row's state over its tokens; for the shapes see `interface.StateOps.state_step`."""
    sums = sums_of(inputs.x)
    _, heads, head_size, state_size = pages.ssm.shape
    u = convolved(pages.conv, inputs, inputs.x, weights.conv_weight, weights.conv_bias)
    v = u[:, : heads * head_size].reshape(-1, heads, head_size)
    b, c = u[:, None, None, -2 * state_size : -state_size], u[:, None, -state_size:, None]
    dt = inputs.dt.to(sums)
    decay, dt_v = torch.exp(dt * weights.a.to(sums))[..., None, None], (dt[..., None] * v)[..., None]

    def advance(state: Tensor, tokens: Tensor) -> Tensor:
        state.mul_(decay[tokens]).addcmul_(dt_v[tokens], b[tokens])
        return (state @ c[tokens])[..., 0]

    return (scan(pages.ssm, inputs, sums, advance, v) + weights.d.to(sums)[:, None] * v).to(inputs.x.dtype)


def selective_scan(states: Tensor, inputs: ScanInputs, a: Tensor, d: Tensor) -> Tensor:
    """Advance the states of Mamba-1; for the shapes see `interface.StateOps.selective_scan`."""
    sums = sums_of(inputs.x)
    x, dt, b, c, a = (part.to(sums) for part in (inputs.x, inputs.dt, inputs.b, inputs.c, a))

    def advance(state: Tensor, tokens: Tensor) -> Tensor:
        state.mul_(torch.exp(dt[tokens, :, None] * a)).addcmul_((dt * x)[tokens, :, None], b[tokens, None])
        return (state @ c[tokens, :, None])[..., 0]

    return (scan(states, inputs, sums, advance, x) + d.to(sums) * x).to(inputs.x.dtype)


def gated_delta_rule(states: Tensor, inputs: DeltaInputs) -> Tensor:
    """Advance the states of the gated delta rule; for the shapes see `interface.StateOps.gated_delta_rule`."""
    sums, group = sums_of(inputs.v), states.shape[1] // inputs.k.shape[1]
    q, k = (part.to(sums).repeat_interleave(group, dim=1)[..., None] for part in (inputs.q, inputs.k))
    v, beta = inputs.v.to(sums)[..., None], inputs.beta.to(sums)[..., None, None]
    decay = (inputs.g[..., None, :] if inputs.g.dim() == 3 else inputs.g[..., None, None]).to(sums).exp()

    def advance(state: Tensor, tokens: Tensor) -> Tensor:
        state.mul_(decay[tokens])
        state.add_(beta[tokens] * (v[tokens] - state @ k[tokens]) @ k[tokens].mT)
        return (state @ q[tokens])[..., 0]

    return scan(states, inputs, sums, advance, v[..., 0]).to(inputs.v.dtype)


def convolve(conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return silu(conv(x)) and store the last inputs; for the shapes see `interface.StateOps.convolve`."""
    return convolved(conv, rows, x, weight, bias).to(x.dtype)


def convolved(conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the result of `convolve` in the type of sums."""
    sums = sums_of(x)
    history = histories(initial(conv, rows.read_block.long(), sums), rows, x.to(sums))
    schedule = Schedule.of(rows.query_start.tolist())
    kept = rows.write_block.tolist()
    for column in schedule.columns:
        tokens = schedule.tokens[column]
        keep(conv, history[index(tokens, conv), 1:].transpose(1, 2), [kept[token] for token in tokens])
    return silu((history * weight.to(sums).T).sum(1) + bias.to(sums))


def scan(states: Tensor, rows: StateRows, sums: torch.dtype, advance: Advance, like: Tensor) -> Tensor:
    """Advance the states of all rows, store them where rows say, and return the outputs, as many as `like` has."""
    schedule = Schedule.of(rows.query_start.tolist())
    blocks, order = rows.read_block.long(), index(schedule.tokens, states)
    state = initial(states, blocks[index(schedule.rows, states)], sums)
    kept, out = rows.write_block[order].tolist(), torch.empty_like(like)
    for column in schedule.columns:
        running = state[: column.stop - column.start]
        out[order[column]] = advance(running, order[column])
        keep(states, running, kept[column])
    return out


def sums_of(x: Tensor) -> torch.dtype:
    """Return the type in which sums are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def index(values: list[int], like: Tensor) -> Tensor:
    """Return the integers as an int64 index tensor on the device of `like`."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def initial(states: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return copies of the states in the given blocks, as the initial states of rows; zero states for block 0."""
    found = (blocks != 0).reshape(-1, *[1] * (states.dim() - 1))
    return torch.where(found, states[blocks].to(dtype), 0)


def histories(last: Tensor, rows: StateRows, x: Tensor) -> Tensor:
    """Return the inputs of the convolution, [tokens, width, channels]: each token after the width - 1 inputs before it.

    The earlier inputs come from the launch's tokens of the same row, or from the row's stored state. They are selected
    from

        known:  [row 0: width - 1 inputs before it][row 1: ...] ... [the launch's tokens]
    """
    count, channels, before = last.shape
    start = rows.query_start.long()
    row = torch.repeat_interleave(torch.arange(count, device=last.device), start.diff(), output_size=len(x))
    token = torch.arange(len(x), device=last.device)
    # Offset of each input from the row's first token; negative offsets are in the state.
    offset = (token - start[row])[:, None] + torch.arange(-before, 1, device=last.device)
    in_state = row[:, None] * before + offset + before
    in_launch = count * before + start[row][:, None] + offset
    known = torch.cat([last.transpose(1, 2).reshape(-1, channels), x])
    return known[torch.where(offset < 0, in_state, in_launch)]


def keep(states: Tensor, new: Tensor, targets: list[int]) -> None:
    """Write the new states [rows, ...] into the rows' blocks, except block 0."""
    if any(targets):
        rows = index([row for row, block in enumerate(targets) if block], states)
        states[index([block for block in targets if block], states)] = new[rows].to(states.dtype)
