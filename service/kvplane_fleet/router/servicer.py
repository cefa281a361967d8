"""The calls of kvplane.v1.Routing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound, Unavailable
from kvplane.v1 import routing_pb2 as pb
from kvplane.wire.parsing import parse
from kvplane_fleet.decisions import Ask, Decision, Decisions, Event, Keys
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.router import messages
from kvplane_fleet.router.watching import Watching
from kvplane_fleet.work import Booking
from kvplane_service.auth.gate import CALL
from kvplane_service.rpc.methods import Context, next_message
from kvplane_service.rpc.prices import price_of
from kvplane_service.runtime.executors import Executor

INLINE_TOKENS = 8192  # of a prompt that is hashed on the event loop
MAX_ELAPSED_S = 86_400.0
CLOCKS_DIFFER_S = 1.0  # more than the age of a decision by the clock of this router


class RoutingServicer:
    """Answers from one fleet and its decisions. A caller sees the places whose names its owner may use."""

    def __init__(self, fleet: Fleet, decisions: Decisions, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that never decrease."""
        self._fleet, self._decisions, self._clock = fleet, decisions, clock
        self._watching = Watching(fleet)
        self._offload = Executor("hashes of long prompts", threads=2)
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """End the streams."""
        self._draining.set()
        self._watching.end()

    async def Score(self, request: pb.ScoreRequest, _: bytes) -> pb.ScoreResponse:  # noqa: N802
        """See routing.proto."""
        return await self._score(request)

    async def ScoreStream(self, context: Context) -> None:  # noqa: N802
        """See routing.proto. A stream without requests for long costs one task."""
        while (raw := await self._next(context)) is not None:
            try:
                await pay(len(raw))
                request = parse(pb.ScoreStreamRequest, raw).request
                await pay(price_of(request, len(raw)) - len(raw))
                answer = pb.ScoreStreamResponse(response=await self._score(request))
            except KvplaneError as error:
                answer = pb.ScoreStreamResponse(error=messages.encode_error(error))
            await context.write(answer.SerializeToString())

    async def Report(self, request: pb.ReportRequest, _: bytes) -> pb.ReportResponse:  # noqa: N802
        """See routing.proto."""
        decisions = self._decisions
        booking = decisions.booking(request.decision_id)
        self._check_own(booking, request.decision_id)
        stages = {
            pb.REPORT_STAGE_STARTED: decisions.started,
            pb.REPORT_STAGE_FIRST_TOKEN: decisions.first_token,
            pb.REPORT_STAGE_ENDED: decisions.ended,
        }
        take = stages.get(request.stage)
        if take is None:
            remedy = "use STARTED, FIRST_TOKEN or ENDED"
            raise InvalidArgument(f"{request.stage} is no stage", field="stage", remedy=remedy)
        cached = request.cached_tokens if request.HasField("cached_tokens") else None
        if cached is not None and cached > booking.num_tokens:
            what = f"{cached} of {booking.num_tokens} tokens"
            raise InvalidArgument(what, field="cached_tokens", remedy="report the prompt's own tokens")
        cause = take(request.decision_id, Event(self._at_s(request, booking.at_s), cached, request.output_tokens))
        return pb.ReportResponse(claimed_tokens=booking.expected, cause=cause)

    async def ListPlaces(self, request: pb.ListPlacesRequest, _: bytes) -> pb.ListPlacesResponse:  # noqa: N802
        """See routing.proto."""
        places = [
            messages.encode_place(name, one, self._decisions)
            for name, one in sorted(self._fleet.followed.items())
            if (not request.model or one.place.serves(request.model)) and is_visible(name)
        ]
        return pb.ListPlacesResponse(places=places)

    async def WatchIndex(self, request: pb.WatchIndexRequest) -> AsyncGenerator[pb.WatchIndexResponse]:  # noqa: N802
        """See routing.proto."""
        names = [
            name
            for name, one in self._fleet.followed.items()
            if (not request.model or one.place.serves(request.model)) and is_visible(name)
        ]
        async for message in self._watching.watch(names, CALL.get().owner.name):
            yield message

    async def _score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        decision = await self.decide(messages.decode_ask(request))
        return messages.encode_decision(decision, self._decisions, request.max_places)

    async def decide(self, ask: Ask) -> Decision:
        """Decide among the places that the caller's owner may use. Raises the errors of Decisions.score."""
        if CALL.get().owner.every_replica:
            seen = ask
        else:
            visible = frozenset(filter(is_visible, self._fleet.of_model(ask.model)))
            allowed = visible if ask.candidates is None else visible & ask.candidates
            if not allowed:
                raise NotFound(f"no place has the model {ask.model[:140]!r}", field="model")
            seen = replace(ask, candidates=allowed, visible=visible, owner=CALL.get().owner.name)
        return self._decisions.score(seen, await self._keys(seen))

    async def _keys(self, ask: Ask) -> Keys:
        """Return the prompt's keys in each domain of its model, those of a long prompt from a thread. A domain that the
        given keys do not fit is left out: its places state it.
        """
        keys = {}
        for domain in self._fleet.domains(ask.model):
            work = partial(ask.prompt.keys_of, domain)
            try:
                keys[domain] = await self._offload(work) if len(ask.prompt.tokens) > INLINE_TOKENS else work()
            except InvalidArgument:
                if ask.prompt.keys is None:
                    raise
        return keys

    async def _next(self, context: Context) -> bytes | None:
        reading = asyncio.ensure_future(next_message(context))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if not reading.done():
                reading.cancel()
        if not reading.done():
            raise Unavailable("the router is draining", remedy="connect to another router")
        return await reading

    def _at_s(self, request: pb.ReportRequest, booked_s: float) -> float:
        if not request.HasField("elapsed_s"):
            return self._clock()
        if not 0 <= request.elapsed_s <= MAX_ELAPSED_S:
            remedy = "send the seconds since the decision, or leave it out"
            raise InvalidArgument(f"it is {request.elapsed_s}", field="elapsed_s", remedy=remedy)
        age_s = self._clock() - booked_s
        if request.elapsed_s > age_s + CLOCKS_DIFFER_S:
            what, remedy = (
                f"it is {request.elapsed_s:.3f}, and the decision is {age_s:.3f} s old",
                "send what has happened",
            )
            raise InvalidArgument(what, field="elapsed_s", remedy=remedy)
        return booked_s + request.elapsed_s

    def _check_own(self, booking: Booking, decision: str) -> None:
        owner = CALL.get().owner
        if not (owner.every_replica or (is_visible(booking.place) and booking.owner == owner.name)):
            raise NotFound(f"there is no open decision {decision[:140]!r}", field="decision_id")


def is_visible(place: str) -> bool:
    """Return whether the caller's owner may use a place; it learns nothing of the others."""
    return CALL.get().owner.may_use(place, "")


async def pay(num_bytes: int) -> None:
    """Count what a message of a stream costs, and wait while the owner has used up its allowance."""
    if (owed_ms := CALL.get().owe(num_bytes)) > 0:
        await asyncio.sleep(owed_ms / 1000)
