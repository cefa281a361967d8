"""Small cases of every operation, the same on every machine: what a backend is tried with when it is chosen.

As in life: rows of no token, of one, up to a block's edge and past it; shared prefixes; blocks that left the window.
And worse: what must not be read is NaN, and what is read by mistake although it is written is loud.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvplane_worker.ops.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    GroupPages,
    PagedOps,
    StateInputs,
    StatePages,
    StateWeights,
)

FP8 = torch.float8_e4m3fn
BLOCK_SIZE, COLUMNS = 16, 6
KV_HEADS, Q_HEADS = 2, 4
LENGTHS = (0, 1, 16, 75, 33, 90)
QUERIES = (2, 1, 16, 30, 0, 5)
NUM_BLOCKS = len(LENGTHS) * COLUMNS + 4
LOUD = 40.0
POISON = 0x7F  # as every byte of a float: NaN


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation came to.

    Attributes:
        memory: bytes that all backends leave alike; integers that they return alike.
        out: a result that is rounded; None where there is none.
    """

    memory: Tensor
    out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One case of one operation.

    Attributes:
        run: carries it out on memory of its own, drawn anew and alike each time.
        steps: largest difference of two backends, in `torch.finfo.eps` of the result's type x (1 + |result|).
    """

    operation: str
    name: str
    run: Callable[[PagedOps], Outcome]
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """Random numbers, drawn on the host and then moved, so that every device gets the same."""

    device: torch.device
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, seed: int) -> Source:
        """From a seed."""
        return cls(device, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int) -> Tensor:
        """Of a normal distribution, float32 on the host."""
        return torch.randn(shape, generator=self.generator)

    def bytes(self, *shape: int) -> Tensor:
        """Any bytes, on the device."""
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator).to(self.device)

    def order(self, count: int) -> Tensor:
        """The numbers below `count` in any order, on the host."""
        return torch.randperm(count, generator=self.generator)


def poisoned(source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of NaN on the device, and its bytes."""
    memory = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8, device=source.device)
    return memory.view(dtype), memory


def ints(source: Source, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Integers on the device."""
    return torch.as_tensor(values, dtype=dtype).to(source.device)


def trials(device: torch.device) -> tuple[Trial, ...]:
    """All of them, cheap ones first."""
    groups = (page_trials, write_trials, state_trials, attention_trials, latent_trials)
    return tuple(trial for group in groups for trial in group(device))


# ---- attention


@dataclass(frozen=True, slots=True)
class Form:
    """What attention is tried with.

    Attributes:
        pages, query: element types; 8-bit pages have scales.
        has_hole: a row's second block is null.
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
        """Type, rule, and what is special."""
        parts = [str(self.pages).removeprefix("torch.")]
        parts += [
            f"{what} {tokens}" for what, tokens in (("window", self.rule.window), ("chunk", self.rule.chunk)) if tokens
        ]
        return ", ".join(parts + ["sinks"] * self.has_sinks + ["a null block"] * self.has_hole)


# Sums are kept in float32. Then weights and results are rounded, here and there; with 8-bit pages also scaled values.
FORMS = (
    Form(torch.bfloat16, torch.bfloat16, 128, AttentionRule(0.25, window=20), steps=2.5),
    Form(torch.float16, torch.float16, 128, AttentionRule(0.25), steps=2.5),
    Form(torch.float16, torch.float16, 64, AttentionRule(0.3, chunk=24), steps=2.5, has_sinks=True),
    Form(FP8, torch.bfloat16, 64, AttentionRule(0.1), steps=4, has_sinks=True, has_hole=True),
)


def attention_trials(device: torch.device) -> list[Trial]:
    """Decode and prefill of each form."""
    decode = [Trial("decode_attention", form.name, partial(decoded, device, form), form.steps) for form in FORMS]
    return decode + [
        Trial("prefill_attention", form.name, partial(prefilled, device, form), form.steps) for form in FORMS
    ]


def decoded(device: torch.device, form: Form, ops: PagedOps) -> Outcome:
    """One query per row."""
    source = Source.of(device, 1)
    pages, memory, batch = pages_and_batch(source, form, (1,) * len(LENGTHS))
    query = (2 * source.normal(len(LENGTHS), Q_HEADS, form.size)).to(form.query).to(device)
    return Outcome(memory, ops.decode_attention(query, pages, batch, with_sinks(source, form)))


def prefilled(device: torch.device, form: Form, ops: PagedOps) -> Outcome:
    """Queries by `QUERIES`."""
    source = Source.of(device, 2)
    pages, memory, batch = pages_and_batch(source, form, QUERIES)
    query = (2 * source.normal(sum(QUERIES), Q_HEADS, form.size)).to(form.query).to(device)
    starts = torch.tensor((0, *QUERIES)).cumsum(0)
    batch = replace(batch, query_start=ints(source, starts))
    return Outcome(memory, ops.prefill_attention(query, pages, batch, with_sinks(source, form)))


def with_sinks(source: Source, form: Form) -> AttentionRule:
    """The form's rule."""
    return replace(form.rule, sinks=2 * source.normal(Q_HEADS).to(source.device)) if form.has_sinks else form.rule


def pages_and_batch(source: Source, form: Form, queries: tuple[int, ...]) -> tuple[AttentionPages, Tensor, Batch]:
    """Pages that hold the rows and nothing else, their bytes, and the rows."""
    table = block_table(source, form, queries)
    room, memory = poisoned(source, (NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, form.size), form.pages)
    written, attended = slots_of(table, form.rule, queries)
    scales = [torch.tensor(scale) if form.pages == FP8 else None for scale in ([0.5, 0.25], [0.25, 1.0])]
    for part, scale in enumerate(scales):
        values = source.normal(int(written.sum()), KV_HEADS, form.size)
        if part == 1:
            values[~attended[written]] = LOUD
        stored = (values if scale is None else values / scale[:, None]).to(form.pages)
        bytes_of(room[:, part])[written.to(source.device)] = bytes_of(stored).to(source.device)
    on_device = [None if scale is None else scale.to(source.device) for scale in scales]
    batch = Batch(ints(source, table), ints(source, LENGTHS))
    return AttentionPages(room[:, 0], room[:, 1], *on_device), memory, batch


def bytes_of(tensor: Tensor) -> Tensor:
    """A view as bytes: what masks and indices take of any type."""
    return tensor.view(torch.uint8)


def block_table(source: Source, form: Form, queries: tuple[int, ...]) -> Tensor:
    """Blocks of the rows, on the host: the last row begins as the fourth does, and has lost what left its window."""
    table = (source.order(NUM_BLOCKS - 2)[: len(LENGTHS) * COLUMNS] + 1).view(len(LENGTHS), COLUMNS)
    table[5, :3] = table[3, :3]
    if form.has_hole:
        table[3, 1] = 0
    table[5, : first_attended(form.rule, LENGTHS[5] - queries[5]) // BLOCK_SIZE] = 0
    return table


def first_attended(rule: AttentionRule, position: int) -> int:
    """The earliest token that a query attends to."""
    if rule.chunk:
        return position // rule.chunk * rule.chunk
    return max(0, position - rule.window + 1) if rule.window else 0


def slots_of(table: Tensor, rule: AttentionRule, queries: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Which slots hold a token, and which some query attends to: bool [blocks, block_size] on the host."""
    written, attended = (torch.zeros((NUM_BLOCKS, BLOCK_SIZE), dtype=torch.bool) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        at = torch.arange(length)
        block, offset = table[row, at // BLOCK_SIZE], at % BLOCK_SIZE
        written[block, offset] = True
        first = first_attended(rule, length - queries[row]) if queries[row] and length else length
        attended[block[first:], offset[first:]] = True
    written[0] = False
    return written, attended


# ---- latents

LATENT, VALUE = 576, 512


def latent_trials(device: torch.device) -> list[Trial]:
    """DeepSeek's sizes."""
    return [Trial("mla_decode", f"bfloat16, {VALUE} of {LATENT}", partial(latent_decoded, device), 2.5)]


def latent_decoded(device: torch.device, ops: PagedOps) -> Outcome:
    """One query per row."""
    source = Source.of(device, 3)
    form = Form(torch.bfloat16, torch.bfloat16, LATENT, AttentionRule(0.1), 0)
    table = block_table(source, form, (1,) * len(LENGTHS))
    pages, memory = poisoned(source, (NUM_BLOCKS, BLOCK_SIZE, LATENT), form.pages)
    written, _ = slots_of(table, form.rule, (1,) * len(LENGTHS))
    pages[written.to(device)] = source.normal(int(written.sum()), LATENT).to(form.pages).to(device)
    query = (0.5 * source.normal(len(LENGTHS), Q_HEADS, LATENT)).to(form.query).to(device)
    batch = Batch(ints(source, table), ints(source, LENGTHS))
    return Outcome(memory, ops.mla_decode(query, pages, batch, form.rule.scale, VALUE))


# ---- writing

TOKENS, WRITTEN_BLOCKS = 21, 5


def write_trials(device: torch.device) -> list[Trial]:
    """Keys and values of 16 and 8 bits, and latents: bytes as torch rounds them."""
    some = [Trial("write_kv", str(dtype), partial(written_kv, device, dtype)) for dtype in (torch.bfloat16, FP8)]
    return [*some, Trial("write_latent", "torch.bfloat16", partial(written_latent, device))]


def slots(source: Source) -> Tensor:
    """Any slots outside the null block and the last two; some tokens are skipped."""
    chosen = source.order((WRITTEN_BLOCKS - 1) * BLOCK_SIZE - 2)[:TOKENS] + BLOCK_SIZE
    chosen[::6] = -1
    return ints(source, chosen, torch.int64)


def written_kv(device: torch.device, dtype: torch.dtype, ops: PagedOps) -> Outcome:
    """Tokens with outliers beyond the range of 8 bits; scales are powers of two, so that no quotient is rounded."""
    source = Source.of(device, 4)
    room, memory = poisoned(source, (WRITTEN_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, 64), dtype)
    key, value = (source.normal(TOKENS, KV_HEADS, 64) for _ in range(2))
    for new in (key, value):
        new[:, :, ::7] *= 1000
    scales = [torch.tensor(scale).to(device) if dtype == FP8 else None for scale in ([0.5, 0.125], [0.25, 1.0])]
    pages = AttentionPages(room[:, 0], room[:, 1], *scales)
    ops.write_kv(pages, key.bfloat16().to(device), value.bfloat16().to(device), slots(source))
    return Outcome(memory)


def written_latent(device: torch.device, ops: PagedOps) -> Outcome:
    """New latents."""
    source = Source.of(device, 5)
    pages, memory = poisoned(source, (WRITTEN_BLOCKS, BLOCK_SIZE, LATENT), torch.bfloat16)
    ops.write_latent(pages, source.normal(TOKENS, LATENT).bfloat16().to(device), slots(source))
    return Outcome(memory)


# ---- recurrent states


def state_trials(device: torch.device) -> list[Trial]:
    """Rows that read each other's targets, and one that names a page again."""
    return [Trial("state_step", "float32", partial(stepped, device), 300)]


def stepped(device: torch.device, ops: PagedOps) -> Outcome:
    """Three rows of 3, 1 and 4 tokens. The states go into `out`, behind y: they are rounded too."""
    source, (heads, size, state, width, blocks) = Source.of(device, 6), (2, 8, 4, 4, 8)
    channels = heads * size + 2 * state
    pages = StatePages(
        *(source.normal(blocks, *shape).to(device) for shape in ((channels, width - 1), (heads, size, state)))
    )
    pages.conv[0], pages.ssm[0] = torch.nan, torch.nan
    inputs = StateInputs(
        query_start=ints(source, [0, 3, 4, 8]),
        read_block=ints(source, [1, 2, 0]),
        write_block=ints(source, [2, 0, 3, 1, 4, 5, 4, 6]),
        x=source.normal(8, channels).to(device),
        dt=source.normal(8, heads).exp().to(device),
    )
    parts = (source.normal(channels, width), source.normal(channels), -source.normal(heads).exp(), source.normal(heads))
    y = ops.state_step(pages, inputs, StateWeights(*(part.to(device) for part in parts)))
    after = torch.cat([part.flatten() for part in (y, pages.conv[1:], pages.ssm[1:])])
    return Outcome(torch.cat([bytes_of(pages.conv[0].flatten()), bytes_of(pages.ssm[0].flatten())]), after)


# ---- whole pages

WIDTHS = (64, 2048, 4112)
PAGES = 9
# Chains, a swap by way of a third, a target that is written twice.
COPIES = ((1, 2), (2, 3), (4, 1), (3, 4), (1, 5), (7, 5), (5, 8))
READ, NAMED_ONCE = (5, 1, 1, 0, 8, 3), (5, 1, 8, 3)


def page_trials(device: torch.device) -> list[Trial]:
    """Moves within the device, and between it and the host."""
    places = dict.fromkeys((device, torch.device("cpu")))  # one, where the device is the host
    runs: dict[str, list[tuple[str, Callable[..., Outcome]]]] = {
        "copy_pages": [("chains", copied)],
        "zero_pages": [("pages", zeroed)],
        "gather": [(f"to {place.type}", partial(gathered, place)) for place in places],
        "scatter": [(f"from {place.type}", partial(scattered, place)) for place in places],
        "checksum": [("pages", summed)],
    }
    return [Trial(operation, name, partial(run, device)) for operation, cases in runs.items() for name, run in cases]


def group_of(source: Source) -> tuple[GroupPages, Tensor]:
    """Two layers whose pages of a block lie together, and one apart; all of their memory."""
    memory, together = source.bytes(PAGES * sum(WIDTHS)), sum(WIDTHS[:2])
    first = memory[: PAGES * together].view(PAGES, together)
    last = memory[PAGES * together :].view(PAGES, WIDTHS[2])
    return GroupPages((first[:, : WIDTHS[0]], first[:, WIDTHS[0] :], last)), memory


def rows_on(place: torch.device, source: Source, count: int) -> Tensor:
    """Staging full of something, pinned where it is for a GPU."""
    rows = source.bytes(count, sum(WIDTHS)).to(place)
    return rows.pin_memory() if place.type == "cpu" and source.device.type == "cuda" else rows


def copied(device: torch.device, ops: PagedOps) -> Outcome:
    """Copies in order."""
    group, memory = group_of(Source.of(device, 7))
    ops.copy_pages(group, [source for source, _ in COPIES], [target for _, target in COPIES])
    return Outcome(memory)


def zeroed(device: torch.device, ops: PagedOps) -> Outcome:
    """Some blocks, one of them twice."""
    group, memory = group_of(Source.of(device, 8))
    ops.zero_pages(group, [3, 5, 3, 8])
    return Outcome(memory)


def gathered(place: torch.device, device: torch.device, ops: PagedOps) -> Outcome:
    """Rows that are then bytes beside the pages'."""
    source = Source.of(device, 9)
    group, memory = group_of(source)
    rows = rows_on(place, source, len(READ))
    ops.gather(group, READ, rows)
    settle(device)
    return Outcome(torch.cat([memory, rows.flatten().to(device)]))


def scattered(place: torch.device, device: torch.device, ops: PagedOps) -> Outcome:
    """Blocks by new bytes."""
    source = Source.of(device, 10)
    group, memory = group_of(source)
    rows = rows_on(place, source, len(NAMED_ONCE))
    ops.scatter(group, NAMED_ONCE, rows)
    settle(device)
    return Outcome(memory)


def summed(device: torch.device, ops: PagedOps) -> Outcome:
    """Sums as bytes: they are compared exactly."""
    group, memory = group_of(Source.of(device, 11))
    return Outcome(torch.cat([memory, bytes_of(ops.checksum(group, READ))]))


def settle(device: torch.device) -> None:
    """Wait for copies to and from the host."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
