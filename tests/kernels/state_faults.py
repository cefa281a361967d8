"""Typical faults of operations on recurrent states; see `faults`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvplane_kernels.interface import StateRows
from tests.kernels.fault import plant

# Their arguments are states, rows (with the tokens, except of a convolution), and others.
OPERATIONS = ("state_step", "convolve", "selective_scan", "gated_delta_rule")


def tensors(states: Any) -> list[Tensor]:
    """The tensors of pages."""
    return [states] if isinstance(states, Tensor) else [states.conv, states.ssm]


def alone(rows: StateRows, row: int) -> tuple[StateRows, slice]:
    """One row with its tokens, and which tokens these are."""
    start, end = rows.query_start[row : row + 2]
    tokens = slice(int(start), int(end))
    changes = {one.name: getattr(rows, one.name)[tokens] for one in fields(rows)}
    changes |= {"query_start": torch.stack([start - start, end - start]), "read_block": rows.read_block[row : row + 1]}
    return replace(rows, **changes), tokens


@plant("the state before is not read", *OPERATIONS)
def _(original, states, rows, *others):
    return original(states, replace(rows, read_block=torch.zeros_like(rows.read_block)), *others)


@plant("the null block's state is read", *OPERATIONS)
def _(original, states, rows, *others):
    for part in tensors(states):
        part[-1] = part[0]
    read = torch.where(rows.read_block == 0, len(tensors(states)[0]) - 1, rows.read_block)
    return original(states, replace(rows, read_block=read), *others)


@plant("rows write before later rows read", *OPERATIONS)
def _(original, states, rows, *others):
    results = []
    for row in range(len(rows.read_block)):
        part, tokens = alone(rows, row)
        moved = (others[0][tokens], *others[1:]) if type(rows) is StateRows else others
        results.append(original(states, part, *moved))
    return torch.cat(results)


@plant("the state after a row's last token is not kept", *OPERATIONS)
def _(original, states, rows, *others):
    write = rows.write_block.clone()
    write[(rows.query_start[1:] - 1).clamp(min=0).long()[: len(write)]] = 0
    return original(states, replace(rows, write_block=write), *others)


@plant("a page that a row names again keeps the first state", *OPERATIONS)
def _(original, states, rows, *others):
    named = rows.write_block.tolist()
    write = [0 if block in named[:i] else block for i, block in enumerate(named)]
    return original(states, replace(rows, write_block=torch.tensor(write).to(rows.write_block)), *others)


@plant("the state after the token before is kept", *OPERATIONS)
def _(original, states, rows, *others):
    starts = rows.query_start[:-1].long()
    write = torch.cat([rows.write_block[1:], rows.write_block[:1] * 0])
    write[(starts[1:] - 1).clamp(min=0)[: len(write)]] = 0
    return original(states, replace(rows, write_block=write), *others)


@plant("the convolution's inputs are not kept", "state_step")
def _(original, pages, inputs, weights):
    before = pages.conv.clone()
    y = original(pages, inputs, weights)
    pages.conv.copy_(before)
    return y


@plant("B and C are exchanged", "state_step")
def _(original, pages, inputs, weights):
    n = pages.ssm.shape[3]
    order = torch.arange(inputs.x.shape[1], device=inputs.x.device)
    order = torch.cat([order[: -2 * n], order[-n:], order[-2 * n : -n]])
    exchanged = replace(weights, conv_weight=weights.conv_weight[order], conv_bias=weights.conv_bias[order])
    views = replace(pages, conv=pages.conv[:, order])
    y = original(views, replace(inputs, x=inputs.x[:, order]), exchanged)
    pages.conv[:, order] = views.conv
    return y


@plant("the input's own part is left out", "state_step")
def _(original, pages, inputs, weights):
    return original(pages, inputs, replace(weights, d=torch.zeros_like(weights.d)))


@plant("the bias is left out", "convolve")
def _(original, conv, rows, x, weight, bias):
    return original(conv, rows, x, weight, torch.zeros_like(bias))


@plant("the newest input has the oldest one's weight", "convolve")
def _(original, conv, rows, x, weight, bias):
    return original(conv, rows, x, weight.flip(1), bias)


@plant("B and C are exchanged", "selective_scan")
def _(original, states, inputs, a, d):
    return original(states, replace(inputs, b=inputs.c, c=inputs.b), a, d)


@plant("the input's own part is left out", "selective_scan")
def _(original, states, inputs, a, d):
    return original(states, inputs, a, torch.zeros_like(d))


@plant("all elements of a state decay as the first one", "selective_scan")
def _(original, states, inputs, a, d):
    return original(states, inputs, a[:, :1].expand_as(a), d)


@plant("the time step is not applied to the input", "selective_scan")
def _(original, states, inputs, a, d):
    return original(states, replace(inputs, b=inputs.b / inputs.dt[:, :1].to(inputs.b)), a, d)


@plant("nothing is taken from the state before a value is added", "gated_delta_rule")
def _(original, states, inputs):
    """Linear attention with a gate: the delta rule with k that are orthogonal, one per call."""
    results = []
    for token in range(len(inputs.v)):
        part = replace(
            inputs, beta=inputs.beta * (torch.arange(len(inputs.v), device=inputs.v.device) == token)[:, None]
        )
        results.append(original(states.clone(), part))
    original(states, inputs)
    return torch.stack(results).sum(0) if results else torch.empty_like(inputs.v)


@plant("every head has the first one's queries and keys", "gated_delta_rule")
def _(original, states, inputs):
    return original(states, replace(inputs, q=inputs.q[:, :1], k=inputs.k[:, :1]))


@plant("heads with shared keys are not next to each other", "gated_delta_rule")
def _(original, states, inputs):
    group = inputs.v.shape[1] // inputs.k.shape[1]
    return original(states, replace(inputs, q=inputs.q.repeat(1, group, 1), k=inputs.k.repeat(1, group, 1)))


@plant("the gate is left out", "gated_delta_rule")
def _(original, states, inputs):
    return original(states, replace(inputs, g=torch.zeros_like(inputs.g)))


@plant("all elements of a key have the first one's gate", "gated_delta_rule")
def _(original, states, inputs):
    return original(states, replace(inputs, g=inputs.g[..., :1].expand_as(inputs.g)) if inputs.g.dim() == 3 else inputs)


@plant("elements of a key have each other's gates", "gated_delta_rule")
def _(original, states, inputs):
    return original(states, replace(inputs, g=inputs.g.flip(2)) if inputs.g.dim() == 3 else inputs)


@plant("a gate that forgets everything is limited", "gated_delta_rule")
def _(original, states, inputs):
    return original(states, replace(inputs, g=inputs.g.clamp(min=-5)))


@plant("a weak gate after strong ones loses its digits", "gated_delta_rule")
def _(original, states, inputs):
    total = inputs.g.cumsum(0)
    return original(states, replace(inputs, g=torch.diff(total, dim=0, prepend=total[:1] * 0).clamp(max=0)))


@plant("the state decays after the value was added", "gated_delta_rule")
def _(original, states, inputs):
    later = torch.cat([inputs.g[1:], inputs.g[:1]])
    return original(states, replace(inputs, g=later))


@plant("queries and keys are exchanged", "gated_delta_rule")
def _(original, states, inputs):
    return original(states, replace(inputs, q=inputs.k, k=inputs.q))
