"""Invalid calls that every backend refuses: one valid call per operation, with one argument changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    DeltaInputs,
    GroupPages,
    LatentPages,
    PagedOps,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
)

ROWS, BLOCKS, BLOCK_SIZE, KV_HEADS, Q_HEADS, SIZE = 3, 6, 16, 2, 4, 8
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """A valid call with one invalid argument.

    Attributes:
        field: the field that the error must name.
        what: description.
        spoil: function that changes the arguments of the valid call, in place.
    """

    operation: str
    field: str
    what: str
    spoil: Callable[[Arguments], None]


def call(ops: PagedOps, operation: str, arguments: Arguments) -> Any:
    return getattr(ops, operation)(**arguments)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in the arguments of a call."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, tuple):
        return [t for part in value for t in tensors(part)]
    fields = getattr(value, "__dataclass_fields__", ())
    return [t for name in fields for t in tensors(getattr(value, name))]


def valid_call(operation: str, device: str) -> Arguments:
    """Arguments of a small valid call, in float32."""
    with torch.device(device):
        return VALID_CALLS[operation]()


def floats(*shape: int) -> Tensor:
    return torch.full(shape, 0.5)


def attention_pages() -> AttentionPages:
    return AttentionPages(floats(BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE), floats(BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE))


def batch(query_start: Tensor | None = None) -> Batch:
    table = torch.tensor([[1, 2], [3, 0], [4, 0]], dtype=torch.int32)
    return Batch(table, torch.tensor([20, 3, 1], dtype=torch.int32), query_start)


def attention_call(query_start: Tensor | None = None) -> Arguments:
    query = floats(ROWS, Q_HEADS, SIZE)
    return {
        "query": query,
        "pages": attention_pages(),
        "batch": batch(query_start),
        "rule": AttentionRule(0.3),
        "lse": None,
    }


def write_call() -> Arguments:
    new = floats(2, KV_HEADS, SIZE)
    return {"pages": attention_pages(), "key": new, "value": new.clone(), "slots": torch.tensor([17, -1])}


def write_latent_call() -> Arguments:
    return {
        "pages": LatentPages(floats(BLOCKS, BLOCK_SIZE, SIZE)),
        "latent": floats(2, SIZE),
        "slots": torch.tensor([17, -1]),
    }


def mla_call() -> Arguments:
    query, pages = floats(ROWS, Q_HEADS, SIZE), LatentPages(floats(BLOCKS, BLOCK_SIZE, SIZE))
    return {"query": query, "pages": pages, "batch": batch(), "scale": 0.3, "value_size": 5}


def state_call() -> Arguments:
    heads, size, state_size, width = 2, 4, 3, 4
    channels = heads * size + 2 * state_size
    return {
        "pages": StatePages(floats(BLOCKS, channels, width - 1), floats(BLOCKS, heads, size, state_size)),
        "inputs": StateInputs(*rows(), floats(2, channels), floats(2, heads)),
        "weights": StateWeights(floats(channels, width), floats(channels), -floats(heads), floats(heads)),
    }


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of one token each: starts, blocks read and written."""
    start, read, write = (torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 2], [1, 0], [2, 3]))
    return start, read, write


def convolve_call() -> Arguments:
    channels, width = 5, 4
    return {
        "conv": floats(BLOCKS, channels, width - 1),
        "rows": StateRows(*rows()),
        "x": floats(2, channels),
        "weight": floats(channels, width),
        "bias": floats(channels),
    }


def scan_call() -> Arguments:
    channels, size = 5, 3
    tokens = floats(2, channels), floats(2, channels), floats(2, size), floats(2, size)
    inputs = ScanInputs(*rows(), *tokens)
    return {"states": floats(BLOCKS, channels, size), "inputs": inputs, "a": -floats(channels, size), "d": floats(5)}


def delta_call() -> Arguments:
    heads, key_heads, value, key = 4, 2, 5, 3
    keys = floats(2, key_heads, key)
    inputs = DeltaInputs(*rows(), keys, keys.clone(), floats(2, heads, value), -floats(2, heads), floats(2, heads))
    return {"states": floats(BLOCKS, heads, value, key), "inputs": inputs}


def group() -> GroupPages:
    layers = (torch.full((BLOCKS, size), 7, dtype=torch.uint8) for size in (32, 48))
    return GroupPages(tuple(layers))


def staging(rows: int) -> Tensor:
    return torch.zeros(rows, 80, dtype=torch.uint8)


VALID_CALLS: dict[str, Callable[[], Arguments]] = {
    "write_kv": write_call,
    "decode_attention": attention_call,
    "prefill_attention": lambda: attention_call(torch.tensor([0, 1, 2, 3], dtype=torch.int32)),
    "write_latent": write_latent_call,
    "mla_decode": mla_call,
    "state_step": state_call,
    "convolve": convolve_call,
    "selective_scan": scan_call,
    "gated_delta_rule": delta_call,
    "copy_pages": lambda: {"group": group(), "src": [1, 0], "dst": [2, 3]},
    "zero_pages": lambda: {"group": group(), "blocks": [1, 2]},
    "gather": lambda: {"group": group(), "blocks": [0, 2], "staging": staging(2)},
    "scatter": lambda: {"group": group(), "blocks": [1, 2], "staging": staging(2)},
    "checksum": lambda: {"group": group(), "blocks": [0, 2]},
}


PER_TOKEN = tuple(name for name in VALID_CALLS if "group" not in VALID_CALLS[name]())
PAGES = ("pages", "conv", "states", "weights", "weight", "bias", "a", "d")


def without_rows(operation: str, device: str) -> Arguments:
    """Arguments of a valid call whose batch has no row, and so no token."""

    def shortened(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:0]
        fields = getattr(value, "__dataclass_fields__", {})
        cut = {name: shortened(getattr(value, name)) for name in fields}
        starts = getattr(value, "query_start", None)
        return replace(value, **cut | ({} if starts is None else {"query_start": starts[:1]})) if fields else value

    given = valid_call(operation, device)
    return {name: value if name in PAGES else shortened(value) for name, value in given.items()}


def put(path: str, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    """Change the argument, or its field, that `path` names."""

    def spoil(arguments: Arguments) -> None:
        name, _, field = path.partition(".")
        value = arguments[name]
        arguments[name] = replace(value, **{field: change(getattr(value, field))}) if field else change(value)

    return spoil


def bad(operation: str, path: str, what: str, change: Callable[[Any], Any], *, field: str = "") -> Bad:
    return Bad(operation, field or path, what, put(path, change))


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def window_and_chunk(rule: AttentionRule) -> AttentionRule:
    return replace(rule, window=4, chunk=4)


def without_heads(pages: AttentionPages) -> AttentionPages:
    return AttentionPages(pages.k[:, :, :0], pages.v[:, :, :0])


def with_host(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    """Add host tables of which one is changed."""

    def added(batch: Batch) -> Batch:
        host = batch.on_host()
        return replace(batch, host=replace(host, **{name: change(getattr(host, name))}))

    return added


HOST: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    ("block_table", "fewer rows", lambda table: table[1:]),
    ("seq_lens", "of 32 bits", lambda lens: lens.int()),
    ("query_start", "as long as rows", lambda start: start[1:]),
    ("query_start", "on another device", lambda start: start.to("meta")),
)


def whole_numbers(layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (layers[0].int(), *layers[1:])


def fewer_blocks(layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (layers[0], layers[1][1:])


ATTENTION = ("decode_attention", "prefill_attention")
IDS = {"zero_pages": "blocks", "gather": "blocks", "scatter": "blocks", "checksum": "blocks", "copy_pages": "src"}

BAD: list[Bad] = [
    *(
        case
        for op in ATTENTION
        for case in (
            bad(op, "query", "of another type than the pages", lambda q: q.bfloat16()),
            bad(op, "query", "of whole numbers", lambda q: q.int()),
            bad(op, "query", "of another head size", lambda q: q[..., :-1]),
            bad(op, "query", "heads no multiple of the pages'", lambda q: q[:, :3]),
            bad(op, "query", "no heads", lambda q: q[:, :0]),
            bad(op, "query", "two dimensions", lambda q: q[0]),
            bad(op, "query", "on another device", lambda q: q.to("meta")),
            bad(op, "rule", "window and chunk", window_and_chunk, field="rule.chunk"),
            bad(op, "rule.scale", "NaN", to(float("nan"))),
            bad(op, "pages", "no heads", without_heads, field="pages.k"),
            bad(op, "rule.window", "below 0", to(-1)),
            bad(op, "rule.chunk", "below 0", to(-1)),
            bad(op, "rule.sinks", "one for each key-value head", to(torch.zeros(KV_HEADS))),
            bad(op, "rule.slopes", "one for each key-value head", to(torch.zeros(KV_HEADS))),
            bad(op, "rule.soft_cap", "below 0", to(-1.0)),
            bad(op, "lse", "for fewer queries", to(torch.zeros(1, 4))),
            bad(op, "lse", "not contiguous", to(torch.zeros(4, 3).T)),
            bad(op, "batch.seq_lens", "of 64 bits", lambda lens: lens.long()),
            bad(op, "batch.seq_lens", "for fewer rows", lambda lens: lens[:-1]),
            bad(op, "batch.block_table", "of 64 bits", lambda table: table.long()),
            bad(op, "batch.block_table", "one dimension", lambda table: table[0]),
            *(
                bad(op, "batch", f"{name} on the host: {what}", with_host(name, change), field=f"batch.host.{name}")
                for name, what, change in HOST
            ),
            bad(op, "pages.v", "fewer blocks than keys", lambda v: v[:-1]),
            bad(op, "pages.v", "of another type than keys", lambda v: v.half()),
            bad(op, "pages.k_scale", "given for float32", to(torch.ones(1))),
            bad(op, "pages.k", "of a type without kernels", lambda k: k.to(torch.float8_e4m3fnuz)),
        )
    ),
    bad("decode_attention", "batch.query_start", "given", to(torch.arange(4).int())),
    bad("decode_attention", "query", "more than rows", lambda q: torch.cat([q, q])),
    bad("prefill_attention", "batch.query_start", "as long as rows", to(torch.arange(3).int())),
    bad("write_kv", "key", "of another type than the pages", lambda k: k.double()),
    bad("write_kv", "key", "other heads than the pages", lambda k: k[:, :1]),
    bad("write_kv", "value", "fewer than keys", lambda v: v[:1]),
    bad("write_kv", "value", "of another type than keys", lambda v: v.half()),
    bad("write_kv", "slots", "of 32 bits", lambda s: s.int()),
    bad("write_kv", "slots", "fewer than tokens", lambda s: s[:1]),
    bad("write_kv", "slots", "on another device", lambda s: s.to("meta")),
    bad(
        "write_latent", "pages.rows", "8-bit without a scale", lambda p: p.to(torch.float8_e4m3fn), field="pages.scale"
    ),
    bad("mla_decode", "pages.scale", "given for float32", to(torch.ones(1))),
    bad("write_latent", "latent", "of another size", lambda x: x[:, 1:]),
    bad("write_latent", "latent", "of another type", lambda x: x.double()),
    bad("write_latent", "slots", "more than tokens", lambda s: torch.cat([s, s])),
    bad("mla_decode", "query", "of another size", lambda q: q[..., 1:]),
    bad("mla_decode", "query", "of another type", lambda q: q.double()),
    bad("mla_decode", "query", "no heads", lambda q: q[:, :0]),
    bad("mla_decode", "scale", "infinite", to(float("inf"))),
    bad("mla_decode", "value_size", "more than the latent", to(SIZE + 1)),
    bad("mla_decode", "value_size", "nothing", to(0)),
    bad("prefill_attention", "batch.tree", "fewer than queries", to(torch.ones(2, dtype=torch.int64))),
    bad("prefill_attention", "batch.tree", "of 32 bits", to(torch.ones(3, dtype=torch.int32))),
    bad("decode_attention", "batch.tree", "without query starts", to(torch.ones(3, dtype=torch.int64))),
    bad("state_step", "inputs.x", "other channels", lambda x: x[:, 1:]),
    bad("state_step", "inputs.dt", "fewer than tokens", lambda dt: dt[1:]),
    bad("state_step", "inputs.write_block", "of 64 bits", lambda w: w.long()),
    bad("state_step", "inputs.query_start", "as long as rows", lambda s: s[1:]),
    bad("state_step", "pages.conv", "fewer blocks than ssm", lambda c: c[1:]),
    bad("state_step", "weights.conv_weight", "of another width", lambda w: w[:, 1:]),
    bad("state_step", "weights.a", "fewer than heads", lambda a: a[1:]),
    bad("convolve", "x", "other channels", lambda x: x[:, 1:]),
    bad("convolve", "x", "of another type than the states", lambda x: x.half()),
    bad("convolve", "rows.read_block", "of 64 bits", lambda r: r.long()),
    bad("convolve", "rows.query_start", "as long as rows", lambda s: s[1:]),
    bad("convolve", "rows.write_block", "fewer than tokens", lambda w: w[1:]),
    bad("convolve", "weight", "of another width", lambda w: w[:, 1:]),
    bad("convolve", "bias", "fewer than channels", lambda b: b[1:]),
    bad("selective_scan", "states", "of Mamba-2", lambda s: s[..., None]),
    bad("selective_scan", "inputs.x", "other channels", lambda x: x[:, 1:]),
    bad("selective_scan", "inputs.dt", "one for all channels", lambda dt: dt[:, :1]),
    bad("selective_scan", "inputs.b", "another size of states", lambda b: b[:, 1:]),
    bad("selective_scan", "inputs.c", "fewer than tokens", lambda c: c[1:]),
    bad("selective_scan", "inputs.write_block", "on another device", lambda w: w.to("meta")),
    bad("selective_scan", "a", "one for each channel", lambda a: a[:, 0]),
    bad("selective_scan", "d", "of whole numbers", lambda d: d.int()),
    bad("gated_delta_rule", "states", "of Mamba-1", lambda s: s[:, 0]),
    bad("gated_delta_rule", "inputs.k", "three heads for four", lambda k: torch.cat([k, k[:, :1]], dim=1)),
    bad("gated_delta_rule", "inputs.k", "no heads", lambda k: k[:, :0]),
    bad("gated_delta_rule", "inputs.q", "fewer heads than keys", lambda q: q[:, :1]),
    bad("gated_delta_rule", "inputs.v", "another size of values", lambda v: v[..., 1:]),
    bad("gated_delta_rule", "inputs.g", "of one element of a key", lambda g: g[..., None]),
    bad("gated_delta_rule", "inputs.g", "of a head too few", lambda g: g[:, 1:, None].expand(-1, -1, 3)),
    bad("gated_delta_rule", "inputs.beta", "fewer than tokens", lambda b: b[1:]),
    bad("gated_delta_rule", "inputs.query_start", "of 64 bits", lambda s: s.long()),
    bad("copy_pages", "dst", "fewer than sources", to([2])),
    bad("copy_pages", "dst", "the null block", to([2, 0])),
    bad("copy_pages", "dst", "outside the pool", to([2, BLOCKS])),
    bad("zero_pages", "blocks", "the null block", to([1, 0])),
    bad("scatter", "blocks", "the null block", to([1, 0])),
    bad("scatter", "blocks", "a block twice", to([1, 1])),
    *(bad(op, field, "outside the pool", to([1, BLOCKS])) for op, field in IDS.items()),
    *(bad(op, field, "below 0", to([1, -1])) for op, field in IDS.items()),
    *(
        case
        for op in ("gather", "scatter")
        for case in (
            bad(op, "staging", "fewer rows than blocks", lambda s: s[:1]),
            bad(op, "staging", "narrower than a block", lambda s: s[:, 1:]),
            bad(op, "staging", "not of bytes", lambda s: s.int()),
            bad(op, "staging", "on another device", lambda s: s.to("meta")),
        )
    ),
    *(bad(op, "group.layers", "no layer", to(())) for op in IDS),
    *(bad(op, "group.layers", "not of bytes", whole_numbers, field="group.layers[0]") for op in IDS),
    *(bad(op, "group.layers", "fewer blocks", fewer_blocks, field="group.layers[1]") for op in IDS),
]
