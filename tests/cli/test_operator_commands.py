"""What an operator asks a running service."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from typing import cast

import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory

from kvplane import AdmitRow, Content, FactRow, NewsRow, RunRow, connect, part_of
from kvplane.base.step import End
from kvplane.requests import Allocate
from kvplane.v1.admin_pb2 import ExplainResponse
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, GroupCounters, ReplicaState, ReplicaSummary
from kvplane_service.cli import COMMANDS
from kvplane_service.cli.asking import described
from kvplane_service.cli.explain import sentence
from kvplane_service.cli.top_view import panel
from kvplane_service.cli.watch import Trend
from kvplane_service.config import Config
from tests.cli.processes import KVPLANE
from tests.cli.test_serve import end, serving
from tests.cli.test_view import drawn
from tests.client.proxy import CuttingProxy
from tests.service.rig import running, until

PROMPT = [11] * 40


@pytest.fixture(scope="module")
def service():
    """Replica "r" with a live session that has served a request and runs another, and "idle"."""
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        service.register()
        service.register("idle")
        with client.session("r") as session:
            session.apply(part_of(NewsRow(0, tokens=PROMPT, request_id="first"), AdmitRow(0)))
            second = NewsRow(1, tokens=PROMPT, request_id="second")
            session.apply(part_of(FactRow(0, end=End.FREE), second, AdmitRow(1)))
            session.apply(part_of(FactRow(1, tokens=[5]), RunRow(1)))
            yield service


@pytest.fixture
def ask(service, kvplane):
    """Run a command against the service; its output."""

    def run(*arguments: str) -> str:
        code, out, told = kvplane(*arguments, "--service", service.address)
        assert (code, told) == (0, "")
        return out

    return run


def test_status(ask, service):
    lines = ask("status").splitlines()
    assert lines[0].startswith(f"kvplane {version('kvplane')} at {service.address}, serving for ")
    assert lines[1:] == ["replicas: 2 (1 live, 1 idle, 0 lapsed, 0 recovering)", "metrics: none", "traces: off"]


def test_replicas(ask):
    assert [line.split() for line in ask("replicas").splitlines()] == [
        ["REPLICA", "STATE", "EPOCH", "BLOCKS", "FREE", "HELD"],
        ["idle", "idle", "1", "41", "40", "0%"],
        ["r", "live", "2", "41", "34", "15%"],
    ]


def test_describe(ask):
    text = ask("describe", "r")
    assert "r: live, epoch 2, step 3 (executed through 2)" in text
    assert "hits: 32 of 80 tokens looked up (40%)" in text
    assert "pool: 6 of 40 blocks held by 1 running requests" in text
    assert ["1", "sliding_window", "32"] in [line.split()[:3] for line in text.splitlines()]
    assert "store: none" in text
    assert "workers: none for 1 ranks" in text
    assert "SLOWEST STEPS" in text


@pytest.mark.parametrize("command", ["status", "replicas", "describe r", "explain r --request first"])
def test_every_answer_has_three_forms(ask, command):
    words = command.split()
    parsed = json.loads(ask(*words, "-o", "json"))
    assert yaml.safe_load(ask(*words, "-o", "yaml")).keys() == parsed.keys()
    assert ask(*words, "-o", "table") != ask(*words, "-o", "json")


def test_an_answer_lists_its_fields_as_the_contract_does(ask):
    names = [field.name for field in DescribeReplicaResponse.DESCRIPTOR.fields]
    told = json.loads(ask("describe", "r", "-o", "json"))
    assert list(told) == [name for name in names if name in told]
    assert next(iter(told["counters"]["groups"][0])) == GroupCounters.DESCRIPTOR.fields[0].name
    assert told["refusals"]["never_fits"] == "0"


def test_events(ask):
    text = ask("events", "r")
    assert text.startswith("batch 1 of epoch 2\n  stored group 0 tokens 0..32 ")
    batches = [json.loads(line) for line in ask("events", "r", "-o", "json").splitlines()]
    assert [batch["seq"] for batch in batches] == [1]
    assert {event["kind"] for event in batches[0]["events"]} == {"stored"}
    assert ask("events", "r", "--after", "1") == ""
    assert next(yaml.safe_load_all(ask("events", "r", "-o", "yaml"))) == batches[0]


def test_events_are_followed_until_ctrl_c(service):
    command = [*KVPLANE, "events", "r", "--follow", "--service", service.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "batch 1 of epoch 2\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_events_are_followed_through_a_broken_connection(service):
    """Nothing is lost and nothing told twice."""
    proxy = CuttingProxy(service.address)
    command = [*KVPLANE, "events", "many", "--follow", "-o", "json", "--service", proxy.address]
    with connect(service.address) as client, contextlib.closing(proxy):
        service.register("many")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = []
            for number in range(4):
                client.allocate_slots("many", Allocate(f"request {number}", Content(tokens=[number] * 40)))
                if number == 0:
                    continue  # is shown when the next step says that it was executed
                told.append(json.loads(process.stdout.readline())["seq"])
                before = proxy.num_connections
                proxy.refuse(number == 1)
                proxy.cut()
                until(lambda: number != 1 or proxy.num_connections > before)  # noqa: B023 - is called at once
                proxy.refuse(False)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
    assert told == [1, 2, 3]
    assert proxy.num_connections > 2


def test_events_behind_the_last_one_are_refused(service, kvplane):
    code, _, told = kvplane("events", "r", "--after", "99", "--service", service.address)
    assert code == 2
    assert "batch 99 has not been reached" in told


def test_explain_a_request(ask):
    text = ask("explain", "r", "--request", "second")
    tried = "when it was tried in step 2 of engine life 2"
    assert text.splitlines()[0] == f"32 of 40 tokens hit {tried}; the longest hit would be 32"
    assert "why: nothing: the hit is as long as it can be" in text


def test_explain_a_prompt(ask, tmp_path):
    file = tmp_path / "prompt"
    file.write_text(f"[{', '.join(['11'] * 32)}]\n" + "12 " * 20)
    text = ask("explain", "r", "--tokens", str(file))
    assert text.splitlines() == [
        "32 of 52 tokens hit; the longest hit would be 48",
        "GROUP  KIND            HAS ALONE",
        "0      full_attention  32         cut the hit from 48",
        "1      sliding_window  32",
        "why: nobody has computed tokens 32..48",
    ]
    salted = ask("explain", "r", "--tokens", str(file), "--salt", "x")
    assert "why: tokens 0..16 were computed under another cache salt, or none" in salted
    elsewhere = ask("explain", "r", "--tokens", str(file), "--domain", "x")
    assert "why: tokens 0..16 were computed in another domain, the default one" in elsewhere


def test_explain_tells_which_engine_life_lost_the_keys():
    lost = ExplainResponse(cause="MISS_CAUSE_UNVERIFIED", end=16, epoch=3, age_ms=1500)
    assert sentence(lost).endswith("the memory did not prove them 1.5 s ago, when engine life 3 began")


def test_an_engine_that_left_is_told_and_its_past_explained(service, kvplane, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("7 " * 40)
    with connect(service.address) as client:
        service.register("left")
        with client.session("left") as session:
            session.apply(part_of(NewsRow(0, tokens=[7] * 40, request_id="first"), AdmitRow(0)))
    code, _, told = kvplane("explain", "left", "--tokens", str(file), "--service", service.address)
    assert code == 1
    assert "the engine of left is gone or silent (none of its pages can be hit until it is back; name a req" in told
    assert kvplane("explain", "left", "--request", "first", "--service", service.address)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["explain", "r"], 2, "exactly one of --request and --tokens"),
        (["explain", "r", "--request", "nobody"], 2, "no attempt to admit 'nobody' is recorded"),
        (["explain", "r", "--tokens", "/nowhere/file"], 2, "No such file"),
        (["describe", "nobody"], 2, "there is no replica 'nobody'"),
    ],
)
def test_wrong_use_is_named(service, kvplane, arguments, code, told):
    result = kvplane(*arguments, "--service", service.address)
    assert result[0] == code
    assert told in result[2]


@pytest.mark.parametrize("command", ["status", "replicas", "doctor", "top", "drain"])
def test_a_service_that_is_not_there_is_unavailable(kvplane, command):
    code, _, told = kvplane(command, "--service", "127.0.0.1:1")
    assert code == 3
    assert told.startswith("kvplane: ")
    assert told.endswith("(is it running there? --service or KVPLANE_ADDRESS names another address)\n")


def test_grpcurl_prints_the_same_call(ask, service):
    """Its body is of the method's request type, and is answered as the command is."""
    commands = {
        "status": ["status"],
        "replicas": ["replicas"],
        "describe": ["describe", "r"],
        "events": ["events", "r"],
        "explain": ["explain", "r", "--request", "first"],
        "drain": ["drain"],
    }
    for name, command in commands.items():
        words = shlex.split(ask(*command, "--grpcurl"))
        assert words[:3] == ["grpcurl", "-plaintext", "-d"], name
        body, address, path = words[3:]
        assert address == service.address
        package, _, method = path.partition("/")
        kind = descriptor_pool.Default().FindServiceByName(package).FindMethodByName(method)
        request = json_format.Parse(body, message_factory.GetMessageClass(kind.input_type)())
        if name in ("replicas", "describe", "explain"):
            answer_type = message_factory.GetMessageClass(kind.output_type)
            call = service.channel.unary_unary(f"/{path}", type(request).SerializeToString, answer_type.FromString)
            answered = json_format.Parse(ask(*command, "-o", "json"), answer_type())
            assert timeless(call(request)) == timeless(answered), name
    body = json.loads(shlex.split(ask("explain", "r", "--request", "first", "--grpcurl"))[3])
    assert body == {"replica": "r", "request_id": "first"}


def timeless(answer):
    """Without what goes on between two calls."""
    for name in ("age_ms", "slowest_steps", "lease_left_ms"):
        if name in answer.DESCRIPTOR.fields_by_name:
            answer.ClearField(name)
    return answer


def test_drain_sends_the_process_away():
    with serving() as (process, address):
        command = [*KVPLANE, "drain", "--wait", "--service", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [f"{address} drains", f"{address} has gone"]
        code, logged = end(process)
    assert code == 0
    assert "Admin.Drain: draining" in logged


def test_the_shell_completes_commands_and_replicas(service):
    def complete(line: str) -> set[str]:
        environment = {
            **os.environ,
            "_KVPLANE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
            "KVPLANE_ADDRESS": service.address,
        }
        code = "import sys; sys.argv = ['kvplane']; from kvplane_service.cli import app; app(prog_name='kvplane')"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        return set(done.stdout.split())

    assert complete("kvplane ") >= set(COMMANDS)
    assert complete("kvplane describe ") >= {"r", "idle"}


def test_top_once(ask):
    text = ask("top", "--once")
    assert "r live" in text
    assert "hit tokens 32 40%" in text
    assert "slowest steps" in text


async def test_top_is_a_program(service):
    from kvplane_service.cli.top_app import Top

    with connect(service.address) as client:
        app = Top(client, service.address, 0.1)
        async with app.run_test(size=(90, 60)) as pilot:
            while app.num_looks < 3:
                await pilot.pause(0.02)
            shown = app.picture()
            await pilot.press("p")
            await pilot.press("q")
    assert "sliding_window" in shown
    assert "kvplane&#160;top" in shown
    assert "@font-face" not in shown  # which a viewer would load from the network


def test_top_shows_a_replica_in_every_state(service):
    with connect(service.address) as client:
        told = client.describe_replica("r")
    for number in ReplicaState.values():
        told.state = cast(ReplicaState, number)
        text, state = drawn(panel(told, Trend())), ReplicaState.Name(told.state)
        assert f"r {state.removeprefix('REPLICA_STATE_').lower()} " in text


def test_top_names_how_many_it_leaves_out(ask, monkeypatch):
    monkeypatch.setattr("kvplane_service.cli.top_view.MAX_REPLICAS", 1)
    assert "more: kvplane replicas" in ask("top", "--once")


def test_top_of_a_service_without_replicas_says_so(kvplane):
    with running() as service:
        assert kvplane("top", "--once", "--service", service.address)[1] == "no replica is registered\n"


def test_who_was_deregistered_between_two_calls_is_passed_over(service):
    with connect(service.address) as client:
        listed = [*client.list_replicas(), ReplicaSummary(replica="gone")]
        assert [told.replica for told in described(client, listed)] == [one.replica for one in listed[:-1]]


def test_a_picture_of_top_needs_no_terminal(ask, monkeypatch, tmp_path):
    monkeypatch.setattr("kvplane_service.cli.top_app.PICTURE_LOOKS", 2)
    ask("top", "--interval", "0.1", "--svg", str(tmp_path / "top.svg"))
    assert "sliding_window" in (tmp_path / "top.svg").read_text()


async def test_top_says_when_the_service_is_away():
    from textual.widgets import Static

    from kvplane.retry import RetryPolicy
    from kvplane_service.cli.top_app import Top

    with connect("127.0.0.1:1", retry=RetryPolicy(attempts=1)) as client:
        app = Top(client, "127.0.0.1:1", 0.1)
        async with app.run_test() as pilot:
            trouble = app.query_one("#trouble", Static)
            while not str(trouble.render()):
                await pilot.pause(0.02)
            assert "127.0.0.1:1" in str(trouble.render())
            app._show_trouble("errors resolving [field:x][/y]")  # is text, not markup
            assert str(trouble.render()) == "errors resolving [field:x][/y]"


def test_a_call_through_unary_calls_is_explained_too(service, kvplane):
    with connect(service.address) as client:
        client.allocate_slots("idle", Allocate("by hand", Content(tokens=PROMPT)))
        code, out, _ = kvplane("explain", "idle", "--request", "by hand", "--service", service.address)
    assert code == 0
    assert "why: nobody has computed tokens 0..16" in out
