"""The endpoint picker of the Gateway API Inference Extension (protocol 1.0.0): a proxy sends each HTTP request through
a stream of Envoy's external processor, and learns which engine answers it.

    headers, body ──▶ model, prompt ──▶ Score ──▶ x-gateway-destination-endpoint: the chosen engine, then the next best
    response      ──▶ first bytes, usage ──▶ Report

Bodies pass through unchanged. The first bytes of a streamed answer are its first token; the cached tokens are those of
`usage.prompt_tokens_details`, where the engine states them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from google.protobuf.struct_pb2 import ListValue, Struct

from kvplane.base.errors import KvplaneError, LimitExceeded, NotFound
from kvplane.v1 import front_ends_pb2 as pb
from kvplane.wire.parsing import parse
from kvplane_fleet.decisions import OWNERS_SHARE, Ask, Decision, Decisions, Event
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.router.endpoints import Endpoints
from kvplane_fleet.router.prompts import Prompts, read_body
from kvplane_fleet.router.servicer import is_visible, pay
from kvplane_service.auth.gate import CALL
from kvplane_service.rpc.methods import Context, next_message
from kvplane_service.rpc.prices import CALL_BYTES

NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
HEADER = "x-gateway-destination-endpoint"
SPACE, SUBSET_SPACE = "envoy.lb", "envoy.lb.subset_hint"
SUBSET, SERVED = f"{HEADER}-subset", f"{HEADER}-served"
ATTRIBUTES, UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
# What an exchange counts, and each message after its first, apart from their length: 1 ms and 0.09 ms (see prices). A
# part of an answer counts little: to delay it would slow the tokens of an end user, for whose request the exchange has
# paid.
EXCHANGE_BYTES, MESSAGE_BYTES, ANSWER_BYTES = 2 * CALL_BYTES, 3 << 10, 256
MAX_BODY_BYTES = 32 << 20
BODY_S = 60.0  # for a request's body to arrive, at most
FIRST_S = 10.0  # after its first bytes, and a second more for each BYTES_PER_S that have arrived
BYTES_PER_S = 1 << 20
SMALL_BODY_BYTES, SMALL_SHARE = 64 << 10, 8  # bodies up to this length have one part in 8 of the room to themselves
MAX_ENDPOINTS = 4  # the chosen one, and those that a proxy tries after it
_CHUNK = 60 << 10  # of a body, so that a message is below the proxy's limit
_TAIL = 64 << 10  # of a response's body, in which its usage is
_NUMBER = re.compile(rb"\s*:\s*(\d{1,9})")
_OVERWRITE = 2

Decide = Callable[[Ask], Awaitable[Decision]]


class Refused(Exception):
    """The request is answered by the proxy."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EndpointPicker:
    """Serves the streams of a proxy."""

    def __init__(self, fleet: Fleet, decisions: Decisions, decide: Decide, clock: Callable[[], float]) -> None:
        """`decide` scores for the caller's owner; `clock` returns seconds that never decrease."""
        self._fleet, self.decisions, self._decide = fleet, decisions, decide
        self.clock = clock
        self.prompts, self.endpoints = Prompts(fleet), Endpoints(fleet)
        self.room = Room(decisions.settings.max_body_bytes)

    async def Process(self, context: Context) -> None:  # noqa: N802
        """See front_ends.proto."""
        exchange, price = Exchange(self), EXCHANGE_BYTES
        try:
            while (raw := await self._next(context, exchange)) is not None:
                request = parse(pb.ProcessRequest, raw)
                is_answer = price < EXCHANGE_BYTES and request.WhichOneof("request") == "response_body"
                await pay((ANSWER_BYTES if is_answer else price) + len(raw))
                price = MESSAGE_BYTES
                for answer in await exchange.take(request):
                    await context.write(answer.SerializeToString())
        except TimeoutError:
            await context.write(_immediate(Refused(408, "the body arrived too slowly")).SerializeToString())
        finally:
            exchange.end()

    @staticmethod
    async def _next(context: Context, exchange: Exchange) -> bytes | None:
        """Return the next message. Raises TimeoutError if a body that takes room does not arrive."""
        if not exchange.takes_room:
            return await next_message(context)
        async with asyncio.timeout_at(exchange.body_due_s):
            return await next_message(context)

    async def pick(self, body: bytes, subset: list[str] | None) -> tuple[Decision | None, dict[str, str]]:
        """Return the decision about a request, and the addresses of the places in the order of preference.

        `subset`: addresses among which the proxy lets it choose. Raises Refused.
        """
        visible = set(filter(is_visible, self._fleet.followed))
        addresses = await self.endpoints.of(visible)
        if subset is not None:
            addresses = {name: address for name, address in addresses.items() if address in subset}
        if not addresses:
            raise Refused(503, "no engine with an address may be chosen")
        if not body:
            least = sorted(addresses, key=lambda name: self.decisions.work_of(name).in_flight)
            return None, {name: addresses[name] for name in least[:MAX_ENDPOINTS]}
        try:
            decision = await self._decide(await self._ask(body, visible, addresses))
        except LimitExceeded as error:
            raise Refused(429, str(error)) from error
        except NotFound as error:
            raise Refused(404, str(error)) from error
        except KvplaneError as error:
            raise Refused(503, str(error)) from error
        chosen = [one.claim.place for one in decision.places[:MAX_ENDPOINTS]]
        return decision, {name: addresses[name] for name in chosen}

    async def _ask(self, body: bytes, visible: set[str], addresses: Mapping[str, str]) -> Ask:
        request = read_body(body)
        if request is None:
            raise Refused(400, "the body is no JSON object")
        models = {self._fleet.followed[name].place.settings.model for name in addresses}
        model = request.value("model") if request.model or len(models) != 1 else next(iter(models))
        if not isinstance(model, str):
            raise Refused(400, "the body names no model")
        engines = visible & self._fleet.of_model(model).keys()
        if not engines:
            raise Refused(404, f"no engine has the model {model[:140]!r}")
        if engines.isdisjoint(addresses):
            raise Refused(503, f"no engine of the model {model[:140]!r} may be chosen")
        prompt = await self.prompts.of_body(model, request, len(body), engines)
        most = request.value("max_completion_tokens" if request.max_completion_tokens else "max_tokens")
        output = most if isinstance(most, int) and 0 < most < 1 << 30 else 0
        return Ask(model, prompt, frozenset(addresses), book=True, output_tokens=output)


class Room:
    """The memory for bodies of requests that have no engine yet. One owner takes half of it at most, or one body."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.taken_bytes = most_bytes, 0
        self._of_owner = Counter[str]()

    def take(self, num_bytes: int, length: int) -> None:
        """Take some of it for a body of this length so far. Raises Refused if there is not enough."""
        most, owner = self.most_bytes, CALL.get().owner.name
        if length > SMALL_BODY_BYTES:
            most -= self.most_bytes // SMALL_SHARE
        if self.taken_bytes + num_bytes > most:
            raise Refused(429, f"bodies of requests take {self.taken_bytes} bytes of the router, of {self.most_bytes}")
        share = max(self.most_bytes // OWNERS_SHARE, length)  # a body that is larger is taken alone
        if owner and self._of_owner[owner] + num_bytes > share:
            raise Refused(429, f"bodies of requests of {owner} take {self._of_owner[owner]} bytes, of {share}")
        self.taken_bytes += num_bytes
        self._of_owner[owner] += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Give back what the call has taken."""
        self.taken_bytes -= num_bytes
        self._of_owner[CALL.get().owner.name] -= num_bytes


class Exchange:
    """One HTTP request and its response.

    Attributes:
        body_due_s: when the body must have arrived, on the event loop's clock.
    """

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker, self.body_due_s = picker, asyncio.get_running_loop().time() + BODY_S
        self._began_s = 0.0  # when the first bytes of the body arrived
        self._subset: list[str] | None = None
        self._body = bytearray()
        self._is_picked = self._is_refused = self._is_stream = self._has_no_body = False
        self._decision = ""  # that is not reported as ended
        self._address = ""
        self._tail = b""

    @property
    def takes_room(self) -> bool:
        """Whether a part of the body has arrived, and not all."""
        return bool(self._body)

    async def take(self, request: pb.ProcessRequest) -> list[pb.ProcessResponse]:
        """Take the next part; returns what the proxy does with it and with parts before it."""
        part = request.WhichOneof("request")
        if self._is_refused or part is None:
            return []
        try:
            if part in ("request_headers", "request_body", "request_trailers"):
                return await self._request(part, request)
        except Refused as refused:
            self._is_refused = True
            self._leave_room()
            return [_immediate(refused)]
        return self._response(part, request)

    # -- request -----------------------------------------------------------------------------------------------------

    async def _request(self, part: str, request: pb.ProcessRequest) -> list[pb.ProcessResponse]:
        if part == "request_headers":
            self._subset = _subset_of(request)
            self._has_no_body = request.request_headers.end_of_stream
            return await self._pick(is_end=True) if self._has_no_body else []
        if part == "request_trailers":
            answers = [] if self._is_picked else await self._pick(is_end=False)
            return [*answers, pb.ProcessResponse(request_trailers=pb.TrailersAnswer())]
        received = request.request_body.body
        if len(self._body) + len(received) > MAX_BODY_BYTES:
            raise Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        self._picker.room.take(len(received), len(self._body) + len(received))
        self._body += received
        now_s = asyncio.get_running_loop().time()
        self._began_s = self._began_s or now_s
        self.body_due_s = self._began_s + min(FIRST_S + len(self._body) / BYTES_PER_S, BODY_S)
        return await self._pick(is_end=True) if request.request_body.end_of_stream else []

    def _leave_room(self) -> None:
        self._picker.room.leave(len(self._body))
        self._body = bytearray()

    async def _pick(self, is_end: bool) -> list[pb.ProcessResponse]:
        """Return the answer to the headers, and the body, if there is one."""
        body = bytes(self._body)
        decision, addresses = await self._picker.pick(body, self._subset)
        self._leave_room()
        self._is_picked = True
        self._decision = decision.name if decision else ""
        self._address = next(iter(addresses.values()))
        value = ",".join(dict.fromkeys(addresses.values()))
        option = pb.HeaderValueOption(
            header=pb.HeaderValue(key=HEADER, raw_value=value.encode()), append_action=_OVERWRITE
        )
        changed = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=[option]), clear_route_cache=True)
        answer = pb.ProcessResponse(request_headers=pb.CommonAnswer(response=changed))
        answer.dynamic_metadata.update({SPACE: {HEADER: value}})
        return [answer, *(_chunks(body, is_end) if body or not self._has_no_body else ())]

    # -- response ----------------------------------------------------------------------------------------------------

    def _response(self, part: str, request: pb.ProcessRequest) -> list[pb.ProcessResponse]:
        if part == "response_headers":
            self._take_headers(request)
            return [pb.ProcessResponse(response_headers=pb.CommonAnswer())]
        if part == "response_trailers":
            self.end()
            return [pb.ProcessResponse(response_trailers=pb.TrailersAnswer())]
        body = request.response_body
        if self._is_stream and body.body:
            self._is_stream = False
            self._report(self._picker.decisions.first_token, Event(self._picker.clock()))
        self._tail = (self._tail + body.body)[-_TAIL:]
        if body.end_of_stream:
            self.end()
        return [_streamed("response_body", body.body, body.end_of_stream)]

    def _take_headers(self, request: pb.ProcessRequest) -> None:
        headers = {
            one.key: one.raw_value.decode("latin-1") or one.value for one in request.response_headers.headers.headers
        }
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        served = _served(request)
        if (
            headers.get(":status") != "200"
            or (served and served != self._address)
            or request.response_headers.end_of_stream
        ):
            self.end()  # it teaches nothing about the chosen engine

    def end(self) -> None:
        """The exchange has ended, or its stream was broken off."""
        self._leave_room()
        if self._decision:
            cached, generated = (last_number(name, self._tail) for name in (b"cached_tokens", b"completion_tokens"))
            self._report(self._picker.decisions.ended, Event(self._picker.clock(), cached, generated or 0))
        self._decision, self._tail = "", b""

    def _report(self, report: Callable[[str, Event], str], event: Event) -> None:
        if self._decision:
            with suppress(NotFound):  # it has expired
                report(self._decision, event)


def last_number(name: bytes, text: bytes) -> int | None:
    """Return the last number that a JSON text gives this name; None if there is none. Names in strings have escaped
    quotation marks.
    """
    quoted, end = b'"%s"' % name, len(text)
    while (at := text.rfind(quoted, 0, end)) >= 0:
        found = _NUMBER.match(text, at + len(quoted))
        if found and text[at - 1 : at] != b"\\":
            return int(found[1])
        end = at
    return None


def _chunks(body: bytes, is_end: bool) -> list[pb.ProcessResponse]:
    starts = range(0, max(len(body), 1), _CHUNK)
    return [
        _streamed("request_body", body[start : start + _CHUNK], is_end and start + _CHUNK >= len(body))
        for start in starts
    ]


def _streamed(part: str, body: bytes, is_end: bool) -> pb.ProcessResponse:
    mutation = pb.BodyMutation(streamed_response=pb.HttpBody(body=body, end_of_stream=is_end))
    answer = pb.CommonAnswer(response=pb.CommonResponse(body_mutation=mutation))
    if part == "request_body":
        return pb.ProcessResponse(request_body=answer)
    return pb.ProcessResponse(response_body=answer)


def _immediate(refused: Refused) -> pb.ProcessResponse:
    body = json.dumps({"error": {"message": str(refused), "type": "router", "code": refused.status}}).encode()
    kind = pb.HeaderValueOption(
        header=pb.HeaderValue(key="content-type", raw_value=b"application/json"), append_action=_OVERWRITE
    )
    return pb.ProcessResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=refused.status),
            headers=pb.HeaderMutation(set_headers=[kind]),
            body=body,
            details=f"kvplane_{refused.status}",
        )
    )


def _value(fields: Mapping[str, Struct], space: str, key: str) -> object:
    return fields[space][key] if space in fields and key in fields[space].fields else None


def _served(request: pb.ProcessRequest) -> str:
    """Return the address that answered: as the protocol has it, or as Envoy states it; "" if unknown."""
    found = _value(request.metadata_context.filter_metadata, SPACE, SERVED)
    found = found or _value(request.attributes, ATTRIBUTES, UPSTREAM)
    return found if isinstance(found, str) else ""


def _subset_of(request: pb.ProcessRequest) -> list[str] | None:
    """Return the addresses among which the proxy lets the picker choose; None = all."""
    found = _value(request.metadata_context.filter_metadata, SUBSET_SPACE, SUBSET)
    if found is None:
        return None
    texts = found.split(",") if isinstance(found, str) else found if isinstance(found, ListValue) else ()
    return [one.strip() for one in texts if isinstance(one, str)]
