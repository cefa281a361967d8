"""kvplane for vLLM: `vllm serve MODEL --scheduler-cls kvplane_vllm.Scheduler`, with vLLM as published.

`manager` replaces vLLM's KVCacheManager by kvplane's allocator in the engine's process, `spec` derives the settings of
the block pool from vLLM's KV cache config, `views` shows the allocator's state in objects of vLLM's types, for vLLM's
scheduler and connectors, and `events` converts cache events. `options` has the options, and `connectors` the KV
connectors that run. `mirror` lets a service follow this allocator, and `remote` lets a service decide in its place.
With `pages: worker`, `pages` keeps the cache over restarts of the engine and `worker`, vLLM's worker, writes the stamps
that this needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplane_vllm.ready import Ready
    from kvplane_vllm.scheduler import AsyncScheduler, Scheduler
    from kvplane_vllm.worker import Worker

__all__ = ["AsyncScheduler", "Ready", "Scheduler", "Worker"]


def __getattr__(name: str) -> Any:
    """Import a class of this package on first use: its base class, of vLLM, takes seconds to import."""
    if name == "Worker":
        from kvplane_vllm.worker import Worker

        return Worker
    if name == "Ready":
        from kvplane_vllm.ready import Ready

        return Ready
    if name in __all__:
        from kvplane_vllm import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
