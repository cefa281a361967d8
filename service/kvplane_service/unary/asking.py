"""Calls that change the cache of a replica with an engine: the engine's steps carry them out, each call once, however
often it is sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kvplane.base.errors import FailedPrecondition, InvalidArgument, OpIdReused
from kvplane.base.step import StepResult
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.unary.calls import CacheCall, CallHeader, Plan, PrefetchCall, RetainCall, UnaryCall

MAX_OP_ID_CHARS = 128


class OpWindow:
    """The answers of the last `size` calls with an op_id, or of fewer calls, so that the answers take at most
    `max_bytes` bytes.

    The newest answer is always kept, whatever its size, so that a client can always retry its last call.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def find(self, op_id: str, fingerprint: bytes) -> bytes | None:
        """Return the stored answer of this op_id, None if the op_id is new or empty.

        Raises:
            OpIdReused: the op_id was used with other content.
            InvalidArgument: the op_id is too long.
        """
        if len(op_id) > MAX_OP_ID_CHARS:
            raise InvalidArgument(
                f"{len(op_id)} characters", field="header.op_id", remedy=f"give at most {MAX_OP_ID_CHARS} characters"
            )
        known = self._answers.get(op_id)
        if known is None:
            return None
        check_equal(op_id, known[0], fingerprint)
        return known[1]

    def keep(self, op_id: str, fingerprint: bytes, answer: bytes) -> None:
        """Store an answer, and drop the oldest ones if there are too many. Does nothing for an empty op_id."""
        if not op_id:
            return
        self._answers[op_id] = (fingerprint, answer)
        self._num_bytes += len(answer)
        while len(self._answers) > self._size or (self._num_bytes > self._max_bytes and len(self._answers) > 1):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest)

    def clear(self) -> None:
        """Drop all answers: a new engine life has begun, in which answers of the previous one are invalid."""
        self._answers.clear()
        self._num_bytes = 0


def check_equal(op_id: str, known: bytes, fingerprint: bytes) -> None:
    """Raise OpIdReused if two calls with this op_id have different content."""
    if known != fingerprint:
        raise OpIdReused(
            f"op_id {op_id!r} was used for another call",
            field="header.op_id",
            remedy="choose a new op_id",
        )


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
