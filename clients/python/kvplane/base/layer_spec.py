"""The base classes of layer cache formats: of every format, and of every attention format.

The planner turns a model's layers into KV cache groups. It reads from each format

- its cost: `page_bytes`, `blocks_per_request`, `admission_cap_blocks`,
- the formats with which it can share a block table: `merged_with`, `uniform_key`,
- its variants: `grown_to`, `as_full_attention`.

The kinds themselves are in `kvplane.base.layers`. Facts follow vLLM 0.33 (vllm/v1/kv_cache_interface.py).
All sizes are bytes on one rank, all block sizes are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, NoReturn

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, MambaMode

ONE_OR_MORE = {"minimum": 1}
ZERO_OR_MORE = {"minimum": 0}


class DType(Enum):
    """Element type of a page. The value is its name on the wire and in JSON."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    UINT8 = "uint8"
    INT8 = "int8"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES.get(self, 1)


_DTYPE_BYTES = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that bound the pages of one request.

    Attributes:
        max_model_len: longest request in tokens.
        max_in_flight_tokens: most tokens scheduled and not executed yet, which delay the release of window pages.
        max_encoder_tokens: longest encoder input, for cross attention.
        dcp_size: decode-context-parallel ranks that share a request's tokens.
    """

    max_model_len: int
    max_in_flight_tokens: int
    max_encoder_tokens: int = 0
    dcp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The base class of every format. Abstract.

    Attributes:
        block_size: tokens per block, before context-parallel scaling.
        padded_page_bytes: minimum size of a page; 0 = the size of its content.
        block_stride_alignment: the stride between blocks is a multiple of this many bytes.
        dcp_sharded: context-parallel ranks split this layer's tokens (otherwise each holds all of them).
    """

    type_name: ClassVar[str]  # unique; the name in JSON
    kind: ClassVar[GroupKind]  # how the allocator treats a group of such layers
    prefix_cacheable: ClassVar[bool] = True  # pages can be shared between requests
    holds_every_token: ClassVar[bool] = False  # a page for each token of the request stays while it runs
    fine_grained_hits: ClassVar[bool] = False  # a look-up can end inside a block
    sparse_retention: ClassVar[bool] = False  # the retention interval says which pages are kept
    supports_dcp: ClassVar[bool] = False  # may be dcp_sharded over more than one rank
    zeroes_new_blocks: ClassVar[bool] = False  # new blocks are zeroed where the model asks for it
    is_state: ClassVar[bool] = False  # one recurrent state per page, read before it is written

    block_size: int = field(metadata=ONE_OR_MORE)
    padded_page_bytes: int = field(default=0, metadata=ZERO_OR_MORE)
    block_stride_alignment: int = field(default=1, metadata=ONE_OR_MORE)
    dcp_sharded: bool = False

    def __post_init__(self) -> None:
        for spec_field in fields(self):
            minimum = spec_field.metadata.get("minimum")
            value = getattr(self, spec_field.name)
            if minimum is not None and value < minimum:
                refuse(f"{value} is below {minimum}", spec_field.name, f"give {minimum} or more")
        if 0 < self.padded_page_bytes < self.content_bytes:
            refuse(
                f"{self.padded_page_bytes} bytes do not hold the page's {self.content_bytes}",
                "padded_page_bytes",
                "give 0 to leave the page unpadded",
            )

    @property
    def content_bytes(self) -> int:
        """Bytes of a page without padding."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this layer, with padding."""
        return max(self.padded_page_bytes, self.content_bytes)

    @property
    def precision(self) -> DType | None:
        """Type in which attention reads the page; None where a page is not read by attention."""
        return None

    @property
    def mamba_mode(self) -> MambaMode | None:
        """How states are cached; None for a format without states."""
        return None

    @property
    def hit_unit(self) -> int:
        """The length of a hit is a multiple of this many tokens."""
        return 1

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Most blocks that one request holds at once."""
        raise NotImplementedError

    def admission_cap_blocks(self, limits: RequestLimits) -> int:
        """Most blocks that the full-sequence check counts for one request; 0 = no cap below its length."""
        return 0

    def merged_with(self, other: LayerSpec) -> LayerSpec | None:
        """The format that layers of both can share, or None."""
        return self if self == other else None

    @property
    def uniform_key(self) -> tuple[object, ...]:
        """Layers of equal keys always need the same token slots, so one block table can serve them all."""
        return (self.block_size, self.dcp_sharded, *self._kind_key())

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name,)

    def grown_to(self, page_bytes: int) -> LayerSpec | None:
        """This format with larger pages of `page_bytes`; None when its pages cannot be padded to that size."""
        return replace(self, padded_page_bytes=page_bytes)

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """The format that keeps every token, for local attention; any other format is returned unchanged."""
        return self

    def retaining(self, extra_tokens: int) -> LayerSpec:
        """This format with at least `extra_tokens` kept below its window; unchanged without a window."""
        return self

    def group_fields(self) -> dict[str, Any]:
        """The fields of a `GroupSpec` of this kind other than kind and block size."""
        return {}

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        """Consecutive tensor-parallel ranks that hold identical pages."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Keys and values of a number of heads. Abstract.

    Attributes:
        num_kv_heads: key-value heads on one rank.
        head_size: elements of one key (of the latent row for MLA).
        head_size_v: elements of one value; 0 = as the key (none for MLA).
        dtype: element type.
        state_bytes: bytes of one head's entry when it is packed, with scales for instance; 0 = key and value.
        tokens_per_state: tokens that one entry covers (compressed attention); divides block_size.
        page_alignment: the page is padded to a multiple of this many bytes.
        state_format: name of the packed form; layers of different forms never share one format.
        max_tp_shards: most tensor-parallel ranks that hold different pages; further ranks hold replicas; 0 = unknown.
    """

    zeroes_new_blocks: ClassVar[bool] = True

    num_kv_heads: int = field(metadata=ONE_OR_MORE)
    head_size: int = field(metadata=ONE_OR_MORE)
    head_size_v: int = field(default=0, metadata=ZERO_OR_MORE)
    dtype: DType
    state_bytes: int = field(default=0, metadata=ZERO_OR_MORE)
    tokens_per_state: int = field(default=1, metadata=ONE_OR_MORE)
    page_alignment: int = field(default=1, metadata=ONE_OR_MORE)
    state_format: str = ""
    max_tp_shards: int = field(default=0, metadata=ZERO_OR_MORE)
    dcp_sharded: bool = True

    def __post_init__(self) -> None:
        if not self.head_size_v:
            object.__setattr__(self, "head_size_v", self._default_head_size_v())
        LayerSpec.__post_init__(self)
        if self.block_size % self.tokens_per_state:
            refuse(
                f"{self.tokens_per_state} tokens do not divide a block of {self.block_size}",
                "tokens_per_state",
                "give a divisor of block_size",
            )

    def _default_head_size_v(self) -> int:
        return self.head_size

    @property
    def content_bytes(self) -> int:
        """Bytes of a page without padding."""
        entry_bytes = self.state_bytes or (self.head_size + self.head_size_v) * self.dtype.num_bytes
        return self.num_kv_heads * (self.block_size // self.tokens_per_state) * entry_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this layer, with padding."""
        return max(self.padded_page_bytes, round_up(self.content_bytes, self.page_alignment))

    @property
    def precision(self) -> DType | None:
        """Type in which attention reads the page."""
        return self.dtype

    @property
    def hit_unit(self) -> int:
        """The tokens of one entry."""
        return self.tokens_per_state

    def grown_to(self, page_bytes: int) -> LayerSpec | None:
        """More tokens per block when the ratio is whole, else padding."""
        if page_bytes % self.page_bytes == 0:
            block_size = self.block_size * (page_bytes // self.page_bytes)
            grown = replace(self, block_size=block_size, padded_page_bytes=0)
            return grown if grown.page_bytes == page_bytes else grown._padded_to(page_bytes)
        return self._padded_to(page_bytes)

    def _padded_to(self, page_bytes: int) -> LayerSpec | None:
        return None if page_bytes % self.page_alignment else replace(self, padded_page_bytes=page_bytes)

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        """Consecutive tensor-parallel ranks that hold identical pages."""
        if not self.max_tp_shards or (self.dcp_sharded and dcp_size > 1):
            return 1
        return max(1, tp_size // self.max_tp_shards)

    def _promoted(self, block_size: int) -> dict[str, Any]:
        """The attention fields with another block size, to build a format that keeps every token."""
        values = {f.name: getattr(self, f.name) for f in fields(AttentionSpec)}
        if self.padded_page_bytes:
            content_bytes = self.content_bytes * block_size // self.block_size
            values["padded_page_bytes"] = max(self.padded_page_bytes, content_bytes)
        return {**values, "block_size": block_size}


def refuse(message: str, field_name: str, remedy: str) -> NoReturn:
    """Raise InvalidArgument for a field of a format."""
    raise InvalidArgument(message, field=field_name, remedy=remedy)


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return ceil_div(value, multiple) * multiple
