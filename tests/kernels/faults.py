"""Typical faults of paged kernels, planted in a correct backend: the contract must catch each of them.

A fault replaces one operation: it gets the correct operation and the arguments, and changes the arguments, the result
or the pages.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvplane_kernels.interface import AttentionPages, Batch, GroupPages
from tests.kernels import state_faults
from tests.kernels.fault import FAULTS, plant

__all__ = ["FAULTS", "state_faults"]
ATTENTION = ("decode_attention", "prefill_attention")


def with_first_scale(pages: AttentionPages) -> AttentionPages:
    """The first head's scale for all heads."""
    if pages.k_scale is None or pages.v_scale is None:
        return pages
    return replace(pages, k_scale=pages.k_scale[:1], v_scale=pages.v_scale[:1])


# ---- writing


@plant("the last token is missed", "write_kv")
def _(original, pages, key, value, slots):
    original(pages, key[:-1], value[:-1], slots[:-1])


@plant("a skipped token goes to slot -1", "write_kv")
def _(original, pages, key, value, slots):
    original(pages, key, value, slots % (pages.k.shape[0] * pages.k.shape[1]))


@plant("a slot is taken for its neighbour", "write_kv")
def _(original, pages, key, value, slots):
    last = pages.k.shape[0] * pages.k.shape[1] - 1
    original(pages, key, value, torch.where(slots >= 0, (slots ^ 1).clamp(max=last), slots))


@plant("keys are written and values are not", "write_kv")
def _(original, pages, key, value, slots):
    before = pages.v.clone()
    original(pages, key, value, slots)
    pages.v.copy_(before)


@plant("the scale is multiplied with, not divided by", "write_kv")
def _(original, pages, key, value, slots):
    inverse = pages if pages.k_scale is None else replace(pages, k_scale=1 / pages.k_scale)
    original(inverse, key, value, slots)


@plant("the first head's scale is used for all", "write_kv")
def _(original, pages, key, value, slots):
    original(with_first_scale(pages), key, value, slots)


@plant("values beyond the range become NaN", "write_kv")
def _(original, pages, key, value, slots):
    original(pages, key, value, slots)
    if pages.v_scale is not None:
        stored = pages.v.view(torch.uint8)
        stored.copy_(torch.where(stored == 0x7E, 0x7F, stored))


@plant("fp8 is rounded towards zero", "write_kv")
def _(original, pages, key, value, slots):
    if pages.k_scale is None:
        return original(pages, key, value, slots)
    scale = pages.k_scale[:, None]
    near_bits = (key / scale).float().clamp(-448, 448).view(torch.int32) & ~0xFFFFF  # three bits of mantissa stay
    return original(pages, (near_bits.view(torch.float32) * scale).to(key.dtype), value, slots)


@plant("the last token is missed", "write_latent")
def _(original, pages, latent, slots):
    original(pages, latent[:-1], slots[:-1])


@plant("a skipped token goes to slot -1", "write_latent")
def _(original, pages, latent, slots):
    original(pages, latent, slots % (pages.rows.shape[0] * pages.rows.shape[1]))


@plant("the last element of a row is missed", "write_latent")
def _(original, pages, latent, slots):
    stored = pages.rows.view(torch.uint8)
    before = stored[..., -1].clone()
    original(pages, latent, slots)
    stored[..., -1] = before


@plant("the scale of latents is forgotten", "write_latent")
def _(original, pages, latent, slots):
    original(pages if pages.scale is None else replace(pages, scale=torch.ones(1)), latent, slots)


# ---- attention


@plant("the last token is missed", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=0)), rule, lse)


@plant("one token past the end is read", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    room = batch.block_table.shape[1] * pages.k.shape[1]
    longer = torch.where(batch.seq_lens > 0, (batch.seq_lens + 1).clamp(max=room), 0).int()
    return original(query, pages, replace(batch, seq_lens=longer), rule, lse)


@plant("the window is one too long", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, window=rule.window + 1 if rule.window else 0), lse)


@plant("the window is one too short", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, window=max(1, rule.window - 1) if rule.window else 0), lse)


@plant("the window ends at block edges", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    block_size = pages.k.shape[1]
    return original(query, pages, batch, replace(rule, window=-(-rule.window // block_size) * block_size), lse)


@plant("a chunk is taken for a window", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, window=rule.window or rule.chunk, chunk=0), lse)


@plant("the chunk is one too long", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, chunk=rule.chunk + 1 if rule.chunk else 0), lse)


@plant("sinks are ignored", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, sinks=None), lse)


@plant("a sink is scaled as logits are", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    sinks = None if rule.sinks is None else rule.sinks * rule.scale
    return original(query, pages, batch, replace(rule, sinks=sinks), lse)


@plant("logits are scaled a hundredth too much", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, scale=rule.scale * 1.01), lse)


@plant("the null block is read", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    """Replace null blocks in the table by a block with the bytes of their page."""
    spare = pages.k.shape[0] - 1
    pages = replace(pages, k=pages.k.clone(), v=pages.v.clone())
    pages.k[spare], pages.v[spare] = pages.k[0], pages.v[0]
    table = torch.where(batch.block_table == 0, spare, batch.block_table)
    return original(query, pages, replace(batch, block_table=table), rule, lse)


@plant("heads of a group are interleaved", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    kv_heads = pages.k.shape[2]
    order = torch.arange(query.shape[1], device=query.device).reshape(kv_heads, -1).T.flatten()
    sinks = None if rule.sinks is None else rule.sinks[order]
    out = original(query[:, order].contiguous(), pages, batch, replace(rule, sinks=sinks), lse)
    return out[:, torch.argsort(order)]


@plant("the first head's scale is used for all", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, with_first_scale(pages), batch, rule, lse)


@plant("the scale of values is forgotten", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    ones = None if pages.v_scale is None else torch.ones_like(pages.v_scale)
    return original(query, replace(pages, v_scale=ones), batch, rule, lse)


@plant("the last query's output is not written", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    out = torch.empty_like(original(query, pages, batch, rule, lse))
    if len(query) > 1:
        out[:-1] = original(query, pages, batch, rule, lse)[:-1]
    return out


@plant("an empty row is not written", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    out = original(query, pages, batch, rule, lse)
    return torch.where((out == 0).all(-1, keepdim=True), torch.empty_like(out), out)


@plant("a page is scribbled on", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    out = original(query, pages, batch, rule, lse)
    pages.v.view(torch.uint8)[-1, -1, -1, -1] ^= 1
    return out


@plant("log-sum-exps are not written", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, rule, None)


@plant("log-sum-exps are of base 2", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    out = original(query, pages, batch, rule, lse)
    if lse is not None:
        lse *= 1 / math.log(2)
    return out


@plant("logits are not capped", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, soft_cap=0.0), lse)


@plant("slopes are ignored", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, batch, replace(rule, slopes=None), lse)


@plant("the first head's slope is used for all", *ATTENTION)
def _(original, query, pages, batch, rule, lse):
    slopes = None if rule.slopes is None else rule.slopes[:1].expand(query.shape[1]).contiguous()
    return original(query, pages, batch, replace(rule, slopes=slopes), lse)


@plant("the tree of drafts is ignored", "prefill_attention")
def _(original, query, pages, batch, rule, lse):
    return original(query, pages, replace(batch, tree=None), rule, lse)


@plant("queries see the tokens after them", "prefill_attention")
def _(original, query, pages, batch, rule, lse):
    """Treat each query as the last one of its row."""
    counts = batch.query_start.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=query.device), counts)
    alone = Batch(batch.block_table[rows], batch.seq_lens[rows])
    return original(query, pages, alone, rule, lse)


@plant("the last token is missed", "mla_decode")
def _(original, query, pages, batch, scale, value_size, lse):
    return original(query, pages, replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=0)), scale, value_size, lse)


@plant("queries of a row see its last token", "mla_decode")
def _(original, query, pages, batch, scale, value_size, lse):
    if batch.query_start is None:
        return original(query, pages, batch, scale, value_size, lse)
    counts = batch.query_start.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=query.device), counts)
    alone = Batch(batch.block_table[rows], batch.seq_lens[rows])
    return original(query, pages, alone, scale, value_size, lse)


@plant("log-sum-exps are not written", "mla_decode")
def _(original, query, pages, batch, scale, value_size, lse):
    return original(query, pages, batch, scale, value_size, None)


@plant("only the values' part of a latent is multiplied with", "mla_decode")
def _(original, query, pages, batch, scale, value_size, lse):
    query = query.clone()
    query[..., value_size:] = 0
    return original(query, pages, batch, scale, value_size, lse)


@plant("values are the end of a latent", "mla_decode")
def _(original, query, pages, batch, scale, value_size, lse):
    return original(query, pages, batch, scale, pages.rows.shape[2], lse)[..., -value_size:]


@plant("the scale of latents is forgotten", "mla_decode")
def _(original, query, pages, batch, scale, value_size, lse):
    ones = None if pages.scale is None else torch.ones_like(pages.scale)
    return original(query, replace(pages, scale=ones), batch, scale, value_size, lse)


# ---- whole pages


@plant("all sources are read first", "copy_pages")
def _(original, group, src, dst):
    before = [layer.clone() for layer in group.layers]
    for layer, old in zip(group.layers, before, strict=True):
        for source, target in zip(src, dst, strict=True):
            layer[target] = old[source]


@plant("copies run from the last to the first", "copy_pages")
def _(original, group, src, dst):
    original(group, src[::-1], dst[::-1])


@plant("the last copy is missed", "copy_pages")
def _(original, group, src, dst):
    original(group, src[:-1], dst[:-1])


@plant("source and target are exchanged", "copy_pages")
def _(original, group, src, dst):
    for layer in group.layers:
        for source, target in zip(src, dst, strict=True):
            layer[source] = layer[target]


@plant("copies run twice", "copy_pages")
def _(original, group, src, dst):
    original(group, src, dst)
    original(group, src, dst)


@plant("the last layer is missed", "copy_pages", "zero_pages")
def _(original, group, *blocks):
    if len(group.layers) > 1:
        original(GroupPages(group.layers[:-1]), *blocks)


@plant("the last layer is missed", "gather", "scatter")
def _(original, group, blocks, staging):
    if len(group.layers) > 1:
        original(GroupPages(group.layers[:-1]), blocks, staging[:, : -group.layers[-1].shape[1]])


@plant("the last block is missed", "zero_pages")
def _(original, group, blocks):
    original(group, blocks[:-1])


@plant("the last byte of a page is missed", "zero_pages")
def _(original, group, blocks):
    original(GroupPages(tuple(layer[:, :-1] for layer in group.layers)), blocks)


@plant("the block after is zeroed too", "zero_pages")
def _(original, group, blocks):
    original(group, [*blocks, *(min(block + 1, group.layers[0].shape[0] - 1) for block in blocks)])


@plant("the last block is missed", "gather", "scatter")
def _(original, group, blocks, staging):
    original(group, blocks[:-1], staging[: len(blocks[:-1])])


@plant("blocks go in order of their ids", "gather", "scatter")
def _(original, group, blocks, staging):
    original(group, sorted(blocks), staging)


@plant("layers go in the other order", "gather", "scatter")
def _(original, group, blocks, staging):
    original(GroupPages(group.layers[::-1]), blocks, staging)


@plant("layers go in the other order", "checksum")
def _(original, group, blocks):
    return original(GroupPages(group.layers[::-1]), blocks)


@plant("the last word is left out", "checksum")
def _(original, group, blocks):
    return original(GroupPages((*group.layers[:-1], group.layers[-1][:, :-4])), blocks)


@plant("each layer is summed by itself", "checksum")
def _(original, group, blocks):
    """Restart word positions with each layer."""
    return sum(original(GroupPages((layer,)), blocks) for layer in group.layers) % 2**32


@plant("sums are signed", "checksum")
def _(original, group, blocks):
    return original(group, blocks).int().long()
