"""The allocator's view of a model: its KV cache groups, and the settings of one replica.

A *KV cache group* is a set of layers whose blocks are allocated together. The allocator needs only how the
group spends blocks over tokens, never heads or dtypes; the planner (`kvplane_service.core.planner`) reduces
layer formats to this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvplane.base.errors import InvalidArgument

MAX_GROUPS = 64
MAX_BLOCKS = 1 << 28
NULL_BLOCK = 0  # has no page: the entry of a table where a request has no block
MAX_TOKENS = 1 << 30


class GroupKind(Enum):
    """How a kind of layer uses blocks. The value is the name used on the wire and in events."""

    FULL_ATTENTION = "full_attention"
    MLA = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"
    CROSS = "cross_attention"
    SINK_FULL = "sink_full_attention"
    R_SWA = "r_swa"
    RING = "ring"


class MambaMode(Enum):
    """How a recurrent state is cached: not at all, or at block boundaries ("align" in the reference)."""

    NONE = "none"
    ALIGN = "align"


class CommitRule(Enum):
    """When other requests may hit a key.

    SAFE: keys of steps that were not executed yet are tentative, and are withdrawn when their step does not run.
    REFERENCE: as in vLLM 0.33, as soon as it is registered.
    """

    SAFE = "safe"
    REFERENCE = "reference"


class HashAlgorithm(Enum):
    """How block hashes are made (see `kvplane.base.hashing`). The value is the name used on the wire."""

    KVPLANE = "kvplane"
    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


DENSE_RETENTION = -1


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group.

    Attributes:
        kind: how its layers use blocks.
        block_size: tokens per block of the pool, after context-parallel scaling.
        window: sliding window in tokens (window kinds and R_SWA), else 0.
        chunk: attention chunk in tokens (CHUNKED_LOCAL), else 0.
        mamba_mode: MAMBA only.
        speculative_blocks: MAMBA only, states kept for draft tokens in addition to the running one.
        sink_tokens: SINK_FULL only, tokens whose blocks the group always holds; a multiple of block_size.
        is_draft: the group holds draft (EAGLE / MTP) layers.
        drops_last_block: a look-up drops the last matched block, which the drafter recomputes.
        admission_cap_blocks: most blocks one request holds at once, for the full-sequence check; 0 = no cap.
        zero_new_blocks: newly handed out blocks must be zeroed before use.
        lookup_class: groups of one class have equal layer formats and are looked up jointly.
        layer_names: the layers, in model order; information only.
        page_bytes: bytes of one block over all layers of the group; information only.
        extra_retained_tokens: window kinds, tokens kept below the window for a prefill that looks ahead.
    """

    kind: GroupKind
    block_size: int
    window: int = 0
    chunk: int = 0
    mamba_mode: MambaMode = MambaMode.NONE
    speculative_blocks: int = 0
    sink_tokens: int = 0
    is_draft: bool = False
    drops_last_block: bool = False
    admission_cap_blocks: int = 0
    zero_new_blocks: bool = False
    lookup_class: int = 0
    layer_names: tuple[str, ...] = ()
    page_bytes: int = 0
    extra_retained_tokens: int = 0

    def validate(self, name: str) -> None:
        """Raise InvalidArgument, naming `name.<field>`, for a value that is invalid for this kind of group."""
        _require(1 <= self.block_size <= MAX_TOKENS, f"{name}.block_size", "must be 1 or more")
        windowed = self.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.R_SWA)
        _require((self.window > 0) == windowed, f"{name}.window", "must be given exactly for window kinds")
        chunked = self.kind is GroupKind.CHUNKED_LOCAL
        _require((self.chunk > 0) == chunked, f"{name}.chunk", "must be given exactly for chunked local")
        sinks = self.kind is GroupKind.SINK_FULL
        _require((self.sink_tokens > 0) == sinks, f"{name}.sink_tokens", "must be given exactly for sinks")
        _require(self.sink_tokens % self.block_size == 0, f"{name}.sink_tokens", "must be whole blocks")
        _require(self.speculative_blocks >= 0, f"{name}.speculative_blocks", "must be 0 or more")
        _require(self.admission_cap_blocks >= 0, f"{name}.admission_cap_blocks", "must be 0 or more")
        _require(self.extra_retained_tokens >= 0, f"{name}.extra_retained_tokens", "must be 0 or more")


class Drafter(Enum):
    """What proposes draft tokens, if it has layers in the pool."""

    NONE = "none"  # no drafts, or an n-gram or suffix drafter
    EAGLE = "eagle"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class AlignSpec:
    """How prefill chunks are clipped for recurrent state (vLLM's mamba split; conformance STEPS section 7).

    Attributes:
        block_size: chunks end at multiples of it; 0 = no clipping.
        chunk_limit: most tokens one chunk can ever have; a block larger than this advances in parts.
        stop_at_tail: also stop at the last hash boundary of the prompt (partial hits).
    """

    block_size: int = 0
    chunk_limit: int = 0
    stop_at_tail: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Everything that determines the behaviour of a replica's block pool.

    Attributes:
        groups: at least one; the index is the group id used everywhere.
        num_blocks: blocks in the pool, including block 0, the null block, which is never allocated.
        max_model_len: longest request in tokens.
        hash_block_size: tokens per block hash; divides every cacheable group's block size.
        scheduler_block_size: hits are multiples of it (of hash_block_size when partial_hits).
        max_in_flight_tokens: most tokens scheduled and not yet executed.
        hash_algorithm, hash_seed: of the block hashes; "" = the algorithm's default seed.
        enable_caching: whether prefix caching is on.
        retention_interval: window and state groups keep one tail per this number of tokens; 0 = replay boundaries
            and single-group hits only, DENSE_RETENTION = every block.
        partial_hits: hits may end inside a block (copy on write).
        watermark_blocks: blocks left free when a request is admitted while others run.
        commit: see CommitRule.
        hash_lookahead_tokens: tokens after a block that its hash also covers (multi-module drafters).
        prefill_lookahead: drafts per step of a multi-module drafter; blocks within it are not yet cached.
        keep_divergence_boundary: also keep the boundary one alignment below the replay boundary, so that a
            prompt that diverges inside its last block keeps its hit (vLLM #57610). Off = as the reference.
        align: prefill clipping for recurrent state.
        events: record cache events in step results.
    """

    groups: tuple[GroupSpec, ...]
    num_blocks: int
    max_model_len: int
    hash_block_size: int
    scheduler_block_size: int
    max_in_flight_tokens: int
    hash_algorithm: HashAlgorithm = HashAlgorithm.KVPLANE
    hash_seed: str = ""
    enable_caching: bool = True
    retention_interval: int = 0
    partial_hits: bool = False
    watermark_blocks: int = 0
    commit: CommitRule = CommitRule.SAFE
    hash_lookahead_tokens: int = 0
    prefill_lookahead: int = 0
    keep_divergence_boundary: bool = False
    align: AlignSpec = field(default_factory=AlignSpec)
    events: bool = True

    @property
    def hit_alignment(self) -> int:
        """Every hit length is a multiple of this many tokens."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    def validate(self) -> None:
        """Raise InvalidArgument, naming the field, for an impossible replica."""
        _require(1 <= len(self.groups) <= MAX_GROUPS, "groups", f"must have 1 to {MAX_GROUPS} entries")
        _require(2 <= self.num_blocks <= MAX_BLOCKS, "num_blocks", f"must be 2 to {MAX_BLOCKS}, one is null")
        _require(1 <= self.max_model_len <= MAX_TOKENS, "max_model_len", f"must be 1 to {MAX_TOKENS}")
        _require(1 <= self.hash_block_size <= MAX_TOKENS, "hash_block_size", "must be 1 or more")
        _require(
            self.scheduler_block_size > 0 and self.scheduler_block_size % self.hash_block_size == 0,
            "scheduler_block_size",
            "must be a multiple of hash_block_size",
        )
        _require(1 <= self.max_in_flight_tokens <= MAX_TOKENS, "max_in_flight_tokens", "must be 1 or more")
        _require(0 <= self.watermark_blocks < self.num_blocks, "watermark_blocks", "must be below num_blocks")
        _require(self.retention_interval >= DENSE_RETENTION, "retention_interval", "must be -1 or more")
        _require(self.hash_lookahead_tokens >= 0, "hash_lookahead_tokens", "must be 0 or more")
        _require(self.prefill_lookahead >= 0, "prefill_lookahead", "must be 0 or more")
        for index, group in enumerate(self.groups):
            group.validate(f"groups[{index}]")


def _require(holds: bool, field_name: str, remedy: str) -> None:
    if not holds:
        raise InvalidArgument("value out of range", field=field_name, remedy=f"it {remedy}")
