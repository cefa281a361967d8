"""Changes of the prefix cache of a replica with a session: a caller asks for them, the engine's steps carry them out.

    mirror   EvictBlocks, ResetPrefixCache  -> ask -> the engine, in a part of its own -> carried_out -> the answer
             Prefetch and Retain too, of an engine that takes their rows
             what peers have stored or evicted -> offer -> the same way, without a caller
    others   the same, Prefetch, and Retain -> ask -> merged into the engine's next step -> carried_out -> the answer

A mirror may carry each out twice, so a request that may be lost is sent to it again.

The service decides no such step itself while an engine has the session: the change is final once every rank has written
its stamps, and only the engine's ranks write them. Until then a crash of both processes could restore the keys, because
the pages and an old copy of the store still prove them. So an engine that runs no step carries nothing out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, count

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.sections import Peers, Prefetch, Prefetched, Retain, Retained
from kvplane.base.session import CacheRequest
from kvplane.base.step import AdmitStatus, Part, PartResult, Step, StepResult
from kvplane.base.values import PrefetchOutcome
from kvplane_core.face.interface import BEGINS, RESUMES, SCHEDULES
from kvplane_service.decisions.sent import SentStep, kinds_of, step_with
from kvplane_service.runtime.rota import Busy

TIMEOUT_S = 4.0  # below the deadline of a unary call, so that its caller learns the reason
MOST_WAITING, MOST_OFFERED = 64, 16


class CacheRequests:
    """The requests that the engine has not carried out, of a replica with a session.

    Attributes:
        send: sends a request to the engine of a mirror; None while it has no stream, and for other engines.
        next_end_ns: the earliest end of a retained prefix, on the host's clock; 0 = none is retained.
        offered: what peers have stored or evicted, in order, until the engine of a mirror has taken it.
    """

    def __init__(self) -> None:
        self.send: Callable[[CacheRequest], None] | None = None
        # A random start: a step may carry out a request of a service that was connected before.
        self._numbers = count(secrets.randbits(62) + 1)
        self._waiting: dict[CacheRequest, asyncio.Future[StepResult]] = {}
        self._merged: set[CacheRequest] = set()  # into a step, which may be applied
        self.next_end_ns = 0
        self.offered: list[CacheRequest] = []
        self.image_may_come = False  # the engine life states stamps, and its image, if any, has not come

    def ask(self, name: str, part: Part) -> Awaitable[StepResult]:
        """Return the result of the step in which the engine of replica `name` does what the sections `cache`,
        `prefetch` and `retain` of this part say: it evicts blocks, resets its cache, copies what a prompt needs, or
        retains a prefix. In the result, `prefetched` and `retained` have this prompt alone. The engine of now is asked,
        not one that comes before the caller waits.

        Raises:
            Unavailable: the engine has not carried it out in time (a mirror may do so later); or it has left.
            Busy: too many requests wait for the engine.
        """
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} requests wait for the engine of {name}", field="replica", remedy="retry")
        rows = part if part.prefetch.slot or part.retain.num_hashes else None
        request = CacheRequest(next(self._numbers), tuple(part.cache.evicted), part.cache.reset, rows)
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        if self.send is not None:
            self.send(request)
        return asyncio.ensure_future(self._answered(name, request, part, answer))

    async def _answered(
        self, name: str, request: CacheRequest, part: Part, answer: asyncio.Future[StepResult]
    ) -> StepResult:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            why = "only its ranks can write the stamps that make this final"
            why = "only its workers can copy" if part.prefetch.slot else why
            why = "only its steps change what is evicted" if part.retain.num_hashes else why
            is_alone = self.send is None and request not in self._merged
            late = "nothing was changed" if is_alone else "it may still do so"
            raise Unavailable(
                f"the engine of {name} has run no step within {TIMEOUT_S:g} s, and {why}; {late}",
                field="replica",
                remedy="try again until it runs a step (kvplane: --wait), or end the engine, or deregister the replica",
            ) from None
        finally:
            del self._waiting[request]
            self._merged.discard(request)

    def offer(self, rows: Peers) -> None:
        """Let the engine of a mirror, which has a stream, know what peers have stored or evicted."""
        assert self.send is not None, "the engine has a stream"
        self.offered.append(CacheRequest(next(self._numbers), rows=Part(peers=rows)))
        self.send(self.offered[-1])

    def is_due(self, clock: Callable[[], int]) -> bool:
        """Whether the time of a retained prefix has come; the clock is read only if there is one."""
        return self.next_end_ns > 0 and clock() >= self.next_end_ns

    def merged(self, step: Step, now_ns: int) -> tuple[Step, list[tuple[int, Part]]]:
        """Return the step with all waiting changes in the cache section of its first part, the prompts to prefetch
        behind the engine's own, and the prefixes to retain; and their numbers, each with its part.

        The engine gets the orders and events of these changes with the answer to its step. A step without parts stays
        as it is.
        """
        if not step.parts:
            return step, []
        asked = [request for request, answer in self._waiting.items() if not answer.done()]
        self._merged.update(asked)
        first, *others = step.parts
        cache = replace(
            first.cache,
            evicted=[*first.cache.evicted, *chain.from_iterable(request.blocks for request in asked)],
            reset=first.cache.reset or any(request.reset for request in asked),
        )
        numbers = [(request.number, request.rows or Part()) for request in asked]
        prompts = [rows.prefetch for _, rows in numbers if rows.prefetch.slot]
        prefetch = _joined([first.prefetch, *prompts]) if prompts else first.prefetch
        retain = _retained([rows.retain for _, rows in numbers if rows.retain.num_hashes], now_ns)
        parts = [replace(first, cache=cache, prefetch=prefetch, retain=retain), *others]
        return step_with(step, parts, step.traceparent), numbers

    def carried_out(self, number: int, result: StepResult) -> None:
        """The engine has carried out the request with this number, in the step with this result."""
        at = next((at for at, one in enumerate(self.offered) if one.number == number), -1)
        del self.offered[: at + 1]  # with those before it
        for request, answer in self._waiting.items():
            if request.number == number and not answer.done():
                of_prompt = request.rows is not None and bool(request.rows.prefetch.slot)
                is_admitted = of_prompt and not result.parts[0].prefetched.outcome
                answer.set_result(_prefetched_by_admission(result) if is_admitted else result)

    def all_carried_out(self, asked: Iterable[tuple[int, Part]], result: StepResult) -> None:
        """A step with this result has carried out these requests, as `merged` returned them."""
        asked, done, kept = list(asked), result.parts[0].prefetched, result.parts[0].retained
        self.note_ends(kept)
        copied = count(len(done.hit) - sum(len(rows.prefetch.slot) for _, rows in asked))
        retained = count()
        for number, rows in asked:
            part = result.parts[0]
            if rows.prefetch.slot:
                at = next(copied)
                part = PartResult(prefetched=Prefetched([done.hit[at]], [done.blocks[at]], [done.outcome[at]]))
            elif rows.retain.num_hashes:
                at = next(retained)
                alone = Retained([kept.hit[at]], [kept.blocks[at]], [kept.left[at]], [kept.outcome[at]])
                part = PartResult(retained=alone)
            self.carried_out(number, replace(result, parts=[part, *result.parts[1:]]))

    def note_ends(self, done: Retained) -> None:
        """Record when what is retained ends, from the result of a part with a time."""
        self.next_end_ns = done.next_end_ns[0] if done.next_end_ns else 0

    def send_again(self) -> None:
        """Send every request that waits: the engine has a new stream, or its image hides which step carried it out."""
        if self.send is not None:
            waiting = [request for request, answer in self._waiting.items() if not answer.done()]
            for request in [*self.offered, *waiting]:
                self.send(request)

    def may_join(self, step: Step) -> bool:
        """Whether what callers wait for may be merged into this step of the engine. It may not before the image of an
        engine life that states stamps, which follows the first step and those that announce its requests, and not into
        the image, which is alone in its step: another change of the pages would refuse it.
        """
        kinds = step.kinds if isinstance(step, SentStep) else kinds_of(step)
        is_before = self.image_may_come and not kinds & SCHEDULES
        self.image_may_come = is_before and (step.seq == 1 or bool(kinds & BEGINS))
        return not (kinds & RESUMES or self.image_may_come)

    def want_step(self, clock: Callable[[], int]) -> bool:
        """Whether a caller waits for the next step, or the time of a retained prefix has come."""
        return len(self._waiting) > 0 or 0 < self.next_end_ns <= clock()

    def fail(self, error: KvplaneError) -> None:
        """End the wait of all callers with this error, and offer nothing."""
        self.offered.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


def _prefetched_by_admission(result: StepResult) -> StepResult:
    """Return the result as a row of `prefetch` has it: the engine, whose pool is the nearest tier, has admitted the
    prompt, or could not.
    """
    first = result.parts[0]
    is_granted = list(first.admit_status) == [AdmitStatus.GRANTED]
    outcome = PrefetchOutcome.ALL if is_granted else PrefetchOutcome.TOO_MANY
    done = Prefetched([sum(first.admit_hit)], [len(first.orders.load_job)], [outcome])
    return replace(result, parts=[PartResult(prefetched=done), *result.parts[1:]])


def _joined(sections: Sequence[Prefetch]) -> Prefetch:
    """Return the rows of all sections, in order."""
    return Prefetch(
        slot=[slot for one in sections for slot in one.slot],
        num_hashes=[count for one in sections for count in one.num_hashes or [0] * len(one.slot)],
        hashes=b"".join(one.hashes for one in sections),
        domain=[name for one in sections for name in one.domain or [""] * len(one.slot)],
        within_ns=[time for one in sections for time in one.within_ns or [0] * len(one.slot)],
    )


def _retained(sections: Sequence[Retain], now_ns: int) -> Retain:
    """Return the rows of all sections, in order, at this time."""
    columns = ("num_hashes", "domain", "owner", "priority", "until_ns", "percent")
    rows = {name: list(chain.from_iterable(getattr(one, name) for one in sections)) for name in columns}
    return Retain(hashes=b"".join(one.hashes for one in sections), now_ns=[now_ns], **rows)
