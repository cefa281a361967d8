"""vLLM's schedulers with kvplane's allocator. `Scheduler` is the class to give to `--scheduler-cls`.

`--additional-config '{"kvplane": {...}}'` has the options (`options`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import vllm.v1.core.sched.scheduler as module
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from kvplane.base.errors import InvalidArgument
from kvplane_core.face.loader import core_of
from kvplane_vllm import connectors, needed
from kvplane_vllm.known import STREAMS, check_proof, withhold_hashes
from kvplane_vllm.launch import ATTRIBUTE
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.options import options_of, worker_addresses
from kvplane_vllm.pages import PagesOfWorker
from kvplane_vllm.spec import UnsupportedModel, refuse_replay
from kvplane_vllm.state_offers import StateOffers
from kvplane_vllm.target import target_of

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM


def manager_factory(
    chosen: dict[str, str], addresses: Sequence[str], hash_algorithm: str
) -> Callable[..., KVCacheManager]:
    """Return the function that builds the KV cache manager for these options. With `fallback`, it builds vLLM's own
    manager for a model that kvplane does not support. With `addresses`, kvplane workers there lend the pages.
    """
    manager: type[InProcessManager] = PagesOfWorker if addresses else InProcessManager
    if chosen.get("mode") == "mirror":
        from kvplane_vllm.mirror import mirroring  # needs gRPC

        manager = mirroring(target_of(chosen), bool(addresses))
    manager = type(manager.__name__, (manager,), {"hash_algorithm": hash_algorithm})

    def build(kv_cache_config: KVCacheConfig, *args: Any, **options: Any) -> KVCacheManager:
        if addresses:
            refuse_replay(kv_cache_config)
            return manager(kv_cache_config, *args, addresses=addresses, **options)
        try:
            refuse_replay(kv_cache_config)
            return manager(kv_cache_config, *args, **options)
        except UnsupportedModel as error:
            if "fallback" not in chosen:
                raise
            logger.warning("vLLM's own KV cache manager is used: %s", error)
            return KVCacheManager(kv_cache_config, *args, **options)

    return build


class OnKvplane:
    """The base of both schedulers: it builds vLLM's scheduler with kvplane's KV cache manager and reports to that
    manager which steps were executed.
    """

    kv_cache_manager: Any
    connector: Any
    running: list[Any]
    requests: dict[str, Any]
    kv_holding_waiting: Any
    _enqueue_waiting_request: Callable[[Any], None]
    hash_block_size: int
    num_spec_tokens: int
    _preempt_request: Callable[..., None]
    get_request_counts: Callable[[], tuple[int, int]]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **options: Any) -> None:
        """Take the arguments of vLLM's scheduler. Raises FailedPrecondition for a version of vLLM that lacks what this
        adapter needs, InvalidArgument for an unsupported option, and UnsupportedModel for an unsupported model.
        """
        chosen = options_of(vllm_config)
        is_remote, addresses = chosen.get("mode") == "remote", worker_addresses(vllm_config, chosen)
        needed.check(is_remote=is_remote)
        if is_remote:
            from kvplane_vllm.remote.scheduler import OnService, remote_manager  # needs gRPC

            module.KVCacheManager = remote_manager(vllm_config, chosen, addresses)  # type: ignore[assignment,misc]
        else:
            algorithm = vllm_config.cache_config.prefix_caching_hash_algo
            factory = manager_factory(chosen, addresses, algorithm)
            module.KVCacheManager = factory  # type: ignore[assignment,misc]
        try:
            super().__init__(vllm_config, *args, **options)  # type: ignore[call-arg]
        finally:
            module.KVCacheManager = KVCacheManager  # type: ignore[misc]
        self.on_service: OnService | None = None
        if is_remote:
            is_async = isinstance(self, async_scheduler.AsyncScheduler)
            self.on_service = OnService(self, vllm_config, chosen, is_async=is_async)
        self._managed = isinstance(self.kv_cache_manager, InProcessManager)
        if self._managed:
            connectors.check_groups(vllm_config, self.connector, self.kv_cache_manager.spec)
            if self.connector is not None:
                self.kv_cache_manager.state_offers = StateOffers(self.kv_cache_manager.replica)
            self.kv_cache_manager.executed = 0
            # Without drafts, only a failed load or a session sets a request back; its next row reports that.
            self._reports = bool(self.num_spec_tokens) or not self.kv_cache_manager.only_full_attention
        logger.info("kvplane decides: %s", self._description(chosen))

    def add_request(self, request: Any) -> None:
        """See vLLM's scheduler. A request whose keys prove nothing, such as an image without an identifier, gets no
        hashes: vLLM would let it hit what another one has computed. The next input of a streaming session ends those
        of the session.
        """
        try:
            if request._block_hasher is not None:
                check_proof(request, self.hash_block_size)
        except InvalidArgument as error:
            session = self.requests.get(request.request_id)
            logger.warning("%s is not cached: %s", request.request_id, error)
            for one in (request, session) if session is not None else (request,):
                withhold_hashes(one)
        super().add_request(request)  # type: ignore[misc]

    def _description(self, chosen: dict[str, str]) -> str:
        core = "vLLM's own manager"
        if self.on_service is not None:
            core = "of the service"
        elif self._managed:
            core = "Python" if core_of(self.kv_cache_manager.replica) == "python" else "compiled"
        service = f"{chosen['address']} (replica {chosen['replica']})" if "address" in chosen else "none"
        parts = {"mode": chosen.get("mode", "inprocess"), "core": core, "service": service}
        parts |= {"pages": chosen.get("pages", "own"), "scheduler": type(self).__name__}
        return ", ".join(f"{name} {value}" for name, value in parts.items())

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        """See vLLM's scheduler. The output also has the number of its step."""
        if self.on_service is not None:
            decided = self.on_service.schedule(super().schedule, self._preempt)  # type: ignore[misc]
            self.kv_cache_manager.link.report_waiting(self.get_request_counts()[1])
            return decided
        if self._managed and self._reports:
            self.kv_cache_manager.report_progress()
        if self._managed and self.kv_cache_manager.preempted:
            preempted, self.kv_cache_manager.preempted = self.kv_cache_manager.preempted, []
            self._preempt(preempted)
        output: SchedulerOutput = super().schedule(*args, **options)  # type: ignore[misc]
        if self._managed:
            manager = self.kv_cache_manager
            manager.close_step()
            manager.send_steps(self.get_request_counts()[1])
            output.kvplane_step = manager.seq  # type: ignore[attr-defined]
            if isinstance(manager, PagesOfWorker):
                setattr(output, ATTRIBUTE, manager.take_launch())
        return output

    def _preempt(self, requests: list[Any], drop_stale_output: bool = False) -> None:
        """Preempt, in vLLM's queues, requests that lost their blocks: the allocator preempted them because their
        computed tokens were reduced below the blocks that they hold, the service began a new engine life, or a load
        failed. In the last case the tokens of launches in flight are dropped.

        A session that waits for its turn, or for its next input, waits with those that hold no blocks, and starts over.
        """
        for request in requests:
            if request in self.running:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output)
            elif request.num_computed_tokens and request.status in (RequestStatus.WAITING, STREAMS):
                self.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
                self.kv_holding_waiting.remove_requests([request])
                self._enqueue_waiting_request(request)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """See vLLM's scheduler. vLLM passes the outputs in the order of their steps, each after all ranks have finished
        the step.
        """
        failed = connectors.failed_blocks(model_runner_output) if self._managed else ()
        if failed:
            connectors.withdraw(self.kv_cache_manager, failed)
        if self._managed:
            self.kv_cache_manager.step_executed(scheduler_output.kvplane_step)  # type: ignore[attr-defined]
        elif self.on_service is not None:
            self.on_service.executed(scheduler_output)
        updated = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if failed:
            self._preempt(connectors.readers(self.kv_cache_manager, self.running, failed), drop_stale_output=True)
        if self.on_service is not None:
            self.on_service.updated()
        return updated

    def shutdown(self) -> None:
        """See vLLM's scheduler."""
        if self._managed or self.on_service is not None:
            self.kv_cache_manager.shut_down()
        super().shutdown()  # type: ignore[misc]


class Scheduler(OnKvplane, module.Scheduler):
    """vLLM's scheduler with kvplane's allocator: the asynchronous one where vLLM's configuration has that."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **options: Any) -> Scheduler:
        """Return an object of the class that the configuration selects, which `__init__` then builds."""
        is_async = cls is Scheduler and vllm_config.scheduler_config.async_scheduling
        return object.__new__(AsyncScheduler if is_async else cls)


class AsyncScheduler(Scheduler, async_scheduler.AsyncScheduler):
    """vLLM's scheduler for async scheduling with kvplane's allocator."""
