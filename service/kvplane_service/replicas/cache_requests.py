"""Changes of the prefix cache of a replica with a session: a caller asks for them, the engine's steps carry them out.

    mirror   EvictBlocks, ResetPrefixCache -> ask -> the engine, in a step of its own -> carried_out -> the answer
    others   the same, and Prefetch        -> ask -> merged into the engine's next step -> carried_out -> the answer

A mirror may carry both out twice, so a request that may be lost is sent to it again.

The service decides no such step itself while an engine has the session: the change is final once every rank has written
its stamps, and only the engine's ranks write them. Until then a crash of both processes could restore the keys, because
the pages and an old copy of the store still prove them. So an engine that runs no step carries nothing out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, count

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.prefetch import Prefetch, Prefetched
from kvplane.base.session import CacheRequest
from kvplane.base.step import Part, PartResult, Step, StepResult
from kvplane_service.runtime.executors import Busy

TIMEOUT_S = 4.0  # below the deadline of a unary call, so that its caller learns the reason
MOST_WAITING = 64


class CacheRequests:
    """The requests that the engine has not carried out, of a replica with a session.

    Attributes:
        send: sends a request to the engine of a mirror; None while it has no stream, and for other engines.
    """

    def __init__(self) -> None:
        self.send: Callable[[CacheRequest], None] | None = None
        # A random start: a step may carry out a request of a service that was connected before.
        self._numbers = count(secrets.randbits(62) + 1)
        self._waiting: dict[CacheRequest, asyncio.Future[StepResult]] = {}
        self._prefetches: dict[int, Prefetch] = {}  # by number of their request

    async def ask(self, name: str, part: Part) -> StepResult:
        """Return the result of the step in which the engine of replica `name` does what the sections `cache` and
        `prefetch` of this part say: it evicts blocks, resets its cache, or copies what a prompt needs. In the result,
        `prefetched` has this prompt alone.

        Raises:
            Unavailable: the engine has not carried it out in time (a mirror may do so later); or it has left.
            Busy: too many requests wait for the engine.
        """
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} requests wait for the engine of {name}", field="replica", remedy="retry")
        request = CacheRequest(next(self._numbers), tuple(part.cache.evicted), part.cache.reset)
        if part.prefetch.slot:
            self._prefetches[request.number] = part.prefetch
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        if self.send is not None:
            self.send(request)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            why = "only its ranks can write the stamps that make this final"
            why = "only its movers can copy" if part.prefetch.slot else why
            late = "nothing was changed" if self.send is None else "it may still do so"
            raise Unavailable(
                f"the engine of {name} has run no step within {TIMEOUT_S:g} s, and {why}; {late}",
                field="replica",
                remedy="try again until it runs a step (kvplane: --wait), or end the engine, or deregister the replica",
            ) from None
        finally:
            del self._waiting[request]
            self._prefetches.pop(request.number, None)

    def merged(self, step: Step) -> tuple[Step, list[tuple[int, bool]]]:
        """Return the step with all waiting changes in the cache section of its first part, and the prompts to prefetch
        behind the engine's own; and their numbers, each with whether it is a prefetch.

        The engine gets the orders and events of these changes with the answer to its step. A step without parts stays
        as it is.
        """
        asked = [request for request, answer in self._waiting.items() if not answer.done()] if step.parts else []
        if not asked:
            return step, []
        first, *others = step.parts
        cache = replace(
            first.cache,
            evicted=[*first.cache.evicted, *chain.from_iterable(request.blocks for request in asked)],
            reset=first.cache.reset or any(request.reset for request in asked),
        )
        prompts = [self._prefetches[request.number] for request in asked if request.number in self._prefetches]
        prefetch = _joined([first.prefetch, *prompts]) if prompts else first.prefetch
        numbers = [(request.number, request.number in self._prefetches) for request in asked]
        return replace(step, parts=[replace(first, cache=cache, prefetch=prefetch), *others]), numbers

    def carried_out(self, number: int, result: StepResult) -> None:
        """The engine has carried out the request with this number, in the step with this result."""
        for request, answer in self._waiting.items():
            if request.number == number and not answer.done():
                answer.set_result(result)

    def all_carried_out(self, asked: Iterable[tuple[int, bool]], result: StepResult) -> None:
        """A step with this result has carried out these requests, as `merged` returned them."""
        asked, done = list(asked), result.parts[0].prefetched
        row = len(done.hit) - sum(is_prefetch for _, is_prefetch in asked)
        for number, is_prefetch in asked:
            if not is_prefetch:
                self.carried_out(number, result)
                continue
            alone = Prefetched([done.hit[row]], [done.blocks[row]], [done.outcome[row]])
            self.carried_out(number, replace(result, parts=[PartResult(prefetched=alone)]))
            row += 1

    def send_again(self) -> None:
        """Send every request that waits: the engine has a new stream, or its image hides which step carried it out."""
        if self.send is not None:
            for request in list(self._waiting):
                self.send(request)

    @property
    def is_empty(self) -> bool:
        """Whether no caller waits."""
        return not self._waiting

    def fail(self, error: KvplaneError) -> None:
        """End the wait of all callers with this error."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


def _joined(sections: Sequence[Prefetch]) -> Prefetch:
    """Return the rows of all sections, in order."""
    return Prefetch(
        slot=[slot for one in sections for slot in one.slot],
        num_hashes=[count for one in sections for count in one.num_hashes or [0] * len(one.slot)],
        hashes=b"".join(one.hashes for one in sections),
        domain=[name for one in sections for name in one.domain or [""] * len(one.slot)],
        within_ns=[time for one in sections for time in one.within_ns or [0] * len(one.slot)],
    )
