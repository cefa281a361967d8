"""Trials: small cases of every operation, equal on every machine, for the start check of a backend.

They cover rows of no token, of one token, up to a block boundary and past it; shared prefixes; blocks that left the
window. Slots that must not be read hold NaN. Slots that are written but not attended to hold large values, so that
reading them fails the comparison.
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
OUTLIER = 40.0
POISON = 0x7F  # a float whose bytes all have this value is NaN


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        memory: bytes that must be equal on all backends: pages, and integer results.
        out: floating-point result, compared with a tolerance; None where there is none.
    """

    memory: Tensor
    out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One case of one operation.

    Attributes:
        operation: name of the operation.
        name: what distinguishes the case.
        run: runs the case on new memory, with the same content each time.
        steps: largest difference between two backends, in `torch.finfo.eps` of the result's type x (1 + |result|).
    """

    operation: str
    name: str
    run: Callable[[PagedOps], Outcome]
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """Random numbers, drawn on the host and copied to the device, so that they are equal on every device."""

    device: torch.device
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, seed: int) -> Source:
        """Create a source from a seed."""
        return cls(device, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int) -> Tensor:
        """Draw from a normal distribution, float32 on the host."""
        return torch.randn(shape, generator=self.generator)

    def bytes(self, *shape: int) -> Tensor:
        """Draw bytes, on the device."""
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator).to(self.device)

    def order(self, count: int) -> Tensor:
        """A random permutation of the numbers below `count`, on the host."""
        return torch.randperm(count, generator=self.generator)


def poisoned(source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of NaN on the device, and its bytes."""
    memory = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8, device=source.device)
    return memory.view(dtype), memory


def ints(source: Source, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Copy integers to the device."""
    return torch.as_tensor(values, dtype=dtype).to(source.device)


def trials(device: torch.device) -> tuple[Trial, ...]:
    """All trials, cheap ones first."""
    groups = (page_trials, write_trials, state_trials, attention_trials, latent_trials)
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
        has_sinks: the rule has sinks.
        has_hole: the second block of a row is the null block.
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
        """Element type, rule and special features."""
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
)


def attention_trials(device: torch.device) -> list[Trial]:
    """Decode and prefill of each variant."""
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
    """Rows with `QUERIES` queries."""
    source = Source.of(device, 2)
    pages, memory, batch = pages_and_batch(source, form, QUERIES)
    query = (2 * source.normal(sum(QUERIES), Q_HEADS, form.size)).to(form.query).to(device)
    starts = torch.tensor((0, *QUERIES)).cumsum(0)
    batch = replace(batch, query_start=ints(source, starts))
    return Outcome(memory, ops.prefill_attention(query, pages, batch, with_sinks(source, form)))


def with_sinks(source: Source, form: Form) -> AttentionRule:
    """The rule of a variant, with sinks on the device."""
    return replace(form.rule, sinks=2 * source.normal(Q_HEADS).to(source.device)) if form.has_sinks else form.rule


def pages_and_batch(source: Source, form: Form, queries: tuple[int, ...]) -> tuple[AttentionPages, Tensor, Batch]:
    """Pages that hold only the tokens of the rows, the bytes of these pages, and the batch."""
    table = block_table(source, form, queries)
    room, memory = poisoned(source, (NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, form.size), form.pages)
    written, attended = slots_of(table, form.rule, queries)
    scales = [torch.tensor(scale) if form.pages == FP8 else None for scale in ([0.5, 0.25], [0.25, 1.0])]
    for part, scale in enumerate(scales):
        values = source.normal(int(written.sum()), KV_HEADS, form.size)
        if part == 1:
            values[~attended[written]] = OUTLIER
        stored = (values if scale is None else values / scale[:, None]).to(form.pages)
        bytes_of(room[:, part])[written.to(source.device)] = bytes_of(stored).to(source.device)
    on_device = [None if scale is None else scale.to(source.device) for scale in scales]
    batch = Batch(ints(source, table), ints(source, LENGTHS))
    return AttentionPages(room[:, 0], room[:, 1], *on_device), memory, batch


def bytes_of(tensor: Tensor) -> Tensor:
    """A view as bytes, which masks and indices support for every element type."""
    return tensor.view(torch.uint8)


def block_table(source: Source, form: Form, queries: tuple[int, ...]) -> Tensor:
    """Blocks of the rows, on the host.
    The last row shares a prefix with the fourth and has lost blocks behind its window.
    """
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
    """Which slots hold a token, and which of them a query attends to: bool [blocks, block_size] on the host."""
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
    """Latent decode with the sizes of DeepSeek."""
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
    """Writes of keys and values with 16 and 8 bits, and of latents. Bytes must be equal to PyTorch's rounding."""
    some = [Trial("write_kv", str(dtype), partial(written_kv, device, dtype)) for dtype in (torch.bfloat16, FP8)]
    return [*some, Trial("write_latent", "torch.bfloat16", partial(written_latent, device))]


def slots(source: Source) -> Tensor:
    """Random slots outside the null block and the last two slots; some tokens are skipped."""
    chosen = source.order((WRITTEN_BLOCKS - 1) * BLOCK_SIZE - 2)[:TOKENS] + BLOCK_SIZE
    chosen[::6] = -1
    return ints(source, chosen, torch.int64)


def written_kv(device: torch.device, dtype: torch.dtype, ops: PagedOps) -> Outcome:
    """Tokens with outliers beyond the range of 8-bit types.
    Scales are powers of two, so that no quotient is rounded.
    """
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
    """Write latent rows."""
    source = Source.of(device, 5)
    pages, memory = poisoned(source, (WRITTEN_BLOCKS, BLOCK_SIZE, LATENT), torch.bfloat16)
    ops.write_latent(pages, source.normal(TOKENS, LATENT).bfloat16().to(device), slots(source))
    return Outcome(memory)


# ---- recurrent states


def state_trials(device: torch.device) -> list[Trial]:
    """A state step whose rows read blocks that others write, and where one row names a block twice."""
    return [Trial("state_step", "float32", partial(stepped, device), 300)]


def stepped(device: torch.device, ops: PagedOps) -> Outcome:
    """Three rows of 3, 1 and 4 tokens. The states follow y in `out`: they are compared with a tolerance too."""
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
# Chains, a swap through a third block, a block that is written twice.
COPIES = ((1, 2), (2, 3), (4, 1), (3, 4), (1, 5), (7, 5), (5, 8))
READ, NAMED_ONCE = (5, 1, 1, 0, 8, 3), (5, 1, 8, 3)


def page_trials(device: torch.device) -> list[Trial]:
    """Moves within the device, and between device and host."""
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
    """A group of two layers whose pages of a block are adjacent and one separate layer; and all of their memory."""
    memory, together = source.bytes(PAGES * sum(WIDTHS)), sum(WIDTHS[:2])
    first = memory[: PAGES * together].view(PAGES, together)
    last = memory[PAGES * together :].view(PAGES, WIDTHS[2])
    return GroupPages((first[:, : WIDTHS[0]], first[:, WIDTHS[0] :], last)), memory


def rows_on(place: torch.device, source: Source, count: int) -> Tensor:
    """A staging buffer with random bytes, pinned where the device is a GPU."""
    rows = source.bytes(count, sum(WIDTHS)).to(place)
    return rows.pin_memory() if place.type == "cpu" and source.device.type == "cuda" else rows


def copied(device: torch.device, ops: PagedOps) -> Outcome:
    """Copy pages."""
    group, memory = group_of(Source.of(device, 7))
    ops.copy_pages(group, [source for source, _ in COPIES], [target for _, target in COPIES])
    return Outcome(memory)


def zeroed(device: torch.device, ops: PagedOps) -> Outcome:
    """Zero blocks, one of them named twice."""
    group, memory = group_of(Source.of(device, 8))
    ops.zero_pages(group, [3, 5, 3, 8])
    return Outcome(memory)


def gathered(place: torch.device, device: torch.device, ops: PagedOps) -> Outcome:
    """Gather blocks. The rows are compared together with the pages."""
    source = Source.of(device, 9)
    group, memory = group_of(source)
    rows = rows_on(place, source, len(READ))
    ops.gather(group, READ, rows)
    synchronize(device)
    return Outcome(torch.cat([memory, rows.flatten().to(device)]))


def scattered(place: torch.device, device: torch.device, ops: PagedOps) -> Outcome:
    """Scatter new bytes into blocks."""
    source = Source.of(device, 10)
    group, memory = group_of(source)
    rows = rows_on(place, source, len(NAMED_ONCE))
    ops.scatter(group, NAMED_ONCE, rows)
    synchronize(device)
    return Outcome(memory)


def summed(device: torch.device, ops: PagedOps) -> Outcome:
    """Compute checksums, compared exactly, as bytes."""
    group, memory = group_of(Source.of(device, 11))
    return Outcome(torch.cat([memory, bytes_of(ops.checksum(group, READ))]))


def synchronize(device: torch.device) -> None:
    """Wait for copies to and from the host."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
