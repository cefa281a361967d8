"""Changes of a mirrored replica's prefix cache that a caller asks for, and the engine carries out.

    EvictBlocks, ResetPrefixCache -> ask -> the engine, in a step of its own -> carried_out -> the caller's answer

Both changes may be carried out twice, so a request that may be lost is sent again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import count

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.session import CacheRequest
from kvplane.base.step import Cache, StepResult
from kvplane_service.runtime.executors import Busy

TIMEOUT_S = 4.0  # below the deadline of a unary call, so that its caller learns the reason
MOST_WAITING = 64


class CacheRequests:
    """The requests that the engine has not carried out.

    Attributes:
        send: sends a request to the engine; None while it has no stream.
    """

    def __init__(self) -> None:
        self.send: Callable[[CacheRequest], None] | None = None
        # A random start: a step may carry out a request of a service that was connected before.
        self._numbers = count(secrets.randbits(62) + 1)
        self._waiting: dict[CacheRequest, asyncio.Future[StepResult]] = {}

    async def ask(self, name: str, cache: Cache) -> StepResult:
        """Return the result of the step in which the engine of replica `name` evicts blocks or resets its cache.

        Raises:
            Unavailable: the engine has not carried it out in time, and may do so later; or it has left.
            Busy: too many requests wait for the engine.
        """
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} requests wait for the engine of {name}", field="replica", remedy="retry")
        request = CacheRequest(next(self._numbers), tuple(cache.evicted), cache.reset)
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        if self.send is not None:
            self.send(request)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise Unavailable(
                f"the engine of {name} has not carried it out within {TIMEOUT_S:g} s: without requests it runs no step",
                field="replica",
                remedy="try again; the engine may still carry it out",
            ) from None
        finally:
            del self._waiting[request]

    def carried_out(self, number: int, result: StepResult) -> None:
        """The engine has carried out the request with this number, in the step with this result."""
        for request, answer in self._waiting.items():
            if request.number == number and not answer.done():
                answer.set_result(result)

    def send_again(self) -> None:
        """Send every request that waits: the engine has a new stream, or its image hides which step carried it out."""
        if self.send is not None:
            for request in list(self._waiting):
                self.send(request)

    def fail(self, error: KvplaneError) -> None:
        """End the wait of all callers with this error."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
