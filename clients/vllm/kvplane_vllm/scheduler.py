"""vLLM's schedulers with kvplane's allocator: the classes to give to `--scheduler-cls`.

`--additional-config '{"kvplane": {...}}'` has the options: `mode` ("inprocess", or "mirror" with the `address` of a
service and the name of the `replica` there), and `fallback` ("stock": for a model that kvplane does not support, use
vLLM's own KV cache manager and log a warning).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import vllm.v1.core.sched.scheduler as module
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched.output import SchedulerOutput

from kvplane.base.errors import InvalidArgument
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.spec import UnsupportedModel

logger = logging.getLogger("kvplane.vllm")
OPTIONS = {"mode": ("inprocess", "mirror"), "fallback": ("stock",)}
TEXTS = ("address", "replica")  # options with any text; only in mode "mirror", which needs them
MIRRORED_HASHES = ("sha256", "sha256_cbor")


def options_of(config: VllmConfig) -> dict[str, str]:
    """Return the options below "kvplane" of vLLM's additional config. Raises InvalidArgument for an option that is not
    supported.
    """
    given = (config.additional_config or {}).get("kvplane", {})
    if not isinstance(given, dict):
        raise InvalidArgument(f"{given!r} is not an object", field="additional_config.kvplane")
    for name, value in given.items():
        if name in TEXTS and isinstance(value, str) and value:
            continue
        if value not in OPTIONS.get(name, ()):
            allowed = " or ".join(map(repr, OPTIONS.get(name, ()))) or f"one of the options {', '.join(OPTIONS)}"
            raise InvalidArgument(f"{value!r} is not {allowed}", field=f"additional_config.kvplane.{name}")
    is_mirror = given.get("mode") == "mirror"
    for name in TEXTS:
        if is_mirror != (name in given):
            problem = "missing in mode mirror" if is_mirror else "given without mode mirror"
            raise InvalidArgument(f"{name} is {problem}", field=f"additional_config.kvplane.{name}")
    hashes = config.cache_config.prefix_caching_hash_algo
    if is_mirror and hashes not in MIRRORED_HASHES:
        raise InvalidArgument(f"{hashes} in mode mirror: use {' or '.join(MIRRORED_HASHES)}", field="hash_algo")
    connector = config.kv_transfer_config and config.kv_transfer_config.kv_connector
    if connector:
        raise InvalidArgument(f"the KV connector {connector} is not supported", field="kv_transfer_config")
    if config.parallel_config.decode_context_parallel_size > 1:
        raise InvalidArgument("decode context parallelism is not supported", field="decode_context_parallel_size")
    return given


def manager_factory(chosen: dict[str, str]) -> Callable[..., KVCacheManager]:
    """Return the function that builds the KV cache manager for these options. With `fallback`, it builds vLLM's own
    manager for a model that kvplane does not support.
    """
    manager: type[InProcessManager] = InProcessManager
    if chosen.get("mode") == "mirror":
        from kvplane_vllm.mirror import Target, mirroring  # needs gRPC

        manager = mirroring(Target(chosen["address"], chosen["replica"]))

    def build(*args: Any, **options: Any) -> KVCacheManager:
        try:
            return manager(*args, **options)
        except UnsupportedModel as error:
            if "fallback" not in chosen:
                raise
            logger.warning("vLLM's own KV cache manager is used: %s", error)
            return KVCacheManager(*args, **options)

    return build


class OnKvplane:
    """The base of both schedulers: it builds vLLM's scheduler with kvplane's KV cache manager and reports to that
    manager which steps were executed.
    """

    kv_cache_manager: Any
    running: list[Any]
    _preempt_request: Callable[..., None]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **options: Any) -> None:
        """Take the arguments of vLLM's scheduler. Raises InvalidArgument for an unsupported option, and
        UnsupportedModel for an unsupported model.
        """
        chosen = options_of(vllm_config)
        module.KVCacheManager = manager_factory(chosen)  # type: ignore[assignment,misc]
        try:
            super().__init__(vllm_config, *args, **options)  # type: ignore[call-arg]
        finally:
            module.KVCacheManager = KVCacheManager  # type: ignore[misc]
        self._managed = isinstance(self.kv_cache_manager, InProcessManager)
        if self._managed:
            self.kv_cache_manager.executed = 0

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        """See vLLM's scheduler. The output also has the number of its step."""
        if self._managed:
            self.kv_cache_manager.report_progress()
            self._take_preemptions()
        output: SchedulerOutput = super().schedule(*args, **options)  # type: ignore[misc]
        if self._managed:
            manager = self.kv_cache_manager
            manager.close_step()
            manager.send_steps()
            assert not manager.preempted, "the allocator preempted requests of the step that is being scheduled"
            output.kvplane_step = manager.seq  # type: ignore[attr-defined]
        return output

    def _take_preemptions(self) -> None:
        """Preempt, in vLLM's queues, the requests that the allocator preempted because their computed tokens were
        reduced below the blocks that they hold.
        """
        manager = self.kv_cache_manager
        for request in manager.preempted:
            if request in self.running:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        manager.preempted.clear()

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **options: Any) -> Any:
        """See vLLM's scheduler. vLLM passes the outputs in the order of their steps, each after all ranks have finished
        the step.
        """
        if self._managed:
            self.kv_cache_manager.executed = scheduler_output.kvplane_step  # type: ignore[attr-defined]
        return super().update_from_output(scheduler_output, *args, **options)  # type: ignore[misc]

    def shutdown(self) -> None:
        """See vLLM's scheduler."""
        if self._managed:
            self.kv_cache_manager.shut_down()
        super().shutdown()  # type: ignore[misc]


class Scheduler(OnKvplane, module.Scheduler):
    """vLLM's scheduler with kvplane's allocator."""


class AsyncScheduler(OnKvplane, async_scheduler.AsyncScheduler):
    """vLLM's scheduler for async scheduling with kvplane's allocator."""
