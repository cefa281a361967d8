"""Calls that change the cache of a replica with an engine: the engine's steps carry them out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kvplane.base.errors import FailedPrecondition
from kvplane.base.step import StepResult
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.unary.calls import CacheCall, CallHeader, Plan, PrefetchCall, RetainCall, UnaryCall
from kvplane_service.unary.idempotency import OpWindow, check_equal


class EngineCalls:
    """Asks the engine of one replica; each call once, however often it is sent."""

    def __init__(self, host: ReplicaHost, ops: OpWindow) -> None:
        """`ops` keeps the answers."""
        self._host, self._ops = host, ops
        self._waiting: dict[str, tuple[bytes, asyncio.Future[bytes]]] = {}  # by op_id, with the fingerprint

    def are_for(self, call: UnaryCall[Any]) -> bool:
        """Whether the replica's engine must carry out this call now."""
        has_engine = self._host.mirror.is_attached or self._host.state is ReplicaState.LIVE
        return has_engine and isinstance(call, CacheCall)

    def check(self, call: UnaryCall[Any]) -> None:
        """Raise FailedPrecondition if the call needs an engine for which the service decides, and there is none."""
        host = self._host
        if host.mirror.takes_rows:
            return
        if isinstance(call, PrefetchCall) and (host.mirror.is_attached or not self.are_for(call)):
            raise FailedPrecondition(
                f"{host.name} has no engine whose workers could copy blocks, or one that decides itself",
                field="replica",
                remedy="connect an engine with a session and workers, or let the engine prefetch",
            )
        if isinstance(call, RetainCall) and (host.mirror.is_attached or host.has_left):
            raise FailedPrecondition(
                f"the engine of {host.name} decides itself what is evicted, or has left",
                field="replica",
                remedy="connect an engine with a session, for which the service decides",
            )

    async def ask(self, header: CallHeader, plan: Plan[Any], encode: Callable[[Any], bytes]) -> bytes:
        """Return the answer when the engine has carried out the call.

        A repeat of a call that waits gets the same answer. A call whose caller is cancelled waits on, since a step may
        be carrying it out. Raises as `CacheRequests.ask`, and OpIdReused.
        """
        op_id = header.op_id
        if op_id in self._waiting:
            known, work = self._waiting[op_id]
            check_equal(op_id, known, header.fingerprint)
        else:
            result = self._host.mirror.requests.ask(self._host.name, plan.part)
            work = asyncio.ensure_future(self._carried_out(header, result, lambda result: encode(plan.done(result))))
            if op_id:
                self._waiting[op_id] = header.fingerprint, work
            work.add_done_callback(partial(self._over, op_id))
        return await asyncio.shield(work)

    async def _carried_out(
        self, header: CallHeader, result: Awaitable[StepResult], encode: Callable[[StepResult], bytes]
    ) -> bytes:
        epoch = self._host.epoch
        answer = encode(await result)
        if self._host.epoch == epoch:  # else a later life forgets it, or has begun to keep answers of its own
            self._ops.keep(header.op_id, header.fingerprint, answer)
        return answer

    def _over(self, op_id: str, work: asyncio.Future[bytes]) -> None:
        self._waiting.pop(op_id, None)
        if not work.cancelled():
            work.exception()  # its caller may have been cancelled
