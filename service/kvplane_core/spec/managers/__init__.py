"""Group managers: one per KV cache group. Each kind of attention is a subclass of `GroupManager`, in its own file."""

from __future__ import annotations

from kvplane.base.groups import GroupKind, MambaMode
from kvplane_core.spec.managers.base import GroupManager as GroupManager
from kvplane_core.spec.managers.full import FullAttentionManager, RetainedWindowManager, SinkManager
from kvplane_core.spec.managers.mamba import AlignedStateManager
from kvplane_core.spec.managers.questions import GroupSetup as GroupSetup
from kvplane_core.spec.managers.uncached import CrossAttentionManager, RingManager, UncachedStateManager
from kvplane_core.spec.managers.window import ChunkedLocalManager, SlidingWindowManager

_BY_KIND: dict[GroupKind, type[GroupManager]] = {
    GroupKind.FULL_ATTENTION: FullAttentionManager,
    GroupKind.MLA: FullAttentionManager,
    GroupKind.SLIDING_WINDOW: SlidingWindowManager,
    GroupKind.SLIDING_WINDOW_MLA: SlidingWindowManager,
    GroupKind.CHUNKED_LOCAL: ChunkedLocalManager,
    GroupKind.CROSS: CrossAttentionManager,
    GroupKind.SINK_FULL: SinkManager,
    GroupKind.R_SWA: RetainedWindowManager,
    GroupKind.RING: RingManager,
}


def make_manager(setup: GroupSetup) -> GroupManager:
    """Make the manager for a group, of the class for its kind of attention."""
    if setup.spec.kind is GroupKind.MAMBA:
        aligned = setup.spec.mamba_mode is MambaMode.ALIGN
        return AlignedStateManager(setup) if aligned else UncachedStateManager(setup)
    return _BY_KIND[setup.spec.kind](setup)
