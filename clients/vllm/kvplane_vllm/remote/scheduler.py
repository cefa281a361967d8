"""The part of vLLM's scheduler in mode "remote": what happens around each schedule()."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

from kvplane.base.errors import LimitExceeded
from kvplane_vllm.launch import ATTRIBUTE
from kvplane_vllm.remote.driver import Driver
from kvplane_vllm.remote.manager import RemoteManager
from kvplane_vllm.remote.settings import refuse_scheduler, settings_of, why_synchronous

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM


def remote_manager(vllm_config: Any, chosen: dict[str, str], addresses: Sequence[str]) -> Callable[..., RemoteManager]:
    """Return the function that builds the KV cache manager for these options. `addresses`: of the kvplane workers."""
    return partial(RemoteManager, settings=settings_of(chosen), vllm_config=vllm_config, addresses=addresses)


class OnService:
    """Lets a service decide for one scheduler of vLLM.

    Attributes:
        driver: asks the service, and counts its messages.
    """

    def __init__(self, scheduler: Any, vllm_config: Any, chosen: dict[str, str], *, is_async: bool) -> None:
        """`scheduler`: built with a RemoteManager. Raises InvalidArgument for a feature that this mode does not
        support.
        """
        refuse_scheduler(scheduler)
        manager, pipeline = scheduler.kv_cache_manager, settings_of(chosen).pipeline
        most = manager.link.max_rows
        if scheduler.max_num_running_reqs > most:
            raise LimitExceeded(
                f"max_num_seqs is {scheduler.max_num_running_reqs}, the service accepts {most} rows per step",
                field="max_num_seqs",
                remedy="raise max_rows_per_step of the service",
            )
        if pipeline and (feature := why_synchronous(vllm_config)):
            logger.info("pipeline: off, because of %s", feature)
            pipeline = False
        self._scheduler = scheduler
        self.driver = Driver(scheduler, manager.link, manager.books, is_async=is_async, pipeline=pipeline)
        manager.bind(self.driver)

    def schedule(
        self, schedule: Callable[[], SchedulerOutput], preempt: Callable[[list[Any]], None]
    ) -> SchedulerOutput:
        """Call vLLM's `schedule`. `preempt` preempts requests in vLLM's queues."""
        scheduler, state = self._scheduler, self._scheduler._pause_state
        if not self.driver.begin(preempt):
            scheduler._pause_state = PauseState.PAUSED_ALL  # nothing is scheduled, and nothing is preempted
        try:
            output = schedule()
        finally:
            scheduler._pause_state = state
        output.kvplane_step = self.driver.end()  # type: ignore[attr-defined]
        if scheduler.kv_cache_manager.memory is not None:
            setattr(output, ATTRIBUTE, scheduler.kv_cache_manager.take_launch())
        return output

    def executed(self, output: SchedulerOutput) -> None:
        """Take the report that the worker has finished the step of this output and all earlier ones."""
        self._scheduler.kv_cache_manager.executed(*output.kvplane_step)  # type: ignore[attr-defined]

    def updated(self) -> None:
        """Report the requests that ended, if vLLM has no other."""
        self.driver.flush()
