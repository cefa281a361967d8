"""One exchange of the endpoint picker, message by message. Quotations are of the protocol document of the Gateway API
Inference Extension (proposal 004, version 1.0.0); `test_picker` has the same through a real Envoy.
"""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import pytest

from kvplane.v1 import front_ends_pb2 as pb
from kvplane_fleet.router import picker as picker_module
from kvplane_fleet.router.picker import HEADER, SUBSET, EndpointPicker, Exchange, last_number
from kvplane_service.auth.gate import CALL, Call
from kvplane_service.auth.owners import Owner
from tests.router.fleets import Scene, tokens

ADDRESSES = {"a": "127.0.0.1:8001", "b": "127.0.0.1:8002", "c": "[::1]:8003"}
PROMPT = tokens(1, 4)
BODY = json.dumps({"model": "m", "prompt": PROMPT, "note": "é" * 50_000}).encode()


class Proxy:
    """What a proxy sees of one picker: three engines of one model, of which `b` has the prompt."""

    def __init__(self, **settings):
        self.scene = Scene(*ADDRESSES, **settings)
        for name, address in ADDRESSES.items():
            place = self.scene.place(name)
            place.settings = msgspec.structs.replace(place.settings, endpoint=f"http://{address}")
        self.scene.stores("b", PROMPT)

        async def decide(ask):
            return self.scene.decisions.score(
                ask, {one: ask.prompt.keys_of(one) for one in self.scene.fleet.domains("m")}
            )

        self.picker = EndpointPicker(self.scene.fleet, self.scene.decisions, decide, self.scene.clock)

    @property
    def room(self):
        return self.picker.room.taken_bytes

    def begin(self):
        return Exchange(self.picker)

    async def send(self, *requests, exchange=None):
        one = exchange or self.begin()
        return [answer for request in requests for answer in await one.take(request)]


@contextmanager
def called(call):
    token = CALL.set(call)
    try:
        yield
    finally:
        CALL.reset(token)


def headers(subset=None, is_end=False):
    request = pb.ProcessRequest(request_headers=pb.HttpHeaders(end_of_stream=is_end))
    if subset is not None:
        request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: subset})
    return request


def body(*parts, is_end=True):
    last = len(parts) - 1
    return [
        pb.ProcessRequest(request_body=pb.HttpBody(body=part, end_of_stream=is_end and at == last))
        for at, part in enumerate(parts)
    ]


def response(status="200", served=None, attribute=None, is_stream=False, is_end=False):
    request = pb.ProcessRequest(response_headers=pb.HttpHeaders(end_of_stream=is_end))
    request.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if is_stream:
        request.response_headers.headers.headers.add(key="content-type", value="text/event-stream; charset=utf-8")
    if served is not None:
        request.metadata_context.filter_metadata["envoy.lb"].update({f"{HEADER}-served": served})
    if attribute is not None:
        request.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": attribute})
    return request


def endpoints(answer):
    (option,) = answer.request_headers.response.header_mutation.set_headers
    assert (option.header.key, option.append_action) == (HEADER, 2)
    return option.header.raw_value.decode().split(",")


def streamed(answers, part="request_body"):
    parts = [getattr(one, part).response.body_mutation.streamed_response for one in answers]
    assert [one.end_of_stream for one in parts[:-1]] == [False] * (len(parts) - 1)
    return b"".join(one.body for one in parts), parts[-1].end_of_stream if parts else None


def status(answers):
    (answer,) = answers
    return answer.immediate_response.status.code, json.loads(answer.immediate_response.body)["error"]["message"]


async def test_the_endpoints_are_in_the_header_and_in_the_metadata_and_equal():
    """The EPP MUST communicate to the proxy the selected model server endpoint via setting the
    x-gateway-destination-endpoint HTTP header to the selected endpoint in <ip:port> format [and] an unstructured entry
    in the dynamic_metadata field, wrapped with an outer key [...] envoy.lb. It MUST not set two different values.
    """
    proxy = Proxy()
    first, *_ = await proxy.send(headers(), *body(BODY))
    assert endpoints(first)[0] == ADDRESSES["b"]
    assert sorted(endpoints(first)) == sorted(ADDRESSES.values())
    assert dict(first.dynamic_metadata["envoy.lb"].items()) == {HEADER: ",".join(endpoints(first))}
    assert first.request_headers.response.clear_route_cache


@pytest.mark.parametrize("seed", range(5))
async def test_a_body_in_any_parts_is_passed_on_as_it_came_and_ends_once(seed):
    """FULL_DUPLEX_STREAMED: all that was received is sent as streamed_response, the last part with end_of_stream."""
    proxy, rng = Proxy(), Random(seed)
    cuts = sorted(rng.randrange(len(BODY)) for _ in range(rng.randrange(6)))
    parts = [BODY[start:end] for start, end in zip([0, *cuts], [*cuts, len(BODY)], strict=True)]
    answers = await proxy.send(headers(), *body(*parts))
    assert answers[0].WhichOneof("response") == "request_headers"
    assert streamed(answers[1:]) == (BODY, True)
    assert all(len(one.SerializeToString()) < 64 << 10 for one in answers)
    assert proxy.room == 0


async def test_nothing_is_answered_before_the_whole_body_is_there():
    proxy = Proxy()
    exchange = proxy.begin()
    assert await proxy.send(headers(), *body(BODY[:40], b"", BODY[40:80], is_end=False), exchange=exchange) == []
    assert proxy.room == 80
    assert exchange.takes_room
    exchange.end()
    assert proxy.room == 0


async def test_trailers_end_a_body_that_did_not_end_itself():
    proxy = Proxy()
    trailers = pb.ProcessRequest(request_trailers=pb.HttpTrailers())
    answers = await proxy.send(headers(), *body(BODY, is_end=False), trailers)
    assert streamed(answers[1:-1]) == (BODY, False)
    assert answers[-1].WhichOneof("response") == "request_trailers"


@pytest.mark.parametrize(
    ("subset", "chosen"),
    [
        ([ADDRESSES["a"]], ["a"]),
        ([ADDRESSES["c"], "10.0.0.1:1"], ["c"]),
        (f"{ADDRESSES['a']}, {ADDRESSES['b']}", ["b", "a"]),
        (None, ["b", "a", "c"]),
    ],
    ids=["one", "one of which is no engine", "as a text", "not set"],
)
async def test_only_endpoints_of_the_subset_are_chosen(subset, chosen):
    """The EPP MUST only select endpoints from the specified list. If the key is not set, it MUST select from the set
    defined by the InferencePool selector.
    """
    first, *_ = await Proxy().send(headers(subset), *body(BODY))
    assert endpoints(first)[0] == ADDRESSES[chosen[0]]
    assert sorted(endpoints(first)) == sorted(ADDRESSES[one] for one in chosen)


@pytest.mark.parametrize("subset", [[], ["10.0.0.1:1"], "", 7.0], ids=["empty", "no engine", "empty text", "no list"])
async def test_a_subset_without_an_engine_is_refused_with_503(subset):
    """If none of the endpoints in the list is eligible or the list is empty, the EPP MUST return an ImmediateResponse
    with 503 (Service Unavailable).
    """
    assert status(await Proxy().send(headers(subset), *body(BODY)))[0] == 503


async def test_without_a_ready_endpoint_503_is_returned_whatever_the_body():
    proxy = Proxy()
    for name in ADDRESSES:
        place = proxy.scene.place(name)
        place.settings = msgspec.structs.replace(place.settings, endpoint="")
    for request in ([headers(is_end=True)], [headers(), *body(BODY)], [headers(), *body(b"no JSON")]):
        assert status(await proxy.send(*request)) == (503, "no engine with an address may be chosen")


async def test_what_comes_after_a_refusal_is_not_answered():
    proxy = Proxy()
    exchange = proxy.begin()
    assert status(await proxy.send(headers(), *body(b"{", is_end=True), exchange=exchange))[0] == 400
    assert await proxy.send(*body(BODY), response(), exchange=exchange) == []


async def test_bodies_of_all_streams_share_one_room():
    proxy = Proxy(max_body_bytes=1 << 20)
    held = [proxy.begin() for _ in range(3)]
    for exchange in held[:2]:
        assert await proxy.send(headers(), *body(b"x" * 450_000, is_end=False), exchange=exchange) == []
    code, message = status(await proxy.send(headers(), *body(b"x" * 70_000, is_end=False), exchange=held[2]))
    assert (code, message) == (429, "bodies of requests take 900000 bytes of the router, of 1048576")
    small = b'{"model": "m", "prompt": [1]}'  # has room
    assert streamed((await proxy.send(headers(), *body(small)))[1:]) == (small, True)
    assert proxy.room == 900_000
    for exchange in held:
        exchange.end()
        exchange.end()
    assert proxy.room == 0
    answers = await proxy.send(headers(), *body(BODY))
    assert streamed(answers[1:]) == (BODY, True)


async def test_a_body_that_is_larger_than_the_share_of_an_owner_is_taken_alone():
    proxy = Proxy(max_body_bytes=1 << 20)
    for length, is_taken in ((800_000, True), (1000, False)):
        with called(Call(owner=Owner(name="gateway"))):
            assert (await proxy.send(headers(), *body(b"x" * length, is_end=False)) == []) is is_taken


async def test_the_bodies_of_one_owner_leave_half_of_the_room_to_others():
    proxy = Proxy(max_body_bytes=1 << 20)
    for name, is_taken in (("gateway", True), ("gateway", False), ("rival", True), ("", False)):
        with called(Call(owner=Owner(name=name))):
            answers = await proxy.send(headers(), *body(b"x" * 400_000, is_end=False))
            assert (answers == []) is is_taken
    with called(Call(owner=Owner(name="gateway"))):
        proxy.picker.room.leave(400_000)
        assert await proxy.send(headers(), *body(b"x" * 400_000, is_end=False)) == []


@pytest.mark.parametrize("unit", [b"{}", b"[]", b'""', b'{"a":{}}'])
@pytest.mark.parametrize("name", [b"messages", b"prompt", b"model", b"max_tokens", b"cache_salt", b"unknown"])
async def test_a_body_costs_no_more_memory_than_some_times_its_length(name, unit):
    """An end user may send any body: no objects are made of what only engines read."""
    proxy, size = Proxy(), 4 << 20
    sent = b'{"model":"m","' + name + b'":[' + (unit + b",") * (size // (len(unit) + 1)) + b"1]}"
    began_s = time.process_time()
    await proxy.send(headers(), *body(sent))
    assert time.process_time() - began_s < 1.0
    tracemalloc.start()
    await proxy.send(headers(), *body(sent))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * len(sent) + (160 << 20 if name == b"prompt" else 0)  # at most 2^20 prompts are looked at


async def test_a_body_of_many_names_makes_no_object_of_each():
    proxy = Proxy()
    sent = b"{" + b",".join(b'"%d":1' % at for at in range(300_000)) + b',"model":"m","prompt":[1]}'
    tracemalloc.start()
    await proxy.send(headers(), *body(sent))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * len(sent)


async def test_a_refused_exchange_leaves_the_room():
    proxy = Proxy(max_decisions=1)
    for expected in ("b", 429):
        answers = await proxy.send(headers(), *body(BODY))
        assert (status(answers)[0] if expected == 429 else endpoints(answers[0])[0]) in (expected, ADDRESSES["b"])
        assert proxy.room == 0
    assert status(await proxy.send(headers(), *body(b"x" * (33 << 20))))[0] == 413
    assert proxy.room == 0


class Stream:
    """The context of a stream on which messages come until none comes any more."""

    def __init__(self, *requests):
        self._requests, self.written = list(requests), []

    async def read(self):
        if self._requests:
            return self._requests.pop(0).SerializeToString()
        await asyncio.Event().wait()

    async def write(self, raw):
        self.written.append(pb.ProcessResponse.FromString(raw))


async def test_a_body_that_does_not_end_is_refused_in_time_and_leaves_the_room(monkeypatch):
    monkeypatch.setattr(picker_module, "BODY_S", 0.05)
    proxy, stream = Proxy(), Stream(headers(), *body(BODY[:1000], is_end=False))
    assert CALL.get().owe(1) == 0
    await asyncio.wait_for(proxy.picker.Process(stream), 30)  # type: ignore[arg-type]
    assert status(stream.written)[0] == 408
    assert proxy.room == 0


@pytest.mark.parametrize(
    ("answer", "teaches"),
    [
        (response(), True),
        (response(served=ADDRESSES["b"]), True),
        (response(served=ADDRESSES["a"]), False),
        (response(attribute=ADDRESSES["b"]), True),
        (response(attribute=ADDRESSES["c"]), False),
        (response(served=ADDRESSES["b"], attribute=ADDRESSES["c"]), True),
        (response(status="503"), False),
        (response(is_end=True), False),
    ],
    ids=["not stated", "served", "by another", "attribute", "attribute of another", "both", "failed", "without a body"],
)
async def test_only_the_answer_of_the_chosen_engine_teaches(answer, teaches):
    """The proxy communicates the endpoint that served the request in x-gateway-destination-endpoint-served."""
    proxy = Proxy()
    exchange, work = proxy.begin(), proxy.scene.decisions.work_of("b")
    await proxy.send(headers(), *body(BODY), exchange=exchange)
    assert work.in_flight == 1
    usage = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 48}, "completion_tokens": 3}}).encode()
    passed = await proxy.send(answer, exchange=exchange)
    assert [one.WhichOneof("response") for one in passed] == ["response_headers"]
    parts = [pb.ProcessRequest(response_body=pb.HttpBody(body=usage[:30]))]
    parts.append(pb.ProcessRequest(response_body=pb.HttpBody(body=usage[30:], end_of_stream=True)))
    assert streamed(await proxy.send(*parts, exchange=exchange), "response_body") == (usage, True)
    assert work.in_flight == 0
    assert (work.truth.prompts > 0) == teaches
    assert work.truth.real == (48 if teaches else 0)


async def test_the_first_bytes_of_a_stream_are_its_first_token():
    proxy = Proxy()
    exchange, work = proxy.begin(), proxy.scene.decisions.work_of("b")
    await proxy.send(headers(), *body(BODY), response(is_stream=True), exchange=exchange)
    for part, samples in ((b"", 0), (b"data: 1\n\n", 1), (b"data: 2\n\n", 1)):
        await proxy.send(pb.ProcessRequest(response_body=pb.HttpBody(body=part)), exchange=exchange)
        assert work.costs.samples == samples
    await proxy.send(pb.ProcessRequest(response_trailers=pb.HttpTrailers()), exchange=exchange)
    assert work.in_flight == 0


NUMBERS = {
    b'{"usage": {"cached_tokens": 5}}': 5,
    b'{"cached_tokens":5, "cached_tokens" : 12}': 12,
    rb'{"text": "a \"cached_tokens\": 7", "cached_tokens": 3}': 3,
    rb'{"cached_tokens": 3, "text": "a \"cached_tokens\": 7"}': 3,
    b'{"cached_tokens": null}': None,
    b'"cached_tokens"': None,
    b'"cached_tokens": -4': None,
    b"": None,
    b'{"cached_tokens": 3, "cached_tokens": null}': 3,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_last_number_of_a_name_is_found_outside_of_texts(text):
    assert last_number(b"cached_tokens", text) == NUMBERS[text]


class Sent:
    """A stream of these messages."""

    def __init__(self, *requests):
        self.left = [one.SerializeToString() for one in requests]

    async def read(self):
        return self.left.pop(0) if self.left else None

    async def write(self, _):
        pass


async def counted_of(*requests):
    """Return what each message of an exchange counts apart from its length."""
    counted = list[int]()

    class Counted(Call):
        def owe(self, num_bytes):
            counted.append(num_bytes)
            return 0

    with called(Counted()):
        sent: Any = Sent(*requests)
        await Proxy().picker.Process(sent)
    return [count - one.ByteSize() for count, one in zip(counted, requests, strict=True)]


PART_OF_ANSWER = pb.ProcessRequest(response_body=pb.HttpBody(body=b"data: {}"))


async def test_each_message_of_an_exchange_counts_what_it_costs():
    """Otherwise an owner that sends many short ones slows others down, within any limit."""
    apart = await counted_of(headers(), *body(BODY), response(), PART_OF_ANSWER, PART_OF_ANSWER)
    assert apart[:3] == [picker_module.EXCHANGE_BYTES, picker_module.MESSAGE_BYTES, picker_module.MESSAGE_BYTES]
    assert apart[3:] == [picker_module.ANSWER_BYTES] * 2


async def test_answers_are_no_way_to_begin_an_exchange_for_little():
    assert await counted_of(PART_OF_ANSWER) == [picker_module.EXCHANGE_BYTES]
