"""What this package needs of SGLang, checked when an engine starts: release, methods, fields, hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from kvplane.base.errors import FailedPrecondition
from kvplane_sglang.pools import KV, MAMBA, SWA
from kvplane_sglang.settings import LEAVE_OUT

TESTED = "0.5.23"

# Parameters of each method of `UnifiedCacheLinker`, without self.
METHODS = {
    "lookup": ("rid", "transfers"),
    "load": ("rid", "transfers"),
    "start_layer_wise_loading": (),
    "finish_layer_wise_loading": ("counter_index",),
    "cancel_queued_load": ("rid",),
    "offload": ("transfers", "session_id"),
    "num_completed_offloads": (),
    "pop_completed_offload": (),
    "reset": (),
    "close": (),
}
FIELDS = ("name", "device_indices", "keys")  # of `PoolTransfer`
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# What changes weights while the engine runs. SGLang notifies a linker only of the reset of its tree.
UPDATES = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)


def check(linker: type, transfer: type, pool_names: Any) -> None:
    """Raise FailedPrecondition unless the release is the one that was tested, and its classes `UnifiedCacheLinker`,
    `PoolTransfer` and `PoolName` have what this package uses.
    """
    found = version("sglang")
    problems = [f"it is {found}"] if found != TESTED else list(_differences(linker, transfer, pool_names))
    if problems:
        raise FailedPrecondition(
            f"kvplane_sglang runs with SGLang {TESTED} alone: {'; '.join(problems)}",
            field="sglang",
            remedy=f"install sglang=={TESTED}, or {LEAVE_OUT}",
        )


def _differences(linker: Any, transfer: Any, pool_names: Any) -> Iterator[str]:
    abstract = set(linker.__abstractmethods__)
    for name in sorted(abstract ^ METHODS.keys()):
        yield f"the linker has a method {name}" if name in abstract else f"the linker has no method {name}"
    for name in sorted(abstract & METHODS.keys()):
        _, *parameters = inspect.signature(getattr(linker, name)).parameters
        if tuple(parameters) != METHODS[name]:
            yield f"{name} takes ({', '.join(parameters)}), not ({', '.join(METHODS[name])})"
    if missing := set(FIELDS) - {one.name for one in fields(transfer)}:
        yield f"a transfer has no {', '.join(sorted(missing))}"
    if missing := {KV, SWA, MAMBA} - {one.value for one in pool_names}:
        yield f"there is no pool {', '.join(sorted(missing))}"


def before_updates(call: Callable[[], None]) -> None:
    """Have SGLang call this before each change of weights, by its own hooks, once per process. Raises
    FailedPrecondition if they do not apply: then stale pages would be loaded.
    """
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before(*_args: object, **_named: object) -> None:
        call()

    for name in UPDATES:
        HookRegistry.register(f"{UPDATER}.{name}", before, HookType.BEFORE)
    HookRegistry.apply_hooks()
    for name in UPDATES:
        if not hasattr(getattr(SchedulerWeightUpdaterManager, name, None), "__wrapped__"):
            raise FailedPrecondition(
                f"kvplane_sglang is not notified before {name} changes the weights", field="sglang", remedy=LEAVE_OUT
            )
