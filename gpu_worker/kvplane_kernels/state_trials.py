"""Trials of recurrent states: rows of several chunks next to decodes, blocks that are read and written in one step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvplane_kernels.interface import (
    DeltaInputs,
    PagedOps,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
)
from kvplane_kernels.trial import Outcome, Source, Trial, bytes_of, ints

STATE_BLOCKS = 8
# Tokens of rows: a decode, two rows of several chunks of every kernel, drafts. A row reads the block that another one
# writes; a row writes a block twice.
STATE_LENGTHS, STATE_READS = (3, 1, 70, 139), (1, 2, 0, 4)
WRITTEN_STATES = {0: 2, 2: 3, 3: 1, 30: 5, 73: 4, 80: 6, 150: 7, 160: 7, 212: 5}


def state_trials(device: torch.device) -> list[Trial]:
    """Return a trial of each operation on states."""
    return [
        Trial("state_step", "float32", partial(stepped, device), 300),
        Trial("convolve", "float32", partial(convolved, device), 30),
        Trial("selective_scan", "float32", partial(scanned, device), 300),
        Trial("gated_delta_rule", "float32", partial(corrected, device, False), 300),
        Trial("gated_delta_rule", "float32, gates of keys", partial(corrected, device, True), 300),
    ]


def state_rows(source: Source) -> StateRows:
    """Return rows of `STATE_LENGTHS`."""
    write = torch.zeros(sum(STATE_LENGTHS))
    write[list(WRITTEN_STATES)] = torch.tensor(list(WRITTEN_STATES.values())).float()
    starts = torch.tensor((0, *STATE_LENGTHS)).cumsum(0)
    return StateRows(ints(source, starts), ints(source, STATE_READS), ints(source, write))


def states_of(source: Source, *shape: int) -> Tensor:
    """Return states of blocks; that of the null block is NaN."""
    states = source.normal(STATE_BLOCKS, *shape).to(source.device)
    states[0] = torch.nan
    return states


def outcome(result: Tensor, *states: Tensor) -> Outcome:
    """Return a result and then states, since both are compared with a tolerance; the null block is compared exactly."""
    after = torch.cat([part.flatten() for part in (result, *(state[1:] for state in states))])
    return Outcome(torch.cat([bytes_of(state[0].flatten()) for state in states]), after)


def stepped(device: torch.device, ops: PagedOps) -> Outcome:
    """Run a step of Mamba-2."""
    source, (heads, size, state, width) = Source.of(device, 6), (2, 8, 4, 4)
    channels, rows = heads * size + 2 * state, state_rows(source)
    pages = StatePages(states_of(source, channels, width - 1), states_of(source, heads, size, state))
    x, dt = source.normal(sum(STATE_LENGTHS), channels), source.normal(sum(STATE_LENGTHS), heads).exp()
    inputs = StateInputs(rows.query_start, rows.read_block, rows.write_block, x.to(device), dt.to(device))
    parts = (source.normal(channels, width), source.normal(channels), -source.normal(heads).exp(), source.normal(heads))
    y = ops.state_step(pages, inputs, StateWeights(*(part.to(device) for part in parts)))
    return outcome(y, pages.conv, pages.ssm)


def convolved(device: torch.device, ops: PagedOps) -> Outcome:
    """Run a convolution whose last inputs are stored by token."""
    source, (channels, width) = Source.of(device, 12), (24, 4)
    conv = states_of(source, width - 1, channels).mT
    x, weight = source.normal(sum(STATE_LENGTHS), channels), source.normal(channels, width)
    bias = source.normal(channels)
    u = ops.convolve(conv, state_rows(source), x.to(device), weight.to(device), bias.to(device))
    return outcome(u, conv)


def scanned(device: torch.device, ops: PagedOps) -> Outcome:
    """Run a selective scan."""
    source, (channels, size) = Source.of(device, 13), (40, 16)
    states, rows, count = states_of(source, channels, size), state_rows(source), sum(STATE_LENGTHS)
    dt = source.normal(count, channels).exp() * 0.2
    tokens = (source.normal(count, channels), dt, source.normal(count, size), source.normal(count, size))
    on_device = (part.to(device) for part in tokens)
    inputs = ScanInputs(rows.query_start, rows.read_block, rows.write_block, *on_device)
    a, d = -source.normal(channels, size).exp(), source.normal(channels)
    return outcome(ops.selective_scan(states, inputs, a.to(device), d.to(device)), states)


def corrected(device: torch.device, gates_of_keys: bool, ops: PagedOps) -> Outcome:
    """Run a gated delta rule, in which two heads share queries and keys of one; one gate of four forgets everything."""
    source, (heads, key_heads, value_size, key_size) = Source.of(device, 14), (4, 2, 24, 40)
    states, rows, count = states_of(source, heads, value_size, key_size), state_rows(source), sum(STATE_LENGTHS)
    q, k = (normalize(source.normal(count, key_heads, key_size), dim=2) for _ in range(2))
    v, beta = source.normal(count, heads, value_size), source.normal(count, heads)
    g = -0.2 * source.normal(count, heads, *[key_size] * gates_of_keys).exp()
    g[:, 1:] *= torch.where(source.normal(*g[:, 1:].shape) < -0.67, 1000, 1)
    on_device = (part.to(device) for part in (q, k, v, g, beta.sigmoid()))
    inputs = DeltaInputs(rows.query_start, rows.read_block, rows.write_block, *on_device)
    return outcome(ops.gated_delta_rule(states, inputs), states)
