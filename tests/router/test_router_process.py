"""`kvplane router` as a process, over gRPC, with engines in processes of their own."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from kvplane.base.errors import InvalidArgument
from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import open_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.v1 import routing_pb2 as pb
from kvplane.v1 import routing_pb2_grpc
from kvplane_fleet.domains import keys_of
from kvplane_fleet.router.messages import pack_keys
from kvplane_service.auth.tokens import line_of, new_token
from kvplane_service.config import Config
from kvplane_service.runtime.interpreter import OTHER_FILES
from kvplane_tools.cli import app
from tests.router.engine import DOMAIN, EngineProcess, batches
from tests.store.servers import free_port

WITHIN_S = 60
FEW_FILES = 200
DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"


class RouterProcess:
    """A router over two engines, the second of which has more batches."""

    def __init__(self, folder, *options: str) -> None:
        self.engines, places = list[EngineProcess](), []
        for number, name in enumerate(["a", "b"]):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            engine = EngineProcess(events, replay, seed=number)
            engine.publish(3 + number)
            self.engines.append(engine)
            places.append(
                f"  - {{name: {name}, model: m, endpoint: 'http://{name}', events: '{events}', replay: '{replay}'}}"
            )
        file = folder / "places.yaml"
        file.write_text("places:\n" + "\n".join(places))
        command = [sys.executable, "-m", "kvplane_tools", "router", str(file), "--listen", "127.0.0.1:0"]
        command += ["--metrics", "127.0.0.1:0", *options]
        self.hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FEW_FILES, self.hard))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=few)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        self.metrics = self.process.stdout.readline().split()[-1]

    def stub(self, access: Access = PLAIN) -> contextlib.AbstractContextManager[grpc.Channel]:
        return open_channel(self.address, access)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WITHIN_S) == 0
        for engine in self.engines:
            engine.kill()


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    one = RouterProcess(tmp_path_factory.mktemp("router"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def routing(router):
    with router.stub() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        for status in stub.Watch(request, timeout=WITHIN_S):
            if status.status == health_pb2.HealthCheckResponse.SERVING:
                break
        yield routing_pb2_grpc.RoutingStub(channel)


def prompt_of(engine: int) -> list[int]:
    tokens: list[int] = next(batches(engine))[0]["token_ids"]
    return tokens


def refusal(call, request):
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=WITHIN_S)
    return error_of_rpc(cast(RpcOutcome, caught.value))


def test_its_limit_of_open_files_follows_that_of_connections(router):
    wanted = Config().max_connections + OTHER_FILES
    assert resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)[0] == min(wanted, router.hard)


def test_a_prompt_goes_to_its_engine_and_its_reports_are_compared(routing):
    prompt = [*prompt_of(1), 7]
    answer = routing.Score(pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=prompt), book=True))
    first, second = answer.places
    assert (first.place, first.endpoint, first.hit_tokens) == ("b", "http://b", len(prompt) - 1)
    assert second.hit_tokens < first.hit_tokens
    assert [group.kind for group in first.groups] == ["full_attention", "sliding_window"]
    assert first.cost.total_s < second.cost.total_s
    assert first.cost.total_s == pytest.approx(
        sum(getattr(first.cost, f"{part}_s") for part in ("queue", "miss", "delay", "displacement", "decode", "later"))
    )
    assert answer.reason.startswith("b by policy cost")
    report = pb.ReportRequest(decision_id=answer.decision_id, cached_tokens=len(prompt) - 1)
    report.stage = pb.REPORT_STAGE_STARTED
    assert routing.Report(report).cause == "equal"
    report.stage, report.elapsed_s = pb.REPORT_STAGE_FIRST_TOKEN, 0.5
    assert routing.Report(report).claimed_tokens == len(prompt) - 1
    report.stage, report.output_tokens = pb.REPORT_STAGE_ENDED, 20
    routing.Report(report)
    assert refusal(routing.Report, report).reason == "NOT_FOUND"
    (place,) = (one for one in routing.ListPlaces(pb.ListPlacesRequest(model="m")).places if one.place == "b")
    assert (place.state, place.claimed_tokens, place.real_tokens) == ("current", len(prompt) - 1, len(prompt) - 1)
    assert (place.samples, place.in_flight) == (1, 0)


def test_keys_give_the_same_scores_as_tokens(routing):
    prompt = [*prompt_of(0), 7]
    by_keys = pb.Prompt(keys=pack_keys(DOMAIN.keys(prompt), 8), num_tokens=len(prompt))
    answers = [
        routing.Score(pb.ScoreRequest(model="m", prompt=one)).places for one in (pb.Prompt(token_ids=prompt), by_keys)
    ]
    assert answers[0] == answers[1]
    assert answers[0][0].hit_tokens == len(prompt) - 1


def test_a_stream_answers_in_order_and_survives_refused_requests(routing):
    good = pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=prompt_of(0)))
    asked = [good, pb.ScoreRequest(model="x", prompt=good.prompt), pb.ScoreRequest(model="m"), good]
    answers = list(routing.ScoreStream(iter([pb.ScoreStreamRequest(request=one) for one in asked]), timeout=WITHIN_S))
    assert [one.error.reason for one in answers] == ["", "NOT_FOUND", "INVALID_ARGUMENT", ""]
    assert answers[0].response.places == answers[3].response.places


BAD = {
    "model": pb.ScoreRequest(model="x", prompt=pb.Prompt(token_ids=[1])),
    "prompt": pb.ScoreRequest(model="m"),
    "prompt.keys": pb.ScoreRequest(model="m", prompt=pb.Prompt(keys=b"1234567", num_tokens=16)),
    "policy": pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=[1]), policy=99),  # type: ignore[arg-type]
    "candidates": pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=[1]), candidates=["x"] * 5000),
}


@pytest.mark.parametrize("field", BAD)
def test_a_refused_request_names_the_field(routing, field):
    error = refusal(routing.Score, BAD[field])
    assert error.field == field
    assert error.reason in ("NOT_FOUND", "INVALID_ARGUMENT")


def test_keys_of_another_block_size_claim_nothing_and_say_why(routing):
    prompt = pb.Prompt(keys=pack_keys([1, 2, 3], 8), num_tokens=160)
    for place in routing.Score(pb.ScoreRequest(model="m", prompt=prompt)).places:
        assert place.hit_tokens == 0
        assert "3 keys for 160 tokens" in place.inexact


def test_wrong_reports_are_refused_and_change_nothing(routing):
    prompt = pb.Prompt(token_ids=prompt_of(0))
    decision = routing.Score(pb.ScoreRequest(model="m", prompt=prompt, book=True)).decision_id
    wrong = [
        pb.ReportRequest(decision_id=decision),
        pb.ReportRequest(decision_id=decision, stage=pb.REPORT_STAGE_ENDED, cached_tokens=10_000_000),
        pb.ReportRequest(decision_id=decision, stage=pb.REPORT_STAGE_ENDED, elapsed_s=float("nan")),
        pb.ReportRequest(decision_id=decision, stage=pb.REPORT_STAGE_ENDED, elapsed_s=-1),
        pb.ReportRequest(decision_id="x", stage=pb.REPORT_STAGE_ENDED),
    ]
    assert [refusal(routing.Report, one).field for one in wrong] == [
        "stage", "cached_tokens", "elapsed_s", "elapsed_s", "decision_id",
    ]  # fmt: skip
    routing.Report(pb.ReportRequest(decision_id=decision, stage=pb.REPORT_STAGE_ENDED))


def test_a_watcher_has_the_entries_of_the_engine_through_changes(router, routing):
    wanted = {("a", group): engine_content(0, 3, group) for group in (0, 1)}
    wanted |= {("b", group): engine_content(1, 104, group) for group in (0, 1)}
    content = {named: Counter[int]() for named in wanted}
    stream = routing.WatchIndex(pb.WatchIndexRequest(model="m"), timeout=WITHIN_S)
    for message in stream:
        if message.snapshot_end:
            assert content["a", 0] == wanted["a", 0]
            assert content["b", 0] == engine_content(1, 4, 0)
            router.engines[1].publish(100)
        kind = message.WhichOneof("change")
        if kind in ("stored", "removed"):
            part = getattr(message, kind)
            counts = content[message.place, part.group]
            (counts.update if kind == "stored" else counts.subtract)(keys_of(part.keys, part.key_bytes, part.key_bytes))
        if {named: +counts for named, counts in content.items()} == wanted:
            break
    stream.cancel()


def engine_content(seed, number, group):
    """What an engine has in a group after a number of batches."""
    held = Counter[int]()
    for _, batch in zip(range(number), batches(seed), strict=False):
        for event in batch:
            if event["group_idx"] == group:
                (held.update if event["type"] == "BlockStored" else held.subtract)(event["block_hashes"])
    return +held


def test_metrics_have_every_family_of_the_documentation(router, routing):
    page = urllib.request.urlopen(router.metrics).read().decode()
    documented = set(re.findall(r"^\| `(kvplane_router_\w+)`", DOCUMENTATION.read_text(), flags=re.MULTILINE))
    assert documented == set(re.findall(r"^# HELP (kvplane_router_\w+)", page, flags=re.MULTILINE))
    assert 'kvplane_router_place_state{place="a",state="current"} 1.0' in page
    assert 'kvplane_router_entries{place="b"}' in page


def test_an_owner_sees_its_own_places(tmp_path):
    token, other = new_token(), new_token()
    (tmp_path / "owners").write_text("first: {replicas: [a]}\nsecond: {scopes: [read], replicas: ['x/*']}")
    (tmp_path / "tokens").write_text(line_of(token, "first") + "\n" + line_of(other, "second") + "\n")
    router = RouterProcess(
        tmp_path, "--set", f"auth_owners={tmp_path / 'owners'}", "--set", f"auth_tokens={tmp_path / 'tokens'}"
    )
    request = pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=prompt_of(1)))
    try:
        with router.stub() as channel:
            assert refusal(routing_pb2_grpc.RoutingStub(channel).Score, request).reason == "UNAUTHENTICATED"
        with router.stub(Access(token=token)) as channel:
            stub = routing_pb2_grpc.RoutingStub(channel)
            assert [one.place for one in stub.Score(request).places] == ["a"]
            assert [one.place for one in stub.ListPlaces(pb.ListPlacesRequest()).places] == ["a"]
            request.candidates.append("b")
            assert refusal(stub.Score, request).reason == "NOT_FOUND"
            booked = pb.ScoreRequest(model="m", prompt=request.prompt, book=True)
            report = pb.ReportRequest(decision_id=stub.Score(booked).decision_id, stage=pb.REPORT_STAGE_ENDED)
        with router.stub(Access(token=other)) as channel:
            stub = routing_pb2_grpc.RoutingStub(channel)
            assert refusal(stub.Report, report).reason == "PERMISSION_DENIED"
            assert refusal(lambda one, timeout: list(stub.WatchIndex(one, timeout=timeout)),
                           pb.WatchIndexRequest()).reason == "PERMISSION_DENIED"  # fmt: skip
    finally:
        router.close()


def test_reports_need_their_scope_their_owner_and_what_can_have_happened(tmp_path):
    tokens = {name: new_token() for name in ("first", "second", "reader", "operator")}
    (tmp_path / "owners").write_text(
        "first: {replicas: [a]}\nsecond: {replicas: ['x/*']}\nreader: {scopes: [read], replicas: [b]}\n"
        "operator: {scopes: [report], every_replica: true}\n"
    )
    (tmp_path / "tokens").write_text("".join(f"{line_of(token, name)}\n" for name, token in tokens.items()))
    files = (f"auth_owners={tmp_path / 'owners'}", f"auth_tokens={tmp_path / 'tokens'}")
    router = RouterProcess(tmp_path, *(word for one in files for word in ("--set", one)))
    booked = pb.ScoreRequest(model="m", prompt=pb.Prompt(token_ids=prompt_of(1)), book=True)
    ended = pb.ReportRequest(stage=pb.REPORT_STAGE_ENDED)
    with ExitStack() as stack:
        stack.callback(router.close)
        stubs = {
            name: routing_pb2_grpc.RoutingStub(stack.enter_context(router.stub(Access(token=token))))
            for name, token in tokens.items()
        }
        ended.decision_id = stubs["reader"].Score(booked).decision_id
        assert refusal(stubs["reader"].Report, ended).reason == "PERMISSION_DENIED"
        ended.decision_id = stubs["first"].Score(booked).decision_id
        assert refusal(stubs["second"].Report, ended).reason == "NOT_FOUND"
        ended.elapsed_s = 3600
        error = refusal(stubs["first"].Report, ended)
        assert (error.reason, error.field) == ("INVALID_ARGUMENT", "elapsed_s")
        ended.ClearField("elapsed_s")
        stubs["operator"].Report(ended)
        assert refusal(stubs["first"].Report, ended).reason == "NOT_FOUND", "it has ended"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "store=memory"], "only the allocation service reads it"),
        (["--set", "nothing=1"], "unknown key nothing"),
        (["--listen", "nowhere"], "host:port"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, words, said):
    (tmp_path / "places.yaml").write_text("places: []")
    result = CliRunner().invoke(app, ["router", str(tmp_path / "places.yaml"), *words])
    assert isinstance(result.exception, InvalidArgument)
    assert said in str(result.exception)
