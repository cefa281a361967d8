"""Trials: small cases of every operation, equal on every machine, for the start check of a backend.

They contain rows without tokens, with one token, up to a block boundary and past it; shared prefixes; and blocks that
left the window. Slots that must not be read contain NaN. Slots that are written but not attended to contain large
values, so that reading such a slot makes the comparison fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    GroupPages,
    HostTables,
    LatentPages,
    PagedOps,
)
from kvplane_kernels.state_trials import state_trials
from kvplane_kernels.trial import Outcome, Source, Trial, bytes_of, ints, poisoned

FP8, FP8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK_SIZE, COLUMNS = 16, 6
KV_HEADS, Q_HEADS = 2, 4
LENGTHS = (0, 1, 16, 75, 33, 90)
QUERIES = (2, 1, 16, 30, 0, 5)
NUM_BLOCKS = len(LENGTHS) * COLUMNS + 4
OUTLIER = 40.0


def trials(device: torch.device) -> tuple[Trial, ...]:
    """Return all trials, cheap ones first."""
    groups = (page_trials, write_trials, state_trials, attention_trials, latent_trials, long_trials)
    return tuple(trial for group in groups for trial in group(device))


# ---- attention


@dataclass(frozen=True, slots=True)
class Form:
    """One variant of attention.

    Attributes:
        pages, query: element types; 8-bit pages have scales.
        size: elements of a head.
        rule: window or chunk, and scale.
        steps: see `Trial`.
        has_sinks: whether the rule has sinks.
        has_hole: whether the second block of a row is the null block.
    """

    pages: torch.dtype
    query: torch.dtype
    size: int
    rule: AttentionRule
    steps: float
    has_sinks: bool = False
    has_hole: bool = False

    @property
    def name(self) -> str:
        """The variant's name: element type, rule and special features."""
        parts = [str(self.pages).removeprefix("torch.")]
        parts += [
            f"{what} {tokens}" for what, tokens in (("window", self.rule.window), ("chunk", self.rule.chunk)) if tokens
        ]
        return ", ".join(parts + ["sinks"] * self.has_sinks + ["a null block"] * self.has_hole)


# Both sides sum in float32, then round weights and results; with 8-bit pages also scaled values.
FORMS = (
    Form(torch.bfloat16, torch.bfloat16, 128, AttentionRule(0.25, window=20), steps=2.5),
    Form(torch.float16, torch.float16, 128, AttentionRule(0.25), steps=2.5),
    Form(torch.float16, torch.float16, 64, AttentionRule(0.3, chunk=24), steps=2.5, has_sinks=True),
    Form(FP8, torch.bfloat16, 64, AttentionRule(0.1), steps=4, has_sinks=True, has_hole=True),
    Form(FP8_WIDE, torch.bfloat16, 128, AttentionRule(0.1, window=20), steps=4),
)


def attention_trials(device: torch.device) -> list[Trial]:
    """Return a decode trial and a prefill trial of each variant."""
    decode = [Trial("decode_attention", form.name, partial(decoded, device, form), form.steps) for form in FORMS]
    return decode + [
        Trial("prefill_attention", form.name, partial(prefilled, device, form), form.steps) for form in FORMS
    ]


def decoded(device: torch.device, form: Form, ops: PagedOps) -> Outcome:
    """Run a decode: one query per row."""
    source = Source.of(device, 1)
    pages, memory, batch = pages_and_batch(source, form, (1,) * len(LENGTHS))
    query = (2 * source.normal(len(LENGTHS), Q_HEADS, form.size)).to(form.query).to(device)
    return Outcome(memory, ops.decode_attention(query, pages, batch, with_sinks(source, form)))


def prefilled(device: torch.device, form: Form, ops: PagedOps) -> Outcome:
    """Run a prefill whose rows have the numbers of queries in `QUERIES`."""
    source = Source.of(device, 2)
    pages, memory, batch = pages_and_batch(source, form, QUERIES)
    query = (2 * source.normal(sum(QUERIES), Q_HEADS, form.size)).to(form.query).to(device)
    starts = torch.tensor((0, *QUERIES)).cumsum(0)
    batch = replace(batch, query_start=ints(source, starts))
    return Outcome(memory, ops.prefill_attention(query, pages, batch, with_sinks(source, form)))


def with_sinks(source: Source, form: Form) -> AttentionRule:
    """Return the attention rule of a variant, with sinks on the device if the variant has sinks."""
    return replace(form.rule, sinks=2 * source.normal(Q_HEADS).to(source.device)) if form.has_sinks else form.rule


def pages_and_batch(source: Source, form: Form, queries: tuple[int, ...]) -> tuple[AttentionPages, Tensor, Batch]:
    """Return pages that contain only the tokens of the rows, the bytes of these pages, and the batch."""
    table = block_table(source, form, queries)
    room, memory = poisoned(source, (NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, form.size), form.pages)
    written, attended = slots_of(table, form.rule, queries)
    scales = [torch.tensor(scale) if form.pages.itemsize == 1 else None for scale in ([0.5, 0.25], [0.25, 1.0])]
    for part, scale in enumerate(scales):
        values = source.normal(int(written.sum()), KV_HEADS, form.size)
        if part == 1:
            values[~attended[written]] = OUTLIER
        stored = (values if scale is None else values / scale[:, None]).to(form.pages)
        bytes_of(room[:, part])[written.to(source.device)] = bytes_of(stored).to(source.device)
    on_device = [None if scale is None else scale.to(source.device) for scale in scales]
    batch = Batch(ints(source, table), ints(source, LENGTHS))
    return AttentionPages(room[:, 0], room[:, 1], *on_device), memory, batch


def block_table(source: Source, form: Form, queries: tuple[int, ...]) -> Tensor:
    """Return the block table of the rows, on the host.

    The last row shares a prefix with the fourth, and has lost the blocks before its window.
    """
    table = (source.order(NUM_BLOCKS - 2)[: len(LENGTHS) * COLUMNS] + 1).view(len(LENGTHS), COLUMNS)
    table[5, :3] = table[3, :3]
    if form.has_hole:
        table[3, 1] = 0
    table[5, : first_attended(form.rule, LENGTHS[5] - queries[5]) // BLOCK_SIZE] = 0
    return table


def first_attended(rule: AttentionRule, position: int) -> int:
    """Return the position of the earliest token that a query at `position` attends to."""
    if rule.chunk:
        return position // rule.chunk * rule.chunk
    return max(0, position - rule.window + 1) if rule.window else 0


def slots_of(table: Tensor, rule: AttentionRule, queries: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return which slots contain a token, and to which of these slots a query attends: bool [blocks, block_size] on the
    host.
    """
    written, attended = (torch.zeros((NUM_BLOCKS, BLOCK_SIZE), dtype=torch.bool) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        at = torch.arange(length)
        block, offset = table[row, at // BLOCK_SIZE], at % BLOCK_SIZE
        written[block, offset] = True
        first = first_attended(rule, length - queries[row]) if queries[row] and length else length
        attended[block[first:], offset[first:]] = True
    written[0] = False
    return written, attended


# ---- rows with many queries, which a backend may compute by other means than the others

LONG_HEADS, LONG_GROUP, LONG_SIZE = 8, 8, 64
LONG_ROWS = ((3, 1), (1141, 262), (90, 1))  # lengths, and numbers of queries
LONG_WINDOW = 1016


def long_trials(device: torch.device) -> list[Trial]:
    """Return trials of a prompt between decodes."""
    rules = {"a long row": AttentionRule(0.25), "a long row, window": AttentionRule(0.25, window=LONG_WINDOW)}
    return [Trial("prefill_attention", name, partial(prompts, device, rule), 2.5) for name, rule in rules.items()]


def prompts(device: torch.device, rule: AttentionRule, ops: PagedOps) -> Outcome:
    """Run a prefill with a long row; unused slots contain NaN."""
    source, columns = Source.of(device, 6), -(-max(length for length, _ in LONG_ROWS) // BLOCK_SIZE)
    lengths, counts = (torch.tensor(part) for part in zip(*LONG_ROWS, strict=True))
    table = (source.order(len(LONG_ROWS) * columns) + 1).view(len(LONG_ROWS), columns)
    room, memory = poisoned(source, (table.numel() + 1, 2, BLOCK_SIZE, LONG_HEADS, LONG_SIZE), torch.bfloat16)
    for row, length in enumerate(lengths.tolist()):
        at = torch.arange(length)
        values = source.normal(length, 2, LONG_HEADS, LONG_SIZE).bfloat16()
        room[table[row, at // BLOCK_SIZE], :, at % BLOCK_SIZE] = values.to(device)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    query = source.normal(int(starts[-1]), LONG_HEADS * LONG_GROUP, LONG_SIZE).bfloat16().to(device)
    host = HostTables(table.int(), lengths, starts)
    batch = Batch(ints(source, table), ints(source, lengths), ints(source, starts), host=host)
    return Outcome(memory, ops.prefill_attention(query, AttentionPages(room[:, 0], room[:, 1]), batch, rule))


# ---- latents

LATENT, VALUE = 576, 512


def latent_trials(device: torch.device) -> list[Trial]:
    """Return trials of latent decode with the sizes of DeepSeek."""
    return [
        Trial("mla_decode", f"{dtype}, {VALUE} of {LATENT}", partial(latent_decoded, device, dtype), steps)
        for dtype, steps in ((torch.bfloat16, 2.5), (FP8, 4.0))
    ]


def latent_decoded(device: torch.device, dtype: torch.dtype, ops: PagedOps) -> Outcome:
    """Run a latent decode: one query per row."""
    source = Source.of(device, 3)
    form = Form(dtype, torch.bfloat16, LATENT, AttentionRule(0.1), 0)
    table = block_table(source, form, (1,) * len(LENGTHS))
    pages, memory = poisoned(source, (NUM_BLOCKS, BLOCK_SIZE, LATENT), form.pages)
    written, _ = slots_of(table, form.rule, (1,) * len(LENGTHS))
    stored = (source.normal(int(written.sum()), LATENT) * 2).to(form.pages)
    bytes_of(pages)[written.to(device)] = bytes_of(stored).to(device)
    latents = LatentPages(pages, torch.full((1,), 0.5, device=device) if dtype.itemsize == 1 else None)
    query = (0.5 * source.normal(len(LENGTHS), Q_HEADS, LATENT)).to(form.query).to(device)
    batch = Batch(ints(source, table), ints(source, LENGTHS))
    return Outcome(memory, ops.mla_decode(query, latents, batch, form.rule.scale, VALUE))


# ---- writing

TOKENS, WRITTEN_BLOCKS = 21, 5


def write_trials(device: torch.device) -> list[Trial]:
    """Return trials of writes: keys and values with 16 and 8 bits, and latents. The bytes must equal PyTorch's."""
    some = [
        Trial("write_kv", str(dtype), partial(written_kv, device, dtype)) for dtype in (torch.bfloat16, FP8, FP8_WIDE)
    ]
    latents = [Trial("write_latent", str(t), partial(written_latent, device, t)) for t in (torch.bfloat16, FP8)]
    return some + latents


def slots(source: Source) -> Tensor:
    """Return random slots outside the null block and the last two slots; -1 for tokens that are skipped."""
    chosen = source.order((WRITTEN_BLOCKS - 1) * BLOCK_SIZE - 2)[:TOKENS] + BLOCK_SIZE
    chosen[::6] = -1
    return ints(source, chosen, torch.int64)


def written_kv(device: torch.device, dtype: torch.dtype, ops: PagedOps) -> Outcome:
    """Write keys and values, some of which exceed the range of 8-bit types.

    Scales are powers of two, so that no quotient is rounded.
    """
    source = Source.of(device, 4)
    room, memory = poisoned(source, (WRITTEN_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, 64), dtype)
    key, value = (source.normal(TOKENS, KV_HEADS, 64) for _ in range(2))
    for new in (key, value):
        new[:, :, ::7] *= 1000
    scales = [torch.tensor(scale).to(device) if dtype.itemsize == 1 else None for scale in ([0.5, 0.125], [0.25, 1.0])]
    pages = AttentionPages(room[:, 0], room[:, 1], *scales)
    ops.write_kv(pages, key.bfloat16().to(device), value.bfloat16().to(device), slots(source))
    return Outcome(memory)


def written_latent(device: torch.device, dtype: torch.dtype, ops: PagedOps) -> Outcome:
    """Write latent rows."""
    source = Source.of(device, 5)
    rows, memory = poisoned(source, (WRITTEN_BLOCKS, BLOCK_SIZE, LATENT), dtype)
    pages = LatentPages(rows, torch.full((1,), 0.25, device=device) if dtype.itemsize == 1 else None)
    ops.write_latent(pages, source.normal(TOKENS, LATENT).bfloat16().to(device), slots(source))
    return Outcome(memory)


# ---- whole pages

WIDTHS = (64, 2048, 4112)
PAGES = 9
# Chains, a swap through a third block, a block that is written twice.
COPIES = ((1, 2), (2, 3), (4, 1), (3, 4), (1, 5), (7, 5), (5, 8))
READ, NAMED_ONCE = (5, 1, 1, 0, 8, 3), (5, 1, 8, 3)


def page_trials(device: torch.device) -> list[Trial]:
    """Return trials of copies within the device, and between device and host."""
    places = dict.fromkeys((device, torch.device("cpu")))  # one entry where the device is the host
    runs: dict[str, list[tuple[str, Callable[..., Outcome]]]] = {
        "copy_pages": [("chains", copied)],
        "zero_pages": [("pages", zeroed)],
        "gather": [(f"to {place.type}", partial(gathered, place)) for place in places],
        "scatter": [(f"from {place.type}", partial(scattered, place)) for place in places],
        "checksum": [("pages", summed)],
    }
    return [Trial(operation, name, partial(run, device)) for operation, cases in runs.items() for name, run in cases]


def group_of(source: Source) -> tuple[GroupPages, Tensor]:
    """Return a group of three layers, of which the first two have adjacent pages in each block, and the memory of all
    layers.
    """
    memory, together = source.bytes(PAGES * sum(WIDTHS)), sum(WIDTHS[:2])
    first = memory[: PAGES * together].view(PAGES, together)
    last = memory[PAGES * together :].view(PAGES, WIDTHS[2])
    return GroupPages((first[:, : WIDTHS[0]], first[:, WIDTHS[0] :], last)), memory


def rows_on(place: torch.device, source: Source, count: int) -> Tensor:
    """Return a staging buffer with random bytes; pinned if the device is a GPU and the buffer is on the host."""
    rows = source.bytes(count, sum(WIDTHS)).to(place)
    return rows.pin_memory() if place.type == "cpu" and source.device.type == "cuda" else rows


def copied(device: torch.device, ops: PagedOps) -> Outcome:
    """Run copies of pages that form chains and a swap."""
    group, memory = group_of(Source.of(device, 7))
    ops.copy_pages(group, [source for source, _ in COPIES], [target for _, target in COPIES])
    return Outcome(memory)


def zeroed(device: torch.device, ops: PagedOps) -> Outcome:
    """Run the zeroing of blocks, one of which is listed twice."""
    group, memory = group_of(Source.of(device, 8))
    ops.zero_pages(group, [3, 5, 3, 8])
    return Outcome(memory)


def gathered(place: torch.device, device: torch.device, ops: PagedOps) -> Outcome:
    """Run a gather. The staging rows are compared together with the pages."""
    source = Source.of(device, 9)
    group, memory = group_of(source)
    rows = rows_on(place, source, len(READ))
    ops.gather(group, READ, rows)
    synchronize(device)
    return Outcome(torch.cat([memory, rows.flatten().to(device)]))


def scattered(place: torch.device, device: torch.device, ops: PagedOps) -> Outcome:
    """Run a scatter of new bytes into blocks."""
    source = Source.of(device, 10)
    group, memory = group_of(source)
    rows = rows_on(place, source, len(NAMED_ONCE))
    ops.scatter(group, NAMED_ONCE, rows)
    synchronize(device)
    return Outcome(memory)


def summed(device: torch.device, ops: PagedOps) -> Outcome:
    """Run checksums. The checksums are compared exactly, as bytes."""
    group, memory = group_of(Source.of(device, 11))
    return Outcome(torch.cat([memory, bytes_of(ops.checksum(group, READ))]))


def synchronize(device: torch.device) -> None:
    """Wait until copies to and from the host have ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
