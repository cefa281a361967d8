"""Caching local layers as if they attended to everything: one table, more memory, the same computation."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind
from kvplane_service.core.planner.formats import Formats, Grouping, is_uniform_type, one_format, uniform_group
from kvplane_service.core.planner.hidden import split_hidden
from kvplane_service.core.planner.plan import PlanWarning, WarningCode


def without_hybrid(formats: Formats) -> tuple[Formats, tuple[PlanWarning, ...]]:
    """Formats that keep every token, for an engine that turned hybrid allocation off.

    Layers that context-parallel ranks replicate are treated apart from those that they split.

    Raises:
        InvalidArgument: the layers cannot all be allocated alike.
    """
    parts: dict[bool, Formats] = {}
    for name, spec in formats.items():
        replicated = not spec.is_state and not spec.dcp_sharded
        parts.setdefault(replicated, {})[name] = spec
    changed: Formats = {}
    for part in parts.values():
        promoted = _promoted(part)
        if promoted is None:
            raise InvalidArgument(
                "the model's layers cannot be allocated alike",
                field="hybrid",
                remedy="turn it on for this model",
            )
        changed |= {name: spec for name, spec in promoted.items() if spec != part[name]}
    if not changed:
        return formats, ()
    message = f"hybrid allocation is off: {len(changed)} local layers keep every token"
    return {**formats, **changed}, (PlanWarning(WarningCode.HYBRID_OFF, message),)


def rescued(formats: Formats) -> Grouping | None:
    """One group for latent attention and a sliding draft whose pages cannot be made equal; else None."""
    kinds = {spec.kind for spec in formats.values()}
    unsupported = kinds & {GroupKind.SLIDING_WINDOW_MLA, GroupKind.CHUNKED_LOCAL}
    if unsupported or not {GroupKind.MLA, GroupKind.SLIDING_WINDOW} <= kinds:
        return None
    if split_hidden(formats)[0]:
        return None
    promoted = _promoted(formats)
    if promoted is None or not is_uniform_type(promoted):
        return None
    message = "page sizes cannot be made equal: sliding-window layers keep every token"
    return Grouping((uniform_group(promoted),), (PlanWarning(WarningCode.FULL_ALLOCATION, message),))


def _promoted(formats: Formats) -> Formats | None:
    """Local layers as full attention, where there is any; None when the result is not of one type."""
    if _alike(formats):
        return formats
    full_block_sizes = {spec.block_size for spec in formats.values() if spec.holds_every_token}
    if not full_block_sizes:
        return None
    common = full_block_sizes.pop() if len(full_block_sizes) == 1 else 0
    promoted = {name: spec.as_full_attention(common or spec.block_size) for name, spec in formats.items()}
    return promoted if _alike(promoted) else None


def _alike(formats: Formats) -> bool:
    return one_format(formats) is not None or is_uniform_type(formats)
