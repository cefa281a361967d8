"""Refuses replica specs whose fields contradict each other; `ReplicaSpec.validate` checks each field alone."""

from __future__ import annotations

from functools import lru_cache

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import CommitRule, EvictionPolicy, GroupKind, GroupSpec, HashAlgorithm, MambaMode, ReplicaSpec
from kvplane.base.hashing import HashScheme

MAX_TABLE_ENTRIES = 1 << 20
_SPARSE_KINDS = (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.MAMBA)
_SPLIT_KINDS = (
    GroupKind.FULL_ATTENTION,
    GroupKind.MLA,
    GroupKind.SLIDING_WINDOW,
    GroupKind.SLIDING_WINDOW_MLA,
    GroupKind.MAMBA,
)


def check_spec(spec: ReplicaSpec) -> None:
    """Raise InvalidArgument, naming the field, if fields of the spec contradict each other.

    Raises FailedPrecondition if the Python package for its hash function is not installed.
    """
    spec.validate()
    for number, group in enumerate(spec.groups):
        _check_sizes(spec, group, f"groups[{number}]")
        if spec.enable_caching:
            _check_caching(spec, group, f"groups[{number}]")
    _check_retention(spec)
    if spec.enable_caching:
        _check_drafts(spec)
        _check_classes(spec)
    check_tiers(spec)
    _check_split(spec)
    HashScheme.of(spec)
    sinks = sum(group.sink_tokens // group.block_size for group in spec.groups)
    _require(
        sinks < spec.num_blocks - 1, "num_blocks", f"{sinks} sink blocks leave none to allocate of {spec.num_blocks}"
    )


def _check_sizes(spec: ReplicaSpec, group: GroupSpec, name: str) -> None:
    _require(
        spec.max_model_len <= MAX_TABLE_ENTRIES * group.block_size,
        f"{name}.block_size",
        f"a request of {spec.max_model_len} tokens would have a table of more than {MAX_TABLE_ENTRIES} blocks",
    )
    _require(
        not group.is_cached or spec.scheduler_block_size % group.block_size == 0,
        f"{name}.block_size",
        f"{group.block_size} does not divide scheduler_block_size {spec.scheduler_block_size}",
    )


def _check_caching(spec: ReplicaSpec, group: GroupSpec, name: str) -> None:
    _require(
        group.kind is not GroupKind.CROSS,
        f"{name}.kind",
        "decoder blocks depend on the encoder's input, which no hash covers; turn caching off",
    )
    _require(
        group.kind is not GroupKind.MAMBA or group.mamba_mode is MambaMode.ALIGN,
        f"{name}.mamba_mode",
        "recurrent state can only be cached in mode align; turn caching off or use align",
    )
    junctions = group.checkpoints_single_group_hits
    drops = any(one.drops_last_block for one in spec.groups)
    _require(
        not junctions or (spec.partial_hits and drops and spec.prefill_lookahead <= 1),
        f"{name}.checkpoints_single_group_hits",
        "a state inside a block needs partial_hits, a group that drops_last_block, and prefill_lookahead of 0 or 1",
    )
    if not group.is_cached:
        return
    _require(
        group.block_size % spec.hash_block_size == 0,
        f"{name}.block_size",
        f"{group.block_size} is not a multiple of hash_block_size {spec.hash_block_size}",
    )
    _require(
        len(spec.groups) > 1 or group.block_size == spec.hash_block_size,
        "hash_block_size",
        f"{spec.hash_block_size} is not the block size of the only group, {group.block_size}",
    )
    if group.kind is GroupKind.CHUNKED_LOCAL:
        _require(
            group.block_size == spec.hit_alignment,
            f"{name}.block_size",
            f"{group.block_size} is not the hit alignment {spec.hit_alignment}, which chunked local attention needs",
        )
        _require(not group.drops_last_block, f"{name}.drops_last_block", "chunked local attention cannot drop a block")
    windows = group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
    _require(
        not (spec.partial_hits and windows and group.block_size != spec.hash_block_size),
        "partial_hits",
        f"{name} looks up whole blocks of {group.block_size}; hits inside a block need every group to take part",
    )


def _check_classes(spec: ReplicaSpec) -> None:
    """All groups of a class are looked up by the rule of the first one: one of another form would hit what it lacks."""
    first: dict[int, int] = {}
    for number, (group, one) in enumerate(zip(spec.groups, spec.lookup_classes, strict=True)):
        other = first.setdefault(one, number)
        _require(
            not group.is_cached or group.lookup_form == spec.groups[other].lookup_form,
            f"groups[{number}].lookup_class",
            f"{group.lookup_class} is also the class of groups[{other}], which has another format",
            "give groups of one class equal kinds, blocks, windows and chunks, or leave 0 in all groups",
        )


def _check_retention(spec: ReplicaSpec) -> None:
    interval = spec.retention_interval
    if interval <= 0:
        return
    _require(
        any(group.kind in _SPARSE_KINDS for group in spec.groups),
        "retention_interval",
        f"{interval} has no effect without a sliding window or state group; use 0",
    )
    _require(
        interval % spec.scheduler_block_size == 0,
        "retention_interval",
        f"{interval} is not a multiple of scheduler_block_size {spec.scheduler_block_size}",
    )


def _check_split(spec: ReplicaSpec) -> None:
    if spec.blocks_per_state == 1:
        return
    for number, group in enumerate(spec.groups):
        possible = group.kind in _SPLIT_KINDS
        _require(possible, f"groups[{number}].kind", f"{group.kind.value} cannot share superblocks with states")
    has_states = any(group.kind is GroupKind.MAMBA for group in spec.groups)
    has_others = any(group.kind is not GroupKind.MAMBA for group in spec.groups)
    _require(has_states and has_others, "blocks_per_state", "only states and attention together share superblocks")
    _require(spec.commit is CommitRule.SAFE, "commit", "blocks_per_state above 1 needs commit=safe")
    _require(spec.eviction is EvictionPolicy.LRU, "eviction", "blocks_per_state above 1 needs the policy lru")
    _require(not spec.tiers, "tiers", "a slot has room for one block: blocks_per_state above 1 has no tiers")


def _check_drafts(spec: ReplicaSpec) -> None:
    drafts = any(group.is_draft or group.drops_last_block for group in spec.groups)
    _require(
        not drafts or spec.scheduler_block_size >= spec.prefill_lookahead,
        "scheduler_block_size",
        f"{spec.scheduler_block_size} is below prefill_lookahead {spec.prefill_lookahead}: a block holds all drafts",
    )


def _require(holds: bool, field: str, message: str, remedy: str = "") -> None:
    if not holds:
        raise InvalidArgument(message, field=field, remedy=remedy)


def num_reserved(spec: ReplicaSpec) -> int:
    """Return the number of blocks that no request gets: the null block, or those of the null state, and sinks."""
    sinks = sum(group.sink_tokens // group.block_size for group in spec.groups)
    return max(1 + sinks, spec.blocks_per_state)


def states_for_drafts(spec: ReplicaSpec) -> int | None:
    """Return how many draft tokens can be rejected without losing a recurrent state; None if the replica has no such
    states.
    """
    return min((group.speculative_blocks for group in spec.groups if group.kind is GroupKind.MAMBA), default=None)


@lru_cache(maxsize=4096)
def replay_boundaries(num_prompt: int, unit: int, drops_last_block: bool, keep_divergence: bool) -> tuple[int, ...]:
    """Return the positions, in tokens, at which the computation of a later request that repeats this prompt can begin.

    An identical prompt begins at the latest with its last token; a longer prompt at the end of this one. Where look-ups
    leave out the last matched block, both positions are one block lower. `keep_divergence` adds the position one
    alignment unit lower, for prompts that differ inside their last block (vLLM #57610).
    """
    if not drops_last_block:
        boundaries = {num_prompt - 1}
    else:
        resend = (num_prompt - 1) // unit * unit
        extension = num_prompt // unit * unit
        boundaries = {max(resend - unit, 0), max(extension - unit, 0)}
    if keep_divergence:
        boundaries |= {max(boundary // unit * unit - unit, 0) for boundary in boundaries}
    return tuple(sorted(boundaries))


def hits_end_in_prompt(spec: ReplicaSpec) -> bool:
    """Whether no hit is longer than the prompt: a request with a retained window computes its tokens behind the prompt
    without those in the gap.
    """
    return spec.commit is CommitRule.SAFE and any(group.kind is GroupKind.R_SWA for group in spec.groups)


SLACK = 32


def state_groups(spec: ReplicaSpec) -> frozenset[int]:
    """Return the numbers of the groups of states."""
    return frozenset(number for number, group in enumerate(spec.groups) if group.kind is GroupKind.MAMBA)


AHEAD_SHARE = 2  # at most one of this number of blocks of the pool is looked at: a prompt may take most of a small pool


SLOT_SHARE = 2  # the same of the slots that they are copied to: more would evict each other there, and be copied again


def most_ahead(spec: ReplicaSpec) -> int:
    """Return the number of blocks of a pool that are looked at, at most."""
    places = [spec.num_blocks // AHEAD_SHARE, *(tier.num_blocks // SLOT_SHARE for tier in spec.tiers[:1])]
    return max(1, min(places))


_WEAK = (HashAlgorithm.XXHASH, HashAlgorithm.XXHASH_CBOR)


def check_tiers(spec: ReplicaSpec) -> None:
    """Raise InvalidArgument, naming the field, if the replica cannot have its tiers."""
    if not spec.tiers:
        return
    if not spec.enable_caching:
        raise InvalidArgument("without prefix caching no block has a key", field="tiers", remedy="turn caching on")
    if spec.commit is not CommitRule.SAFE:
        raise InvalidArgument(
            "only content whose step is executed is saved", field="tiers", remedy="use commit=safe with tiers"
        )
    if spec.checkpoint_percent:
        _check_checkpoints(spec)
    if spec.hash_algorithm in _WEAK:
        raise InvalidArgument(
            f"{spec.hash_algorithm.value} is no cryptographic hash, and a tier outlives the makers of its keys",
            field="hash_algorithm",
            remedy="use kvplane, sha256 or sha256_cbor with tiers",
        )


def _check_checkpoints(spec: ReplicaSpec) -> None:
    field = "tiers[0].checkpoint_percent"
    if spec.retention_interval:
        what = f"retention_interval {spec.retention_interval} already says what is kept"
        raise InvalidArgument(what, field=field, remedy="set one of the two to 0")
    for has_checkpoints, kinds in ((True, "windows or states"), (False, "attention that keeps all blocks")):
        if not any(bool(group.checkpoint_blocks) is has_checkpoints for group in spec.groups):
            what = f"{spec.checkpoint_percent} has no effect without a group of {kinds}"
            raise InvalidArgument(what, field=field, remedy="set it to 0")
