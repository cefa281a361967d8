"""The settings of one replica, and the KV cache groups of its model, as the allocator needs them.

A *KV cache group* is a set of layers whose blocks are allocated together. The allocator needs to know only how many
blocks a group uses for a number of tokens, never heads or dtypes. The planner (`kvplane_plan.planner`) computes
the groups from the layer formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from kvplane.base.errors import InvalidArgument

MAX_GROUPS = 64
MAX_HINTS = 64
MAX_BLOCKS = 1 << 28
NULL_BLOCK = 0  # has no page: the entry of a table where a request has no block
MAX_TOKENS = 1 << 30


class GroupKind(Enum):
    """How the layers of a group use blocks. The value is the name of the kind in the proto file and in cache events."""

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
    """Whether a recurrent state is not cached, or cached at block boundaries ("align", as vLLM calls it)."""

    NONE = "none"
    ALIGN = "align"


class CommitRule(Enum):
    """When other requests may use a block that a request fills.

    SAFE: once the step that fills the block is executed. Until then the block's key is tentative: it is removed if the
    step does not run. REFERENCE: as soon as the key is registered, before the step is executed, as in vLLM 0.33.
    """

    SAFE = "safe"
    REFERENCE = "reference"


class EvictionPolicy(Enum):
    """Which cached block is evicted first, where no block without a key is left.

    LRU: the block that was used least recently, the end of a prefix before its beginning, as in vLLM. WINDOW_TAIL: the
    blocks that left the window of a running request (or its chunk), except those that a repeat or a continuation of its
    prompt needs; then as LRU. TURN_TAIL: as WINDOW_TAIL, and where hits can end inside blocks, what a later turn of a
    conversation supersedes goes first too, and states rest with the other blocks of their request. HAZARD: as
    WINDOW_TAIL; then the blocks that are least worth their place until their next use, as the replica learns it from
    its traffic, while that hits more than LRU.
    """

    LRU = "lru"
    WINDOW_TAIL = "window_tail"
    TURN_TAIL = "turn_tail"
    HAZARD = "hazard"


class Planner(Enum):
    """How layers are distributed over groups.

    REFERENCE: as vLLM 0.33 does, which an engine expects that lays out its tensors itself. BEST: the cheapest of both
    layouts and several group widths, where requests of no length hold more memory than with REFERENCE. SPLIT: as
    REFERENCE, but the blocks of attention are those of its kernel, and a state takes several of them
    (`ReplicaSpec.blocks_per_state`). BEST and SPLIT are for engines that use the placement that kvplane returns.
    """

    REFERENCE = "reference"
    BEST = "best"
    SPLIT = "split"


class HashAlgorithm(Enum):
    """The algorithm of the block hashes (see `kvplane.base.hashing`). The value is the name used on the wire."""

    KVPLANE = "kvplane"
    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


_PAGE_BYTES = 4096


class TierKind(Enum):
    """Where a tier (a place for blocks that leave the device) keeps its blocks. The value is the name on the wire."""

    HOST = "host"
    DISK = "disk"
    PEERS = "peers"  # what the host tiers of other replicas of the namespace have, read only

    def slot_bytes(self, block_bytes: int) -> int:
        """Return the memory of a slot on one rank: whole pages of 4 KiB, on a disk with one more for the seal.

        `block_bytes`: bytes of a block of the widest group on that rank.
        """
        return -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES * (self is TierKind.DISK)


class Medium(IntEnum):
    """The memory that a cache event is about: the device, or a tier of this kind."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    PEERS = 3


class SavePolicy(Enum):
    """When blocks are copied into a tier from the place before it: the device, or the tier before.

    BEHIND: just before that place evicts them. THROUGH: as soon as they are computed or stored there, so that they
    survive its loss. REUSE: when they are computed or hit there a second time, or loaded from there; what is used once
    is never copied.
    """

    BEHIND = "behind"
    THROUGH = "through"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier: a place outside the device where blocks with a key are saved before they are evicted.

    Attributes:
        kind: where the blocks are.
        num_blocks: slots of the tier; each has room for one block of any group.
        save: when blocks are copied into it.
        checkpoint_percent: of the first tier: groups of windows and states also keep what hits need that end inside a
            prompt, so often that it takes this percentage of the blocks of all other groups; 0 = only where
            `retention_interval` says.
        retained_percent: of the slots that may be retained for one owner, at most the owner's own percentage; 0 = what
            is retained on the device is evicted here like any other.
    """

    kind: TierKind
    num_blocks: int
    save: SavePolicy = SavePolicy.BEHIND
    checkpoint_percent: int = 0
    retained_percent: int = 0

    @property
    def most_retained(self) -> int:
        """The slots that may be retained for one owner."""
        return self.num_blocks * self.retained_percent // 100


DENSE_RETENTION = -1
_LOOKED_UP_AS = {
    GroupKind.MLA: GroupKind.FULL_ATTENTION,
    GroupKind.SINK_FULL: GroupKind.FULL_ATTENTION,
    GroupKind.R_SWA: GroupKind.FULL_ATTENTION,
    GroupKind.SLIDING_WINDOW_MLA: GroupKind.SLIDING_WINDOW,
}


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The settings of one KV cache group.

    Attributes:
        kind: how the layers use blocks.
        block_size: tokens per block of the pool, after context-parallel scaling.
        window: sliding window in tokens (window kinds and R_SWA), else 0.
        chunk: attention chunk in tokens (CHUNKED_LOCAL), else 0.
        mamba_mode: MAMBA only: whether states are cached.
        speculative_blocks: MAMBA only: number of states kept for draft tokens, in addition to the state of the last
            accepted token.
        sink_tokens: SINK_FULL only: leading tokens whose blocks the group always holds; a multiple of block_size.
        is_draft: the group holds draft (EAGLE / MTP) layers.
        drops_last_block: a prefix look-up omits the last matched block, because the drafter recomputes it.
        admission_cap_blocks: most blocks that one request holds at once, used by admissions that require free blocks
            for the whole request; 0 = no cap.
        zero_new_blocks: the pages of newly allocated blocks must be zeroed before use.
        lookup_class: a number; groups with the same number have equal layer formats and one common cache look-up. 0 in
            all groups, where formats differ: unset, see `ReplicaSpec.lookup_classes`.
        layer_names: names of the layers, in model order; information only.
        page_bytes: bytes of one block over all layers of the group; information only.
        extra_retained_tokens: window kinds: tokens below the window whose blocks are kept for a prefill with drafts.
        checkpoint_alignment: MAMBA in mode ALIGN only: a launch also writes the state inside its chunk from which a
            repeat of its tokens continues, if the distance from the chunk's start is a multiple of this number of
            tokens (see `kvplane.base.checkpoints`); 0 = a launch writes the state at its chunk's end only.
        checkpoints_single_group_hits: MAMBA in mode ALIGN only: a chunk that would pass the single-group hit (the
            longest prefix that some group has cached alone) ends there also inside a block, and the state is cached.
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
    checkpoint_alignment: int = 0
    checkpoints_single_group_hits: bool = False

    @property
    def is_cached(self) -> bool:
        """Whether look-ups can find blocks of the group."""
        if self.kind is GroupKind.MAMBA:
            return self.mamba_mode is MambaMode.ALIGN
        return self.kind not in (GroupKind.CROSS, GroupKind.RING)

    @property
    def lookup_form(self) -> tuple[object, ...]:
        """What the look-up of a group depends on, as far as groups with one look-up must not differ in it.

        Whether the last matched block is left out is no part of it: then it is left out for all of them. Nor is what
        decides how many blocks a group keeps: a joint look-up needs a block of every group.
        """
        kind = _LOOKED_UP_AS.get(self.kind, self.kind)
        return kind, self.block_size, self.window * (kind is GroupKind.SLIDING_WINDOW), self.chunk

    def admission_cap(self, max_model_len: int) -> int:
        """Return `admission_cap_blocks`, raised to what the longest request holds; 0 = no cap.

        Under a lower cap a request that the pool has no room for would be admitted, and never run on.
        """
        spans = dict.fromkeys((GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA), self.window - 1)
        spans |= dict.fromkeys((GroupKind.CROSS, GroupKind.RING, GroupKind.MAMBA), 1)
        span = min(spans.get(self.kind, self.chunk or max_model_len), max_model_len)
        return self.admission_cap_blocks and max(self.admission_cap_blocks, -(-span // self.block_size))

    @property
    def checkpoint_blocks(self) -> int:
        """The blocks that a hit at the end of a long prefix needs in a group of windows or states; 0 for others."""
        if self.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA):
            return -(-(self.window - 1) // self.block_size) + self.drops_last_block
        return int(self.kind is GroupKind.MAMBA and self.mamba_mode is MambaMode.ALIGN)

    def validate(self, name: str) -> None:
        """Raise InvalidArgument for a value that is invalid for this kind of group; the error's field is
        `name.<attribute>`.
        """
        _require(
            1 <= self.block_size <= MAX_TOKENS, f"{name}.block_size", self.block_size, f"must be 1 to {MAX_TOKENS}"
        )
        windowed = self.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.R_SWA)
        _require((self.window > 0) == windowed, f"{name}.window", self.window, f"must be {_sized(windowed, self.kind)}")
        chunked = self.kind is GroupKind.CHUNKED_LOCAL
        _require((self.chunk > 0) == chunked, f"{name}.chunk", self.chunk, f"must be {_sized(chunked, self.kind)}")
        sinks = self.kind is GroupKind.SINK_FULL
        found = self.sink_tokens
        _require((found > 0) == sinks, f"{name}.sink_tokens", found, f"must be {_sized(sinks, self.kind)}")
        whole = f"must be a multiple of block_size, {self.block_size}"
        _require(found % self.block_size == 0, f"{name}.sink_tokens", found, whole)
        for field_name in ("speculative_blocks", "admission_cap_blocks", "extra_retained_tokens"):
            found = getattr(self, field_name)
            _require(found >= 0, f"{name}.{field_name}", found, "must be 0 or more")
        aligned = self.kind is GroupKind.MAMBA and self.mamba_mode is MambaMode.ALIGN
        found = self.checkpoint_alignment
        expected = "0 or more" if aligned else "0 for a group without cached states (kind mamba, mamba_mode align)"
        _require(found == 0 or (aligned and found > 0), f"{name}.checkpoint_alignment", found, f"must be {expected}")
        flag = self.checkpoints_single_group_hits
        expected = "must be false for a group without cached states (kind mamba, mamba_mode align)"
        _require(aligned or not flag, f"{name}.checkpoints_single_group_hits", flag, expected)


class Drafter(Enum):
    """What proposes the draft tokens, if it has layers in the block pool."""

    NONE = "none"  # no drafts, or an n-gram or suffix drafter
    EAGLE = "eagle"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class AlignSpec:
    """Where a prefill chunk must end so that its recurrent state can be cached (vLLM's mamba split).

    Attributes:
        block_size: chunks end at multiples of this number of tokens; 0 = at any token.
        chunk_limit: most tokens that a chunk can ever have; a block with more tokens is computed in several chunks.
        stop_at_tail: a chunk also ends at the last hash block boundary of the prompt, so that a hit can end inside a
            block.
    """

    block_size: int = 0
    chunk_limit: int = 0
    stop_at_tail: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The settings that determine how a replica's block pool behaves.

    Attributes:
        groups: the KV cache groups, at least one; a group's index is its id everywhere.
        num_blocks: blocks in the pool, including block 0, the null block, which is never allocated.
        max_model_len: longest request in tokens.
        hash_block_size: tokens per block hash; divides the block size of every group that is cached.
        scheduler_block_size: the length of a cache hit is a multiple of this number of tokens (with partial_hits, of
            hash_block_size).
        max_in_flight_tokens: most tokens that are scheduled and not yet executed.
        hash_algorithm: algorithm of the block hashes.
        hash_seed: seed of the block hashes; "" = the algorithm's default.
        enable_caching: whether prefix caching is on.
        retention_interval: window and state groups keep one tail (the blocks that a hit ending there needs) per this
            number of tokens; 0 = only the tails at the replay boundary (the last hit alignment before the prompt's end)
            and at single-group hits (the longest prefix that some group has cached alone); DENSE_RETENTION = every
            block.
        partial_hits: hits may end inside a block, which is then copied.
        watermark_blocks: blocks that stay free when a request is admitted while other requests run.
        commit: from when on other requests may use a cached block.
        hash_lookahead_tokens: tokens after a block that its hash also covers (drafters with several modules).
        prefill_lookahead: draft tokens per step of such a drafter; the blocks of the last ones are not cached yet.
        keep_divergence_boundary: whether to keep also the tail that ends one hit alignment below the replay boundary,
            so that a prompt that differs only inside its last block still has a hit (vLLM #57610). False = as in vLLM.
        align: where prefill chunks end for recurrent state.
        events: whether step results contain cache events.
        eviction: which cached block is evicted first.
        tiers: places for blocks that leave the device, the nearest first; () = an evicted block is lost.
        hint_values: values of `News.hint` that the engine distinguishes, 0 included; 0 = it sends no hints.
        blocks_per_state: consecutive blocks that a state takes; their first one, a multiple of this number, names it in
            tables, orders and events. A block of attention is one block. 1 = a state takes a block too.
        pool: where the blocks of the pool are; HOST = in host memory, as the tier of a device that has another
            allocator. Changes no decision; cache events that are published name it.
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
    eviction: EvictionPolicy = field(default=EvictionPolicy.LRU, repr=False)  # see state.spec_digest
    tiers: tuple[TierSpec, ...] = field(default=(), repr=False)
    hint_values: int = field(default=0, repr=False)
    blocks_per_state: int = field(default=1, repr=False)
    pool: Medium = field(default=Medium.DEVICE, repr=False)

    @property
    def hit_alignment(self) -> int:
        """The number of tokens of which every cache hit's length is a multiple."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @property
    def lookup_classes(self) -> tuple[int, ...]:
        """The look-up class of each group, in order of their first groups: as stated, or if all are 0, one per form."""
        cached = [group for group in self.groups if group.is_cached]
        stated, numbers = any(group.lookup_class for group in cached), dict[object, int]()
        names = [(group.lookup_class if stated else group.lookup_form, group.is_cached) for group in self.groups]
        return tuple(numbers.setdefault(name if name[1] else None, len(numbers)) for name in names)

    @property
    def normalized(self) -> ReplicaSpec:
        """The spec as the allocator takes it, with `lookup_classes` and `admission_cap`: equal for equal decisions."""
        caps = [group.admission_cap(self.max_model_len) for group in self.groups]
        stated = zip(self.groups, self.lookup_classes, caps, strict=True)
        groups = (replace(one, lookup_class=number, admission_cap_blocks=cap) for one, number, cap in stated)
        return replace(self, groups=tuple(groups))

    @property
    def num_stamps(self) -> int:
        """The number of stamps of a stamp table: one per block of the device, then one per slot of each tier."""
        return self.num_blocks + sum(tier.num_blocks for tier in self.tiers)

    @property
    def checkpoint_percent(self) -> int:
        """The percentage that the first tier has for checkpoints; 0 without tiers."""
        return self.tiers[0].checkpoint_percent if self.tiers else 0

    @property
    def kept_every(self) -> int:
        """The tokens between the windows and states that are kept: `retention_interval`, or what `checkpoint_percent`
        of the first tier comes to, in multiples of `scheduler_block_size`.
        """
        percent, unit = self.checkpoint_percent, self.scheduler_block_size
        if not percent:
            return self.retention_interval
        checkpoint = sum(group.checkpoint_blocks for group in self.groups)
        others = sum(unit // group.block_size for group in self.groups if not group.checkpoint_blocks)  # per unit
        return -(-100 * checkpoint // (percent * max(1, others))) * unit

    def validate(self) -> None:
        """Raise InvalidArgument for the first setting that is impossible; the error's field names it."""
        groups, blocks = len(self.groups), self.num_blocks
        _require(1 <= groups <= MAX_GROUPS, "groups", f"{groups} entries", f"must have 1 to {MAX_GROUPS} entries")
        null_block = "one of them is the null block, which is never allocated"
        _require(2 <= blocks <= MAX_BLOCKS, "num_blocks", blocks, f"must be 2 to {MAX_BLOCKS}; {null_block}")
        for name in ("max_model_len", "hash_block_size", "max_in_flight_tokens"):
            found = getattr(self, name)
            _require(1 <= found <= MAX_TOKENS, name, found, f"must be 1 to {MAX_TOKENS}")
        _require(
            self.scheduler_block_size > 0 and self.scheduler_block_size % self.hash_block_size == 0,
            "scheduler_block_size",
            self.scheduler_block_size,
            f"must be a multiple of hash_block_size, {self.hash_block_size}",
        )
        below = f"must be 0 or more and below num_blocks, {blocks}"
        _require(0 <= self.watermark_blocks < blocks, "watermark_blocks", self.watermark_blocks, below)
        interval = self.retention_interval
        _require(interval >= DENSE_RETENTION, "retention_interval", interval, "must be -1 (every block) or more")
        for name in ("hash_lookahead_tokens", "prefill_lookahead"):
            found = getattr(self, name)
            _require(found >= 0, name, found, "must be 0 or more")
        of_state = self.blocks_per_state
        whole = f"must be 1 or more, divide num_blocks, {blocks}, and be at most half of it"
        _require(1 <= of_state <= max(1, blocks // 2) and not blocks % of_state, "blocks_per_state", of_state, whole)
        pool = self.pool
        _require(pool in (Medium.DEVICE, Medium.HOST), "pool", pool.name.lower(), "must be device or host")
        hints = self.hint_values
        _require(0 <= hints <= MAX_HINTS, "hint_values", hints, f"must be 0 to {MAX_HINTS}")
        for index, group in enumerate(self.groups):
            group.validate(f"groups[{index}]")
        for index, tier in enumerate(self.tiers):
            found, name = tier.num_blocks, f"tiers[{index}].num_blocks"
            _require(1 <= found <= MAX_BLOCKS, name, found, f"must be 1 to {MAX_BLOCKS}")
            found, name = tier.checkpoint_percent, f"tiers[{index}].checkpoint_percent"
            _require(0 <= found <= 100, name, found, "must be 0 to 100")
            _require(not (index and found), name, found, "must be 0: checkpoints come through the first tier")
            found, name = tier.retained_percent, f"tiers[{index}].retained_percent"
            _require(0 <= found <= 100, name, found, "must be 0 to 100")
        kinds = [tier.kind for tier in self.tiers]
        ordered = [kind for kind in TierKind if kind in kinds]
        names = [kind.value for kind in kinds]
        _require(kinds == ordered, "tiers", names, "must name each kind once, host before disk or peers")
        if TierKind.PEERS in kinds:
            lent = [TierKind.HOST] if pool is Medium.DEVICE else []  # the memory that peers read
            what = "host and peers" if lent else "peers alone, because the pool is in host memory"
            _require(kinds == [*lent, TierKind.PEERS], "tiers", names, f"must be {what}, without a disk")
            peers, name = self.tiers[-1], f"tiers[{len(lent)}]"
            is_plain = peers.save is SavePolicy.BEHIND and not peers.retained_percent
            _require(is_plain, name, "save or retained_percent", "nothing is saved or retained at peers")


def _sized(used: bool, kind: GroupKind) -> str:
    return f"1 or more for a group of kind {kind.value}" if used else f"0 for a group of kind {kind.value}"


def _require(holds: bool, field_name: str, found: object, remedy: str) -> None:
    if not holds:
        raise InvalidArgument(f"{found} is out of range", field=field_name, remedy=f"it {remedy}")
