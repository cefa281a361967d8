"""Random cases of the operations, ragged in every way that the interface allows. A case is a function of its seed.

Everything that an operation must not read is poison (NaN): pages that no table names, the null block's page, slots past
a row's end, padding. Tokens that are written but not attended to have finite, large values, so that a window that
is off by one is detected for every element type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch, LatentPages
from tests.kernels import float64
from tests.kernels.formats import POISON, Format
from tests.kernels.memory import DeviceMemory, Memory, draw_page_bytes

BLOCK_SIZES = (1, 3, 7, 16, 16, 16, 32, 48, 64, 128, 256, 272, 528)
HEAD_SIZES = (5, 8, 24, 40, 64, 64, 80, 96, 112, 128, 128, 192, 256)
LATENT_SIZES = ((20, 13), (40, 32), (96, 64), (320, 256), (576, 512))
MAX_PAGE_ELEMENTS = 1 << 15
MAX_SEQ_LEN = 600
OUTLIER = 40.0


@dataclass(frozen=True)
class Array:
    """A dense operand: its elements, and whether the tensor is a strided view of a larger one.

    Attributes:
        data: uint8 [..., n x num_bytes].
    """

    form: Format
    data: np.ndarray
    is_view: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, shape: tuple[int, ...], form: Format) -> Array:
        return cls(form, form.encode(rng.standard_normal(shape)), bool(rng.random() < 0.3))

    @property
    def values(self) -> np.ndarray:
        return self.form.decode(self.data)

    def on(self, device: str) -> torch.Tensor:
        """The operand as a tensor. A view is a slice of a poisoned tensor, as queries are of a fused projection."""
        data = self.data
        if not self.is_view:
            return self._tensor(data, device)
        unit = self.form.num_bytes if data.ndim == 2 else 1
        wide = np.full((data.shape[0], data.shape[1] + 3 * unit, *data.shape[2:]), POISON, np.uint8)
        wide[:, 2 * unit : -unit] = data
        return self._tensor(wide, device)[:, 2:-1]

    def _tensor(self, data: np.ndarray, device: str) -> torch.Tensor:
        flat = torch.from_numpy(data.reshape(-1)).view(self.form.torch_dtype)
        return flat.reshape(*data.shape[:-1], data.shape[-1] // self.form.num_bytes).to(device)


@dataclass(frozen=True)
class Tables:
    """Rows of a batch, and their blocks.

    Attributes:
        query_start: None for one query per row.
        table_padding: extra columns of the table that the tensor is a slice of.
    """

    num_blocks: int
    block_size: int
    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start: np.ndarray | None
    table_padding: int = 0
    tree: np.ndarray | None = None

    @property
    def reference(self) -> float64.Tables:
        rows = np.arange(len(self.seq_lens) + 1)
        starts = rows if self.query_start is None else self.query_start
        return float64.Tables(self.block_table, self.seq_lens, starts, self.tree)

    @property
    def num_queries(self) -> int:
        return int(self.reference.query_start[-1])

    def on(self, device: str) -> Batch:
        rows, columns = self.block_table.shape
        wide = np.full((rows, columns + self.table_padding), self.num_blocks - 1, np.int32)
        wide[:, :columns] = self.block_table
        start = None if self.query_start is None else ints(self.query_start, device)
        tree = None if self.tree is None else ints(self.tree, device, torch.int64)
        return Batch(ints(wide, device)[:, :columns], ints(self.seq_lens, device), start, tree)

    def written(self) -> np.ndarray:
        """Which slots hold a token: bool [num_blocks, block_size]."""
        return self._slots(lambda row: 0)

    def attended(self, rule: float64.Rule) -> np.ndarray:
        """Which slots a query attends to."""

        def first(row: int) -> int:
            positions = [p for p in self.reference.positions(row) if p >= 0]
            return rule.first_attended(positions[0]) if positions else int(self.seq_lens[row])

        return self._slots(first)

    def _slots(self, first_of_row) -> np.ndarray:
        marked = np.zeros((self.num_blocks, self.block_size), bool)
        for row, seq_len in enumerate(self.seq_lens):
            tokens = np.arange(first_of_row(row), seq_len)
            marked[self.block_table[row][tokens // self.block_size], tokens % self.block_size] = True
        marked[0] = False
        return marked


def ints(values: np.ndarray, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype, device=device)


def near(rng: np.random.Generator, unit: int, most: int) -> int:
    """A random count from 1 to `most`, often next to a multiple of `unit`."""
    if rng.random() < 0.5:
        return int(rng.integers(1, most + 1))
    edge = unit * int(rng.integers(1, most // unit + 2)) + int(rng.integers(-1, 2))
    return int(np.clip(edge, 1, most))


def draw_rule(rng: np.random.Generator, block_size: int, head_size: int, q_heads: int) -> float64.Rule:
    kind = rng.choice(["full", "window", "chunk"])
    extent = near(rng, block_size, 3 * block_size) if rng.random() < 0.8 else int(rng.integers(1, 4))
    sinks = rng.standard_normal(q_heads).astype(np.float32) * 2 if rng.random() < 0.4 else None
    return float64.Rule(
        scale=float(head_size**-0.5 * rng.uniform(0.5, 2)),
        window=extent if kind == "window" else 0,
        chunk=extent if kind == "chunk" else 0,
        sinks=sinks,
        soft_cap=float(rng.uniform(0.5, 4)) if rng.random() < 0.12 else 0.0,
        slopes=rng.uniform(0, 0.2, q_heads).astype(np.float32) if rng.random() < 0.12 else None,
    )


def rule_on(rule: float64.Rule, device: str) -> AttentionRule:
    sinks, slopes = (None if n is None else torch.from_numpy(n).to(device) for n in (rule.sinks, rule.slopes))
    return AttentionRule(rule.scale, rule.window, rule.chunk, sinks, rule.soft_cap, slopes)


def draw_tables(rng: np.random.Generator, block_size: int, rule: float64.Rule, one_query_per_row: bool) -> Tables:
    """Draw rows with shared prefixes, empty rows, blocks that left the window, holes, blocks beyond the end."""
    rows = int(rng.integers(1, 6))
    longest = min(5 * block_size, MAX_SEQ_LEN)
    seq_lens = np.array([draw_seq_len(rng, block_size, longest) for _ in range(rows)])
    columns = -(-int(seq_lens.max()) // block_size) + int(rng.integers(0, 3))
    num_blocks = 1 + rows * columns + int(rng.integers(1, 4))
    table = rng.permutation(np.arange(1, num_blocks))[: rows * columns].reshape(rows, columns)
    query_start = None
    if not one_query_per_row:
        counts = [draw_query_count(rng, int(n)) for n in seq_lens]
        query_start = np.concatenate([[0], np.cumsum(counts)])
    padding, tree = int(rng.choice([0, 0, 2])), draw_tree(rng, query_start)
    tables = Tables(num_blocks, block_size, table, seq_lens, query_start, padding, tree)
    for row in range(rows):
        share_a_prefix(rng, tables, row)
        forget_blocks(rng, tables, row, rule)
    return tables


def draw_tree(rng: np.random.Generator, query_start: np.ndarray | None) -> np.ndarray | None:
    """Draw a tree for each row of up to 63 queries: each query sees its ancestors and itself. Longer rows have none."""
    if query_start is None or rng.random() < 0.8:
        return None
    masks: list[int] = []
    for count in np.diff(query_start):
        seen: list[int] = []
        for query in range(count):
            parent = int(rng.integers(-1, query))
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << query)
        masks += seen if count < 64 else [-1] * count
    return np.array(masks, np.int64)


def draw_seq_len(rng: np.random.Generator, block_size: int, longest: int) -> int:
    kind = rng.random()
    if kind < 0.12:
        return 0
    return 1 if kind < 0.2 else near(rng, block_size, longest)


def draw_query_count(rng: np.random.Generator, seq_len: int) -> int:
    """Draw the number of queries of a row: one, a chunk, the whole prompt, none; padding where the row is empty."""
    if seq_len == 0:
        return int(rng.integers(0, 3))
    some, many, whole = int(rng.integers(1, 12)), int(rng.integers(1, 40)), seq_len if seq_len < 48 else 2
    return int(min(seq_len, rng.choice([0, 1, some, many, whole])))


def share_a_prefix(rng: np.random.Generator, tables: Tables, row: int) -> None:
    """Share the full blocks of the first row, as far as both rows are long."""
    if row == 0 or rng.random() < 0.6:
        return
    full = int(min(tables.seq_lens[0], tables.seq_lens[row])) // tables.block_size
    tables.block_table[row, :full] = tables.block_table[0, :full]


def forget_blocks(rng: np.random.Generator, tables: Tables, row: int, rule: float64.Rule) -> None:
    """Set blocks to null where the row needs none: below its window, sometimes past its end; rarely a hole inside."""
    table, end = tables.block_table[row], -(-int(tables.seq_lens[row]) // tables.block_size)
    positions = [p for p in tables.reference.positions(row) if p >= 0]
    if positions:
        table[: rule.first_attended(positions[0]) // tables.block_size] *= rng.integers(0, 2)
    if rng.random() < 0.5:
        table[end:] = 0
    if end and rng.random() < 0.08:
        table[int(rng.integers(0, end))] = 0


@dataclass(frozen=True)
class PageShape:
    """Elements of one layer's keys and values."""

    form: Format
    block_size: int
    kv_heads: int
    head_size: int
    head_size_v: int

    @classmethod
    def draw(cls, rng: np.random.Generator, forms: tuple[Format, ...]) -> PageShape:
        form = forms[int(rng.integers(0, len(forms)))]
        while True:
            size = int(rng.choice(HEAD_SIZES))
            size_v = size if rng.random() < 0.8 else int(rng.choice(HEAD_SIZES))
            shape = cls(form, int(rng.choice(BLOCK_SIZES)), int(rng.choice([1, 1, 2, 3, 4, 8])), size, size_v)
            if shape.num_elements <= MAX_PAGE_ELEMENTS:
                return shape

    @property
    def num_elements(self) -> int:
        return self.block_size * self.kv_heads * (self.head_size + self.head_size_v)

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.block_size, self.kv_heads, self.head_size)

    @property
    def value(self) -> tuple[int, int, int]:
        return (self.block_size, self.kv_heads, self.head_size_v)

    @property
    def value_start(self) -> int:
        """Byte of a page at which its values begin."""
        return self.block_size * self.kv_heads * self.head_size * self.form.num_bytes


@dataclass(frozen=True)
class KeyValues:
    """Pages of a layer of keys and values in a memory, with scales where they are 8-bit."""

    shape: PageShape
    memory: Memory
    layer: int
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None

    @classmethod
    def draw(cls, rng: np.random.Generator, shape: PageShape, num_blocks: int) -> KeyValues:
        page_bytes, layer = draw_page_bytes(rng, shape.num_elements * shape.form.num_bytes, shape.form)
        memory = Memory.draw(rng, num_blocks, page_bytes)
        scales = [draw_scale(rng, shape.kv_heads) if shape.form.is_8bit else None for _ in range(2)]
        return cls(shape, memory, layer, *scales)

    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of keys and of values [num_blocks, block_size, kv_heads, ...], in place."""
        shape = self.shape
        k = self.memory.part(self.layer, 0, shape.key, shape.form)
        return k, self.memory.part(self.layer, shape.value_start, shape.value, shape.form)

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as float64, scales applied."""
        pairs = zip(self.parts(), (self.k_scale, self.v_scale), strict=True)
        k, v = (self.shape.form.decode(part) * per_head(scale) for part, scale in pairs)
        return k, v

    def fill(self, rng: np.random.Generator, written: np.ndarray, attended: np.ndarray) -> None:
        """Write random keys and values into the `written` slots, with large values where no query attends."""
        loud = np.where(attended[written], 1.0, OUTLIER)[:, None, None]
        volumes = np.ones_like(loud), loud
        pairs = zip(self.parts(), (self.k_scale, self.v_scale), volumes, strict=True)
        for part, scale, volume in pairs:
            shape = (len(loud), part.shape[-2], part.shape[-1] // self.shape.form.num_bytes)
            part[written] = self.shape.form.encode(rng.standard_normal(shape) * volume / per_head(scale))

    def on(self, device: str) -> tuple[AttentionPages, DeviceMemory]:
        memory, shape = self.memory.on(device), self.shape
        k = memory.part(self.layer, 0, shape.key, shape.form)
        v = memory.part(self.layer, shape.value_start, shape.value, shape.form)
        scales = [None if s is None else torch.from_numpy(s).to(device) for s in (self.k_scale, self.v_scale)]
        return AttentionPages(k, v, *scales), memory


def draw_scale(rng: np.random.Generator, kv_heads: int) -> np.ndarray:
    """Draw one scale for all heads, or one per head."""
    count = 1 if rng.random() < 0.5 else kv_heads
    return np.asarray(np.exp2(rng.uniform(-8, 0, count)), np.float32)


def per_head(scale: np.ndarray | None) -> np.ndarray:
    """A scale in float64 that broadcasts over [..., kv_heads, size]."""
    return np.ones((1, 1)) if scale is None else scale.astype(np.float64)[:, None]


@dataclass(frozen=True)
class AttentionCase:
    """Queries on paged keys and values."""

    query: Array
    pages: KeyValues
    tables: Tables
    rule: float64.Rule


def attention(rng: np.random.Generator, forms: tuple[Format, ...], one_query_per_row: bool) -> AttentionCase:
    shape = PageShape.draw(rng, forms)
    q_heads = shape.kv_heads * int(rng.choice([1, 2, 3, 4, 5, 8]) if shape.kv_heads < 4 else rng.integers(1, 3))
    rule = draw_rule(rng, shape.block_size, shape.head_size, q_heads)
    tables = draw_tables(rng, shape.block_size, rule, one_query_per_row)
    pages = KeyValues.draw(rng, shape, tables.num_blocks)
    pages.fill(rng, tables.written(), tables.attended(rule))
    query_form = partner(rng, shape.form, forms)
    query = Array.draw(rng, (tables.num_queries, q_heads, shape.head_size), query_form)
    return AttentionCase(query, pages, tables, rule)


def partner(rng: np.random.Generator, form: Format, forms: tuple[Format, ...]) -> Format:
    """The type of queries and new tokens for pages of `form`: the same, or any wider one for 8-bit pages."""
    wider = [f for f in forms if not f.is_8bit]
    return wider[int(rng.integers(0, len(wider)))] if form.is_8bit else form


@dataclass(frozen=True)
class WriteCase:
    """Keys and values of new tokens, and their slots."""

    key: Array
    value: Array
    pages: KeyValues
    slots: np.ndarray


def write_kv(rng: np.random.Generator, forms: tuple[Format, ...]) -> WriteCase:
    shape = PageShape.draw(rng, forms)
    num_blocks = int(rng.integers(2, 6))
    pages = KeyValues.draw(rng, shape, num_blocks)
    slots = draw_slots(rng, num_blocks, shape.block_size)
    form = partner(rng, shape.form, forms)
    key = with_outliers(rng, Array.draw(rng, (len(slots), shape.kv_heads, shape.head_size), form))
    value = with_outliers(rng, Array.draw(rng, (len(slots), shape.kv_heads, shape.head_size_v), form))
    return WriteCase(key, value, pages, slots)


def with_outliers(rng: np.random.Generator, array: Array) -> Array:
    """Replace some elements by very large and very small ones: beyond the range of 8-bit types, and subnormal there."""
    factor = rng.choice([1.0, 1000.0, 0.001], array.values.shape, p=[0.94, 0.03, 0.03])
    return replace(array, data=array.form.encode(array.values * factor))


def draw_slots(rng: np.random.Generator, num_blocks: int, block_size: int) -> np.ndarray:
    """Distinct slots outside the null block, in random order or consecutive; some or all of them skipped."""
    room = np.arange(block_size, num_blocks * block_size)
    few, many = int(rng.integers(1, 40)), int(rng.integers(40, 90))
    count = int(min(len(room), rng.choice([0, 1, few, few, many, many])))
    first = int(rng.integers(0, len(room) - count + 1))
    slots = room[first : first + count] if rng.random() < 0.5 else rng.permutation(room)[:count]
    return np.where(rng.random(count) < rng.choice([0, 0.2, 0.2, 1]), -1, slots).astype(np.int64)


@dataclass(frozen=True)
class Latents:
    """Latent rows of one layer, with a scale where they are 8-bit."""

    form: Format
    block_size: int
    latent_size: int
    memory: Memory
    layer: int
    scale: np.ndarray | None

    @classmethod
    def draw(cls, rng: np.random.Generator, shape: tuple[Format, int, int], num_blocks: int) -> Latents:
        form, block_size, latent_size = shape
        page_bytes, layer = draw_page_bytes(rng, block_size * latent_size * form.num_bytes, form)
        scale = draw_scale(rng, 1) if form.is_8bit else None
        return cls(form, block_size, latent_size, Memory.draw(rng, num_blocks, page_bytes), layer, scale)

    def part(self) -> np.ndarray:
        return self.memory.part(self.layer, 0, (self.block_size, self.latent_size), self.form)

    def on(self, device: str) -> tuple[LatentPages, DeviceMemory]:
        memory = self.memory.on(device)
        rows = memory.part(self.layer, 0, (self.block_size, self.latent_size), self.form)
        return LatentPages(rows, None if self.scale is None else torch.from_numpy(self.scale).to(device)), memory

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """Stored values times the scale."""
        return values if self.scale is None else values * float(self.scale[0])


@dataclass(frozen=True)
class LatentCase:
    """Queries on paged latents; or, with slots, new latents."""

    dense: Array
    pages: Latents
    tables: Tables
    scale: float
    value_size: int


def mla_decode(rng: np.random.Generator, forms: tuple[Format, ...]) -> LatentCase:
    form = forms[int(rng.integers(0, len(forms)))]
    latent_size, value_size = LATENT_SIZES[int(rng.integers(0, len(LATENT_SIZES)))]
    block_size = int(rng.choice([b for b in BLOCK_SIZES if b * latent_size <= MAX_PAGE_ELEMENTS]))
    rule = float64.Rule(float(latent_size**-0.5 * rng.uniform(0.5, 2)))
    tables = draw_tables(rng, block_size, rule, one_query_per_row=bool(rng.random() < 0.5))
    pages = Latents.draw(rng, (form, block_size, latent_size), tables.num_blocks)
    written = tables.written()
    drawn = rng.standard_normal((int(written.sum()), latent_size))
    pages.part()[written] = form.encode(drawn / pages.scaled(np.ones(1)))
    heads, query_form = int(rng.choice([1, 2, 5, 8, 16])), partner(rng, form, forms)
    query = Array.draw(rng, (tables.num_queries, heads, latent_size), query_form)
    return LatentCase(query, pages, tables, rule.scale, value_size)


@dataclass(frozen=True)
class WriteLatentCase:
    """New latent rows, and their slots."""

    latent: Array
    pages: Latents
    slots: np.ndarray


def write_latent(rng: np.random.Generator, forms: tuple[Format, ...]) -> WriteLatentCase:
    form = forms[int(rng.integers(0, len(forms)))]
    latent_size, _ = LATENT_SIZES[int(rng.integers(0, len(LATENT_SIZES)))]
    block_size = int(rng.choice([b for b in BLOCK_SIZES if b * latent_size <= MAX_PAGE_ELEMENTS]))
    num_blocks = int(rng.integers(2, 6))
    pages = Latents.draw(rng, (form, block_size, latent_size), num_blocks)
    slots = draw_slots(rng, num_blocks, block_size)
    latent = Array.draw(rng, (len(slots), latent_size), partner(rng, form, forms))
    return WriteLatentCase(latent, pages, slots)
