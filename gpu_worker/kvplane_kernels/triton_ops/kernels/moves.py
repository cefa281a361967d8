"""Copies, zeroing and checksums of whole pages, as 32-bit words.

`layers` is an int64 table with a row per layer: address of block 0, bytes between blocks, words of a page, words before
the layer in a row of staging. A tile is PAGES pages of one layer by WORDS words. Of n programs, program p processes
tiles p, p + n, ..., so that a launch of few programs uses few multiprocessors. `sums` are int64, viewed as pairs of
int32: the low one is the sum modulo 2^32.

            staging row r:  | layer 0 of blocks[r] | layer 1 of blocks[r] | ...
    tile numbers ascend:      along a page, then along the layers, then to the next PAGES blocks
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels.numbers import mix_word

COPY = tl.constexpr(0)
GATHER = tl.constexpr(1)
SCATTER = tl.constexpr(2)
ZERO = tl.constexpr(3)
CHECKSUM = tl.constexpr(4)
CHECKED_GATHER = tl.constexpr(5)


@triton.jit
def word_pointers(layers, layer, blocks, columns):
    """Return pointers [pages, words] to words of pages. Pages are aligned to 16 bytes (`multiple_of`)."""
    base = tl.load(layers + layer * 4)
    stride_bytes = tl.load(layers + layer * 4 + 1)
    address = base + blocks.to(tl.int64) * stride_bytes
    page = tl.multiple_of(address[:, None].to(tl.pointer_type(tl.int32)), [16, 16])
    return page + columns[None, :]


@triton.jit
def staging_pointers(staging, layers, layer, rows, columns, row_words):
    """Return pointers [pages, words] into the rows of staging."""
    before = tl.multiple_of(tl.load(layers + layer * 4 + 3), 4)
    return staging + (rows.to(tl.int64) * row_words)[:, None] + (before + columns)[None, :]


@triton.jit
def sum_words(words, mask, places):
    """Return sums [pages], modulo 2^32, of the mixed words of a tile. `places` numbers the words of a block from 1."""
    mixed = mix_word(words.to(tl.uint32, bitcast=True) + (places.to(tl.uint32) * 0x9E3779B1)[None, :])
    return tl.sum(tl.where(mask, mixed.to(tl.int32, bitcast=True), 0), axis=1)


@triton.jit(do_not_specialize=["count", "num_layers", "chunks"])
def move_pages(
    layers,
    blocks,
    targets,
    staging,
    sums,
    count,
    row_words,
    num_layers,
    chunks,
    WHAT: tl.constexpr,
    PAGES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Carry out the operation WHAT for `count` blocks in every layer; `chunks` tiles of WORDS words cover the widest
    page.
    """
    tiles = tl.cdiv(count, PAGES) * num_layers * chunks
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        chunk = tile % chunks
        layer = (tile // chunks) % num_layers
        rows = (tile // (chunks * num_layers)) * PAGES + tl.arange(0, PAGES)
        columns = chunk * WORDS + tl.arange(0, WORDS)
        words = tl.multiple_of(tl.load(layers + layer * 4 + 2).to(tl.int32), 4)
        present = rows < count
        mask = present[:, None] & (columns < words)[None, :]
        block = tl.load(blocks + rows, mask=present, other=0)
        page = word_pointers(layers, layer, block, columns)
        if WHAT == COPY:
            target = tl.load(targets + rows, mask=present, other=0)
            tl.store(word_pointers(layers, layer, target, columns), tl.load(page, mask=mask), mask=mask)
        elif WHAT == ZERO:
            tl.store(page, tl.full([PAGES, WORDS], 0, tl.int32), mask=mask)
        elif WHAT == SCATTER:
            row = staging_pointers(staging, layers, layer, rows, columns, row_words)
            tl.store(page, tl.load(row, mask=mask), mask=mask)
        else:
            loaded = tl.load(page, mask=mask, other=0)
            if WHAT != CHECKSUM:
                row = staging_pointers(staging, layers, layer, rows, columns, row_words)
                tl.store(row, loaded, mask=mask)
            if WHAT != GATHER:
                before = tl.load(layers + layer * 4 + 3).to(tl.int32)
                part = sum_words(loaded, mask, before + columns + 1)
                tl.atomic_add(sums + rows * 2, part, mask=present, sem="relaxed")
