"""The base classes of the layer formats: LayerSpec for every format, AttentionSpec for the formats of attention layers.

A layer format states how a layer stores its part of the KV cache. The service's planner computes the KV cache groups of
a model from the formats of its layers. It reads from each format

- its memory: `page_bytes`, `blocks_per_request`, `admission_cap_blocks`, - with which other formats it can share a
block table: `merged_with`, `uniform_key`, - into which formats it can be converted: `grown_to`, `as_full_attention`.

`kvplane.base.layers` has the formats themselves. The rules are those of vLLM 0.33 (vllm/v1/kv_cache_interface.py). All
sizes are in bytes on one rank, all block sizes in tokens.
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
    """The element type of a page. The value is its name on the wire and in JSON."""

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
        """The size of one element in bytes."""
        return _DTYPE_BYTES.get(self, 1)


_DTYPE_BYTES = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that determine how many pages one request can have.

    Attributes:
        max_model_len: longest request in tokens.
        max_in_flight_tokens: most tokens that are scheduled and not executed yet; a page that left the window is
            released once these tokens are executed.
        max_encoder_tokens: longest encoder input in tokens, for cross attention.
        dcp_size: number of decode-context-parallel ranks that share a request's tokens.
    """

    max_model_len: int
    max_in_flight_tokens: int
    max_encoder_tokens: int = 0
    dcp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The abstract base class of every layer format.

    Attributes:
        block_size: tokens per block, before context-parallel scaling.
        padded_page_bytes: minimum size of a page in bytes; 0 = the size of its content.
        block_stride_alignment: the distance between two blocks is a multiple of this number of bytes.
        dcp_sharded: context-parallel ranks split this layer's tokens (False: each rank stores all tokens).
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
                refuse(f"{value} is below the minimum, {minimum}", spec_field.name, f"give {minimum} or more")
        if 0 < self.padded_page_bytes < self.content_bytes:
            refuse(
                f"a page of {self.padded_page_bytes} bytes is too small for its content of {self.content_bytes} bytes",
                "padded_page_bytes",
                f"give {self.content_bytes} or more, or 0 for a page without padding",
            )

    @property
    def content_bytes(self) -> int:
        """The size of a page in bytes, without padding."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """The size of one block of this layer in bytes, with padding."""
        return max(self.padded_page_bytes, self.content_bytes)

    @property
    def precision(self) -> DType | None:
        """The element type in which attention reads the page; None if attention does not read it."""
        return None

    @property
    def mamba_mode(self) -> MambaMode | None:
        """The caching mode of recurrent states; None for a format without states."""
        return None

    @property
    def hit_unit(self) -> int:
        """The number of tokens of which every cache hit's length is a multiple in this format."""
        return 1

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return the most blocks that one request holds at once."""
        raise NotImplementedError

    def admission_cap_blocks(self, limits: RequestLimits) -> int:
        """Return the most blocks for which a request counts in an admission that requires free blocks for the whole
        request; 0 = as many as the request's length needs.
        """
        return 0

    def merged_with(self, other: LayerSpec) -> LayerSpec | None:
        """Return a format that layers of this format and of `other` can both use; None if there is none."""
        return self if self == other else None

    @property
    def uniform_key(self) -> tuple[object, ...]:
        """A key that is equal for formats that always store the same tokens, so that one block table can serve all
        layers with the same key.
        """
        return (self.block_size, self.dcp_sharded, *self._kind_key())

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name,)

    def grown_to(self, page_bytes: int) -> LayerSpec | None:
        """Return this format with pages of `page_bytes` bytes; None if the format does not support that page size."""
        return replace(self, padded_page_bytes=page_bytes)

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """Return the full-attention format that stores the same layer; a format that is not local attention returns
        itself.
        """
        return self

    def retaining(self, extra_tokens: int) -> LayerSpec:
        """Return this format with at least `extra_tokens` tokens kept below its window; for a format without a window,
        return the format itself.
        """
        return self

    def group_fields(self) -> dict[str, Any]:
        """Return the fields of this layer's `GroupSpec` as a dict, without kind and block size."""
        return {}

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        """Return how many consecutive tensor-parallel ranks hold identical pages."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """The abstract base class of formats that store keys and values of attention heads.

    Attributes:
        num_kv_heads: key-value heads on one rank.
        head_size: elements of one key (for MLA: elements of the latent row).
        head_size_v: elements of one value; 0 = as many as a key (for MLA none).
        dtype: element type.
        state_bytes: bytes of one head's entry if it is not just key and value but, for instance, has scales; 0 = key
            and value.
        tokens_per_state: tokens that one entry covers (compressed attention); divides block_size.
        page_alignment: the size of a page is rounded up to a multiple of this number of bytes.
        state_format: name of the binary form of an entry; layers with different names never share a format.
        max_tp_shards: most tensor-parallel ranks that hold different pages; further ranks hold copies; 0 = unknown.
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
                f"{self.tokens_per_state} tokens per entry do not divide the block size of {self.block_size} tokens",
                "tokens_per_state",
                "give a divisor of block_size",
            )

    def _default_head_size_v(self) -> int:
        return self.head_size

    @property
    def content_bytes(self) -> int:
        """The size of a page in bytes, without padding."""
        entry_bytes = self.state_bytes or (self.head_size + self.head_size_v) * self.dtype.num_bytes
        return self.num_kv_heads * (self.block_size // self.tokens_per_state) * entry_bytes

    @property
    def page_bytes(self) -> int:
        """The size of one block of this layer in bytes, with padding."""
        return max(self.padded_page_bytes, round_up(self.content_bytes, self.page_alignment))

    @property
    def precision(self) -> DType | None:
        """The element type in which attention reads the page."""
        return self.dtype

    @property
    def hit_unit(self) -> int:
        """The number of tokens that one entry covers; every hit length is a multiple of it."""
        return self.tokens_per_state

    def grown_to(self, page_bytes: int) -> LayerSpec | None:
        """Return this format with pages of `page_bytes` bytes; None if the format does not support that page size.

        If the new size is a multiple of the old one, a block has more tokens; otherwise the page is padded.
        """
        if page_bytes % self.page_bytes == 0:
            block_size = self.block_size * (page_bytes // self.page_bytes)
            grown = replace(self, block_size=block_size, padded_page_bytes=0)
            return grown if grown.page_bytes == page_bytes else grown._padded_to(page_bytes)
        return self._padded_to(page_bytes)

    def _padded_to(self, page_bytes: int) -> LayerSpec | None:
        return None if page_bytes % self.page_alignment else replace(self, padded_page_bytes=page_bytes)

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        """Return how many consecutive tensor-parallel ranks hold identical pages."""
        if not self.max_tp_shards or (self.dcp_sharded and dcp_size > 1):
            return 1
        return max(1, tp_size // self.max_tp_shards)

    def _promoted(self, block_size: int) -> dict[str, Any]:
        """Return the values of the attention fields for a full-attention format with another block size."""
        values = {f.name: getattr(self, f.name) for f in fields(AttentionSpec)}
        if self.padded_page_bytes:
            content_bytes = self.content_bytes * block_size // self.block_size
            values["padded_page_bytes"] = max(self.padded_page_bytes, content_bytes)
        return {**values, "block_size": block_size}


def refuse(message: str, field_name: str, remedy: str) -> NoReturn:
    """Raise InvalidArgument for an invalid field of a layer or of its format."""
    raise InvalidArgument(message, field=field_name, remedy=remedy)


def ceil_div(value: int, divisor: int) -> int:
    """Return `value / divisor`, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is `value` or more."""
    return ceil_div(value, multiple) * multiple
