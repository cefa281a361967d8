"""The endpoint picker protocol behind a real Envoy with engines in processes of their own, and the front end of llm-d.

Docstrings quote the protocol document of the Gateway API Inference Extension (proposal 004, version 1.0.0).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from random import Random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import open_channel
from kvplane.v1 import front_ends_pb2 as pb
from kvplane.v1 import routing_pb2, routing_pb2_grpc
from kvplane_fleet.router.picker import HEADER, NAME, SERVED
from kvplane_service.auth.tokens import line_of, new_token
from tests.router.engine import BLOCK
from tests.router.envoy import Envoy
from tests.router.http_engine import ADAPTERS, TEXT, HttpEngine
from tests.store.servers import free_port

WITHIN_S = 60


class Gateway:
    """Two engines, a router and an Envoy."""

    def __init__(self, folder, *words, **options):
        self.folder, self.ports, self.engines, places = folder, {}, {}, []
        for name in ("a", "b"):
            port, events, replay = free_port(), *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            self.engines[name], self.ports[name] = HttpEngine(name, port, events, replay), port
            place = {"name": name, "model": "m", "endpoint": f"http://127.0.0.1:{port}", "events": events}
            places.append({**place, "replay": replay, "aliases": ["m-latest"], "adapters": ADAPTERS})
        file = folder / "places.yaml"
        file.write_text(json.dumps({"places": places, "router": options}))
        command = [sys.executable, "-m", "kvplane_tools", "router", str(file), "--listen", "127.0.0.1:0", *words]
        self.router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.router.stdout is not None
        self.address = self.router.stdout.readline().split()[-1]
        self.envoy = Envoy(folder, self.address, list(self.ports.values()))

    def channel(self, access=PLAIN):
        return open_channel(self.address, access)

    def places(self, access=PLAIN):
        with self.channel(access) as channel:
            answer = routing_pb2_grpc.RoutingStub(channel).ListPlaces(routing_pb2.ListPlacesRequest())
        return {one.place: one for one in answer.places}

    def wait_until(self, condition, access=PLAIN):
        deadline = time.monotonic() + WITHIN_S
        while not condition(self.places(access)):
            assert time.monotonic() < deadline, self.places(access)
            time.sleep(0.02)

    def close(self):
        self.envoy.close()
        self.router.send_signal(signal.SIGTERM)
        assert self.router.wait(WITHIN_S) == 0
        for one in self.engines.values():
            one.kill()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    one = Gateway(tmp_path_factory.mktemp("gateway"))
    one.wait_until(lambda places: all(place.state == "current" for place in places.values()))
    yield one
    one.close()


def sent(url, body=None, path="/v1/completions", **headers):
    """Status, headers and body of an answer."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def complete(url, prompt, **more):
    """Engine and cached tokens of a completion."""
    status, _, body = sent(url, {"model": "m", "prompt": prompt, **more})
    assert status == 200, body
    answer = json.loads(body)
    return answer["engine"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(seed, blocks):
    rng = Random(seed)
    return [rng.randrange(1000) for _ in range(blocks * BLOCK)]


def known(prompt_blocks):
    """That the places have this number of entries, and no prompt in flight: the next one would avoid its place."""

    def holds(places):
        has_entries = sum(place.entries for place in places.values()) >= prompt_blocks
        return has_entries and not any(place.in_flight for place in places.values())

    return holds


def entries(gateway):
    return sum(place.entries for place in gateway.places().values())


def test_the_second_turn_of_a_conversation_goes_to_the_engine_that_has_it(gateway):
    before, turns, first = entries(gateway), list[list[int]](), list[str]()
    while len(turns) < 6 or (set(first) != {"a", "b"} and len(turns) < 40):  # one that is loaded gets fewer
        turns.append(tokens(1000 + len(turns), 20))
        engine, cached = complete(gateway.envoy.url, turns[-1])
        assert cached == 0
        first.append(engine)
    assert set(first) == {"a", "b"}
    gateway.wait_until(known(before + len(turns) * 20))
    for number, turn in enumerate(turns):
        again = complete(gateway.envoy.url, [*turn, *tokens(100 + number, 2)])
        assert again == (first[number], 20 * BLOCK)


def test_what_engines_answer_is_reported_with_their_cached_tokens(gateway):
    def reported(places):
        return sum(place.real_tokens for place in places.values())

    before, prompt = gateway.places(), tokens(7, 10)
    size = entries(gateway)
    complete(gateway.envoy.url, prompt)
    gateway.wait_until(known(size + 10))
    complete(gateway.envoy.url, [*prompt, 1])
    gateway.wait_until(lambda places: reported(places) == reported(before) + 10 * BLOCK)
    after = gateway.places()
    assert sum(place.claimed_tokens for place in after.values()) == reported(after)
    gateway.wait_until(lambda places: not any(place.in_flight for place in places.values()))


def test_streamed_bodies_and_large_ones_arrive_as_they_were_sent(gateway):
    """Streaming mode enables full-duplex communication, allowing real-time token-by-token response delivery."""
    _, _, body = sent(gateway.envoy.url, {"model": "m", "prompt": tokens(8, 3), "stream": True})
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n")][:-1]
    assert [json.loads(line)["choices"][0]["text"] for line in lines[:3]] == [TEXT] * 3
    assert lines[-1] == "[DONE]"
    assert sum(place.samples for place in gateway.places().values()) > 0, "first bytes are reported as first tokens"
    asked = {"model": "m", "prompt": tokens(9, 3), "note": TEXT * 200}
    status, _, body = sent(gateway.envoy.url, asked)
    assert status == 200
    assert json.loads(body)["sent"] == asked


def test_text_and_messages_are_tokenized_by_the_engine(gateway):
    before, text = entries(gateway), "a conversation begins " * 20
    engine, _ = complete(gateway.envoy.url, text)
    gateway.wait_until(known(before + len(text) // BLOCK))
    for _ in range(3):
        again, cached = complete(gateway.envoy.url, text + "and continues")
        assert (again, cached > 0) == (engine, True)


def test_many_streams_at_once_are_intact(gateway):
    def one(number):
        asked = {"model": "m", "prompt": tokens(number % 7, 4 + number % 3), "stream": number % 2 == 0}
        status, _, body = sent(gateway.envoy.url, asked)
        if not asked["stream"]:
            return status == 200 and json.loads(body)["sent"] == asked
        return status == 200 and body.decode().count(json.dumps(TEXT)) == 3 and body.endswith(b"data: [DONE]\n\n")

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(120)))
    gateway.wait_until(lambda places: not any(place.in_flight for place in places.values()))


def test_requests_without_a_body_go_to_an_engine_with_the_address_in_the_header(gateway):
    _, _, body = sent(gateway.envoy.url, path="/seen")
    seen = json.loads(body)
    assert seen["headers"][HEADER].split(",")[0] == f"127.0.0.1:{gateway.ports[seen['engine']]}"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        ({"model": 3, "prompt": [1]}, 400),
        ({"model": "another", "prompt": [1]}, 404),
        (b"x" * (33 << 20), 413),
    ],
    ids=["no JSON", "no object", "no model", "unknown model", "too large"],
)
def test_bodies_that_no_engine_can_answer_are_refused(gateway, body, status):
    assert sent(gateway.envoy.url, body)[0] == status


def test_prompts_that_are_none_are_left_to_the_engine(gateway):
    for prompt in ([], [True], [1 << 40], 3, None):
        status, _, _ = sent(gateway.envoy.url, {"model": "m", "prompt": prompt, "n": "x"})
        assert status in (200, 503), prompt  # 503: the engine for tests closes the connection


def test_too_many_requests_in_flight_are_refused_with_429(tmp_path):
    """429 (Too Many Requests) if the request should be dropped."""
    gateway = Gateway(tmp_path, max_decisions=1)
    try:
        with gateway.channel() as channel:
            stub = routing_pb2_grpc.RoutingStub(channel)
            stub.Score(routing_pb2.ScoreRequest(model="m", prompt=routing_pb2.Prompt(token_ids=[1]), book=True))
        assert sent(gateway.envoy.url, {"model": "m", "prompt": [1]})[0] == 429
    finally:
        gateway.close()


def test_only_endpoints_of_the_subset_are_chosen(gateway):
    """The EPP MUST only select endpoints from the specified list, or return 503 if none is eligible or it is empty."""
    address = f"127.0.0.1:{gateway.ports['b']}"
    for subset, status in ([address], 200), ([], 503), (["127.0.0.1:1"], 503):
        envoy = Envoy(gateway.folder, gateway.address, list(gateway.ports.values()), subset)
        try:
            answers = [sent(envoy.url, {"model": "m", "prompt": tokens(seed, 2)}) for seed in range(4)]
            assert [one[0] for one in answers] == [status] * 4
            if status == 200:
                assert {json.loads(one[2])["engine"] for one in answers} == {"b"}
        finally:
            envoy.close()


def exchange(channel, *requests):
    """Answers of the external processor to parts of one exchange."""
    call = channel.stream_stream(f"/{NAME}/Process", pb.ProcessRequest.SerializeToString, pb.ProcessResponse.FromString)
    return list(call(iter(requests), timeout=WITHIN_S))


def parts(prompt, subset=None):
    """Headers and body of a request."""
    headers = pb.ProcessRequest(request_headers=pb.HttpHeaders())
    if subset is not None:
        headers.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({f"{HEADER}-subset": subset})
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    return [
        headers,
        pb.ProcessRequest(request_body=pb.HttpBody(body=body[:10])),
        pb.ProcessRequest(request_body=pb.HttpBody(body=body[10:], end_of_stream=True)),
    ]


def test_header_and_metadata_have_the_same_endpoints(gateway):
    """The EPP MUST not set two different values in the header and the inner response metadata value; multiple endpoints
    are separated by commas, and are tried in order.
    """
    with gateway.channel() as channel:
        first, *bodies = exchange(channel, *parts([1, 2, 3]))
    (option,) = first.request_headers.response.header_mutation.set_headers
    assert option.header.key == HEADER
    value = option.header.raw_value.decode()
    assert sorted(value.split(",")) == sorted(f"127.0.0.1:{port}" for port in gateway.ports.values())
    assert first.dynamic_metadata["envoy.lb"][HEADER] == value
    streamed = [one.request_body.response.body_mutation.streamed_response for one in bodies]
    assert b"".join(one.body for one in streamed) == b'{"model": "m", "prompt": [1, 2, 3]}'
    assert [one.end_of_stream for one in streamed] == [True]


def test_the_endpoint_that_served_decides_what_is_learned(gateway):
    """In metadata_context a field x-gateway-destination-endpoint-served is added with the key envoy.lb."""
    usage = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 1}}}).encode()

    def learned(served_by):
        before = sum(place.real_tokens for place in gateway.places().values())
        headers = pb.ProcessRequest(response_headers=pb.HttpHeaders())
        headers.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        address = f"127.0.0.1:{gateway.ports[served_by]}"
        headers.metadata_context.filter_metadata["envoy.lb"].update({SERVED: address})
        body = pb.ProcessRequest(response_body=pb.HttpBody(body=usage, end_of_stream=True))
        with gateway.channel() as channel:
            exchange(channel, *parts([5] * 40, [f"127.0.0.1:{gateway.ports['a']}"]), headers, body)
        gateway.wait_until(lambda places: not any(place.in_flight for place in places.values()))
        return sum(place.real_tokens for place in gateway.places().values()) - before

    assert (learned("a"), learned("b")) == (1, 0)


def test_an_exchange_that_is_broken_off_ends(gateway):
    with gateway.channel() as channel:
        exchange(channel, *parts([1] * 40))
        exchange(channel, *parts([1] * 40)[:2])
        call = channel.stream_stream(f"/{NAME}/Process", lambda raw: raw, pb.ProcessResponse.FromString)
        with pytest.raises(grpc.RpcError, match="cannot be parsed"):
            list(call(iter([b"\xff\xff"]), timeout=WITHIN_S))
    gateway.wait_until(lambda places: not any(place.in_flight for place in places.values()))


@pytest.mark.parametrize("service", ["liveness", "readiness", NAME])
def test_health_is_served_by_the_names_of_the_protocol(gateway, service):
    with gateway.channel() as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def pod_scores(gateway, access=PLAIN, **asked):
    with gateway.channel(access) as channel:
        call = channel.unary_unary(
            "/indexer.v1.IndexerService/GetPodScores",
            pb.GetPodScoresRequest.SerializeToString,
            pb.GetPodScoresResponse.FromString,
        )
        return {one.pod: one.score for one in call(pb.GetPodScoresRequest(**asked), timeout=WITHIN_S).scores}


def test_pods_are_scored_as_llm_d_does(gateway):
    before, text = entries(gateway), "a text that is scored " * 10
    engine, _ = complete(gateway.envoy.url, text)
    blocks = len(text) // BLOCK
    gateway.wait_until(known(before + blocks))
    asked = {"prompt": text + "!", "model_name": "m"}
    assert pod_scores(gateway, **asked) == {engine: blocks}
    address = f"127.0.0.1:{gateway.ports[engine]}"
    other = "b" if engine == "a" else "a"
    assert pod_scores(gateway, **asked, pod_identifiers=[address, other]) == {address: blocks}
    assert pod_scores(gateway, **asked, pod_identifiers=[other]) == {}
    with pytest.raises(grpc.RpcError, match="no place has the model"):
        pod_scores(gateway, prompt="x", model_name="another")


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "tokens"])
def test_an_adapter_is_a_model_whose_prompts_hit_its_own_blocks(gateway, is_text):
    """Through the proxy, by GetPodScores, and under another name of the base model."""
    text = f"{is_text}: a text for each of three models, " * 10
    prompt, blocks = (text if is_text else [ord(one) for one in text]), len(text) // BLOCK
    for number, model in enumerate(("m", "sql", "chat")):
        before = entries(gateway)
        engine, cached = complete(gateway.envoy.url, prompt, model=model)
        assert cached == 0
        gateway.wait_until(known(before + blocks))
        assert pod_scores(gateway, prompt=text + "!", model_name=model) == {engine: blocks}
        has_it, cached = {engine}, 0
        while not cached:  # the measured times of a busy machine may make the other one cheaper, which then has it too
            chosen, cached = complete(gateway.envoy.url, text + "!" if is_text else [*prompt, 1], model=model)
            assert cached == (blocks * BLOCK if chosen in has_it else 0)
            has_it.add(chosen)
        gateway.wait_until(known(before + blocks * len(has_it)))
        others = ("m", "sql", "chat")[number + 1 :]
        assert [pod_scores(gateway, prompt=text + "!", model_name=name) for name in others] == [{}] * len(others)
    assert pod_scores(gateway, prompt=text + "!", model_name="m-latest")
    assert sent(gateway.envoy.url, {"model": "sql@2", "prompt": prompt})[0] == 404


def test_no_text_reaches_engines_that_its_owner_may_not_use(tmp_path):
    secrets = {name: new_token() for name in ("first", "second")}
    (tmp_path / "owners").write_text("first: {replicas: [a]}\nsecond: {replicas: ['x/*']}")
    (tmp_path / "tokens").write_text("".join(line_of(token, name) + "\n" for name, token in secrets.items()))
    words = [f"auth_{name}={tmp_path / name}" for name in ("owners", "tokens")]
    gateway = Gateway(tmp_path, "--set", words[0], "--set", words[1])
    first, second = (Access(token=token) for token in secrets.values())
    try:
        gateway.wait_until(lambda places: places["a"].state == "current", first)
        asked = {"prompt": "a text", "model_name": "m"}
        assert pod_scores(gateway, first, **asked) == {}
        with pytest.raises(grpc.RpcError, match="no place has the model"):
            pod_scores(gateway, second, **asked)
        gateway.engines["a"].kill()
        gateway.wait_until(lambda places: places["a"].state == "not connected", first)
        with pytest.raises(grpc.RpcError, match="no engine of the model tokenizes"):
            pod_scores(gateway, first, **asked)
    finally:
        gateway.close()


def test_a_killed_engine_is_not_asked_again_and_loses_no_request(gateway):
    prompt = tokens(70, 20)
    engine, _ = complete(gateway.envoy.url, prompt)
    gateway.wait_until(lambda places: not any(place.in_flight for place in places.values()))
    gateway.engines[engine].kill()
    other, before = "b" if engine == "a" else "a", gateway.places()
    assert complete(gateway.envoy.url, prompt)[0] == other, "the proxy tries the next endpoint of the list"
    gateway.wait_until(lambda places: places[engine].state == "not connected" and not places[engine].in_flight)
    after = gateway.places()
    assert [after[name].claimed_tokens for name in after] == [before[name].claimed_tokens for name in before], (
        "an answer of another engine teaches nothing about the chosen one"
    )
    assert [complete(gateway.envoy.url, tokens(seed, 2))[0] for seed in range(5)] == [other] * 5
