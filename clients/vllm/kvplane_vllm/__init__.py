"""kvplane for vLLM: `vllm serve MODEL --scheduler-cls kvplane_vllm.Scheduler`, with vLLM as published.

`manager` replaces vLLM's KVCacheManager by kvplane's allocator in the engine's process, `spec` derives the settings of
the block pool from vLLM's KV cache config, `views` shows the allocator's state in objects of vLLM's types, for vLLM's
scheduler and connectors, and `events` converts cache events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplane_vllm.scheduler import AsyncScheduler, Scheduler

__all__ = ["AsyncScheduler", "Scheduler"]


def __getattr__(name: str) -> Any:
    """Import a scheduler class of this package on first use: vLLM's scheduler, its base class,
    takes seconds to import.
    """
    if name in __all__:
        from kvplane_vllm import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
