"""Commands that query a running service."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from importlib.metadata import version
from typing import Any

import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory

from kvplane import AdmitRow, Content, FactRow, NewsRow, RunRow, connect, part_of
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.requests import Allocate
from kvplane.base.step import End, OnRefusal
from kvplane.v1.admin_pb2 import ExplainResponse
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, GroupCounters, ReplicaSummary
from kvplane_service.config import Config
from kvplane_tools.cli import COMMANDS
from kvplane_tools.cli.client import described
from kvplane_tools.cli.query.explain import sentence
from tests.cli import processes
from tests.cli.processes import KVPLANE, run_kvplane
from tests.cli.test_serve import end, serving
from tests.client.proxy import CuttingProxy
from tests.service.rig import running, until

PROMPT = [11] * 40

# Frames of HTTP/2 (RFC 9113): length, type, flags, stream, and what GOAWAY has.
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
GOAWAY = bytes([0, 0, 8, 7, 0, 0, 0, 0, 0])
LAST_STREAM, INTERNAL_ERROR = bytes(4), bytes([0, 0, 0, 2])


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
    """Run a command against the service; returns its output."""

    def run(*arguments: str) -> str:
        code, out, errors = kvplane(*arguments, "--service", service.address)
        assert (code, errors) == (0, "")
        return out

    return run


def test_status_command_prints_the_service(ask, service):
    lines = ask("status").splitlines()
    assert lines[0].startswith(f"kvplane {version('kvplane')} at {service.address}, serving for ")
    assert lines[1:] == [
        "replicas: 2 (1 live, 1 idle, 0 lapsed, 0 recovering)",
        "metrics: none",
        "traces: off",
        "core: native",
    ]


def test_replicas_command_lists_replicas(ask):
    heading, idle, live = [line.split() for line in ask("replicas").splitlines()]
    assert heading == ["REPLICA", "STATE", "RUNNING", "WAITING", "HIT", "BLOCKS", "FREE", "HELD", "LAST", "SEEN"]
    assert idle[:8] == ["idle", "idle", "0", "-", "-", "40", "40", "0%"]
    assert idle[-1] == "ago"
    assert live == ["r", "live", "1", "-", "40%", "40", "34", "15%", "now"]


def test_mrc_command_prints_what_pools_of_other_sizes_hit(kvplane, service, tmp_path):
    def ask(*arguments):
        code, out, _ = kvplane("mrc", *arguments, "--service", service.address)
        return code, out

    code, text = ask("r")
    lines = [line.split() for line in text.splitlines()]
    assert code == 0
    assert lines[0] == ["BLOCKS", "GIB", "POOL", "HITS", "PREEMPTED"]
    assert [line[0] for line in lines[1:-1]] == ["10", "20", "41", "82", "164"]
    assert [line[2] for line in lines[2:-1]] == ["0.488x", "1x", "2x", "4x"]
    assert [line[3:] for line in lines if "pool;" in line] == [["40.0%", "0", "<-", "this", "pool;", "really", "40.0%"]]
    assert lines[-1][1] == "80"
    sizes = json.loads(ask("r", "-o", "json")[1])["sizes"]
    assert [(one["hit_tokens"], one["this_pool"]) for one in sizes[2:]] == [(32, True), (32, False), (32, False)]
    assert ask("idle") == (1, "")
    assert kvplane("record", "r", str(tmp_path / "log"), "--decisions", "3", "--service", service.address)[0] == 0
    assert ask(str(tmp_path / "log"), "--log") == (0, text)


def test_describe_command_prints_a_replica(ask):
    text = ask("describe", "r")
    assert "r: live, epoch 2, step 3 (executed through 2)" in text
    assert "hits: 32 of 80 tokens looked up (40%)" in text
    assert "pool: 6 of 40 blocks held by 1 running request" in text
    assert ["1", "sliding_window", "32"] in [line.split()[:3] for line in text.splitlines()]
    assert "store: none" in text
    assert "workers: none for 1 rank" in text
    assert "SLOWEST STEPS" in text


@pytest.mark.parametrize("command", ["status", "replicas", "describe r", "explain r --request first"])
def test_every_answer_has_three_output_formats(ask, command):
    words = command.split()
    parsed = json.loads(ask(*words, "-o", "json"))
    assert yaml.safe_load(ask(*words, "-o", "yaml")).keys() == parsed.keys()
    assert ask(*words, "-o", "table") != ask(*words, "-o", "json")


def test_json_fields_are_in_the_order_of_the_contract(ask):
    names = [field.name for field in DescribeReplicaResponse.DESCRIPTOR.fields]
    answer = json.loads(ask("describe", "r", "-o", "json"))
    assert list(answer) == [name for name in names if name in answer]
    assert next(iter(answer["counters"]["groups"][0])) == GroupCounters.DESCRIPTOR.fields[0].name
    assert answer["refusals"]["never_fits"] == "0"


def test_events_command_prints_events(ask):
    text = ask("events", "r")
    assert text.startswith("batch 1 of epoch 2\n  stored group 0 tokens 0..32 ")
    batches = [json.loads(line) for line in ask("events", "r", "-o", "json").splitlines()]
    assert [batch["seq"] for batch in batches] == [1]
    assert {event["kind"] for event in batches[0]["events"]} == {"stored"}
    assert ask("events", "r", "--after", "1") == ""
    assert next(yaml.safe_load_all(ask("events", "r", "-o", "yaml"))) == batches[0]


def test_events_follow_until_ctrl_c(service):
    with processes.running("events", "r", "--follow", "--service", service.address) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "batch 1 of epoch 2\n"
        assert processes.interrupt(process) == 130


def test_events_follow_resumes_after_a_lost_connection(service):
    """No batch is lost and none is printed twice."""
    proxy = CuttingProxy(service.address)
    command = ["events", "many", "--follow", "-o", "json", "--service", proxy.address]
    with connect(service.address) as client, contextlib.closing(proxy):
        service.register("many")
        with processes.running(*command) as process:
            assert process.stdout is not None
            printed = []
            for number in range(4):
                client.allocate_slots("many", Allocate(f"request {number}", Content(token_ids=[number] * 40)))
                if number == 0:
                    continue  # is published when the next step reports it as executed
                printed.append(json.loads(process.stdout.readline())["seq"])
                before = proxy.num_connections
                proxy.refuse(number == 1)
                proxy.cut()
                until(lambda: number != 1 or proxy.num_connections > before)  # noqa: B023 - is called at once
                proxy.refuse(False)
            assert processes.interrupt(process) == 130
    assert printed == [1, 2, 3]
    assert proxy.num_connections > 2


def test_events_after_an_unreached_batch_are_refused(service, kvplane):
    code, _, errors = kvplane("events", "r", "--after", "99", "--service", service.address)
    assert code == 2
    assert "99 is above the last batch" in errors


def test_explain_command_explains_a_request(ask):
    text = ask("explain", "r", "--request", "second")
    attempt = "in step 2 of epoch 2"
    assert text.splitlines()[0] == f"32 of 40 tokens hit {attempt}; longest possible hit: 32"
    assert "cause: the hit is as long as possible" in text


def test_explain_command_says_what_a_refused_request_needs(kvplane):
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            news = NewsRow(0, tokens=[7] * 200, request_id="one"), NewsRow(1, tokens=[8] * 200, request_id="two")
            session.apply(part_of(*news, AdmitRow(0), AdmitRow(1)))
            _, text, _ = kvplane("explain", "r", "--request", "two", "--service", service.address)
    assert text.splitlines()[-1] == "the admission was refused: it needed 26 blocks, 14 were free"


REFUSED_RUNS = {
    "preempted": (RunRow(1), OnRefusal.PREEMPT, "12 blocks more, 14 were free after it was preempted"),
    "reserved": (RunRow(1, reserved=20), OnRefusal.PREEMPT, "32 blocks more, 14 were free after it was preempted"),
    "stopped": (RunRow(1), OnRefusal.STOP, "12 blocks more, 8 were free"),
}


@pytest.mark.parametrize("kind", REFUSED_RUNS)
def test_explain_command_says_what_a_refused_running_request_needs(kvplane, kind):
    row, on_refusal, needed = REFUSED_RUNS[kind]
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            news = NewsRow(0, tokens=[7] * 200, request_id="one"), NewsRow(1, tokens=[8] * 40, request_id="two")
            session.apply(part_of(*news, AdmitRow(0), AdmitRow(1)))
            part = part_of(FactRow(1, tokens=[8] * 100), row)
            part.run.on_refusal = on_refusal
            session.apply(part)
            _, text, _ = kvplane("explain", "r", "--request", "two", "--service", service.address)
    assert text.splitlines()[-1] == f"step 2 gave it no tokens: it needed {needed}"


def test_explain_command_says_that_a_request_never_fits(kvplane):
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, 8),)
    lengths: dict[str, Any] = dict.fromkeys(("hash_block_size", "scheduler_block_size"), 8)
    lengths |= dict.fromkeys(("max_model_len", "max_in_flight_tokens"), 256)
    spec = ReplicaSpec(groups, num_blocks=8, **lengths)
    with running(Config(listen="127.0.0.1:0")) as service, connect(service.address) as client:
        client.register_replica("small", spec)
        with client.session("small") as session:
            session.apply(part_of(NewsRow(0, tokens=[7] * 100, request_id="one"), AdmitRow(0)))
            _, text, _ = kvplane("explain", "small", "--request", "one", "--service", service.address)
    assert text.splitlines()[-1] == "the request never fits: it holds 13 blocks at one time, more than the pool has"


def test_explain_command_shows_the_history_of_a_block(ask):
    heading, *changes = ask("explain", "r", "--block", "1").splitlines()
    assert heading.split() == ["AGE", "STEP", "EPOCH", "BLOCK", "GROUP", "KEY", "CHANGE"]
    assert changes[0].endswith("computed by request 'first'")


def test_explain_command_explains_a_prompt(ask, tmp_path):
    file = tmp_path / "prompt"
    file.write_text(f"[{', '.join(['11'] * 32)}]\n" + "12 " * 20)
    text = ask("explain", "r", "--tokens", str(file))
    assert text.splitlines() == [
        "32 of 52 tokens hit; longest possible hit: 48",
        "GROUP  KIND            HIT ALONE",
        "0      full_attention  32         limits the hit, else 48",
        "1      sliding_window  32",
        "cause: tokens 32..48 were never computed",
    ]
    salted = ask("explain", "r", "--tokens", str(file), "--salt", "x")
    assert "cause: tokens 0..16 were computed with another cache salt, or none" in salted
    elsewhere = ask("explain", "r", "--tokens", str(file), "--domain", "x")
    assert "cause: tokens 0..16 were computed in another domain, the default one" in elsewhere


def test_explain_names_the_engine_life_that_lost_the_keys():
    lost = ExplainResponse(cause="MISS_CAUSE_UNVERIFIED", end=16, epoch=3, age_ms=1500)
    assert sentence(lost).endswith("the stamps did not verify them 1.5 s ago, when epoch 3 began")


def test_explain_of_a_disconnected_engine_works_by_request_name(service, kvplane, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("7 " * 40)
    with connect(service.address) as client:
        service.register("left")
        with client.session("left") as session:
            session.apply(part_of(NewsRow(0, tokens=[7] * 40, request_id="first"), AdmitRow(0)))
    code, _, errors = kvplane("explain", "left", "--tokens", str(file), "--service", service.address)
    assert code == 1
    assert "the engine of left is gone or silent (wait until its engine reconnects, or name a" in errors
    assert kvplane("explain", "left", "--request", "first", "--service", service.address)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["explain", "r"], 2, "exactly one of --request, --block and --tokens"),
        (["explain", "r", "--request", "unknown"], 2, "the decision log has no attempt to admit the request 'unknown'"),
        (["explain", "r", "--tokens", "/nowhere/file"], 2, "No such file"),
        (["describe", "unknown"], 2, "there is no replica 'unknown'"),
    ],
)
def test_wrong_use_is_one_error_with_its_exit_code(service, kvplane, arguments, code, message):
    result = kvplane(*arguments, "--service", service.address)
    assert result[0] == code
    assert message in result[2]


@pytest.mark.parametrize("command", ["status", "replicas", "doctor", "top", "drain"])
def test_unreachable_service_is_unavailable(kvplane, command):
    code, _, errors = kvplane(command, "--service", "127.0.0.1:1")
    assert code == 3
    assert errors.startswith("kvplane: ")
    assert errors.endswith("(check that it runs, or name its address by --service or KVPLANE_SERVICE)\n")


def test_grpcurl_prints_the_equivalent_call(ask, service):
    """The body has the method's request type, and the call has the command's answer."""
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
    """The answer without the fields that change between two calls."""
    for name in ("age_ms", "last_seen_ms", "slowest_steps", "lease_left_ms"):
        if name in answer.DESCRIPTOR.fields_by_name:
            answer.ClearField(name)
    for one in getattr(answer, "replicas", ()):
        timeless(one)
    return answer


def test_drain_ends_the_process():
    with serving() as (process, address):
        command = [*KVPLANE, "drain", "--wait", "--service", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [f"{address}: draining", f"{address}: exited"]
        code, logged = end(process)
    assert code == 0
    assert "Admin.Drain: draining" in logged


def test_an_error_is_one_line_when_the_connection_ends_with_an_error():
    """GRPC logs a line of its own for such an end by default. A service that drains ends connections in this way."""

    def go_away() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(SETTINGS + GOAWAY + LAST_STREAM + INTERNAL_ERROR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=go_away, daemon=True).start()
        done = run_kvplane("status", "--service", f"127.0.0.1:{listener.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (3, "")
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["kvplane:"]
    assert "GOAWAY" in done.stderr


def test_shell_completes_commands_and_replicas(service):
    def complete(line: str) -> set[str]:
        environment = {
            **os.environ,
            "_KVPLANE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
            "KVPLANE_SERVICE": service.address,
        }
        code = "import sys; sys.argv = ['kvplane']; from kvplane_tools.cli import app; app(prog_name='kvplane')"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        return set(done.stdout.split())

    assert complete("kvplane ") >= set(COMMANDS)
    assert complete("kvplane describe ") >= {"r", "idle"}


def test_described_skips_a_replica_deregistered_since_the_listing(service):
    with connect(service.address) as client:
        listed = [*client.list_replicas(), ReplicaSummary(replica="gone")]
        assert [answer.replica for answer in described(client, listed)] == [one.replica for one in listed[:-1]]


def test_explain_of_a_request_made_by_unary_calls(service, kvplane):
    with connect(service.address) as client:
        client.allocate_slots("idle", Allocate("by hand", Content(token_ids=PROMPT)))
        code, out, _ = kvplane("explain", "idle", "--request", "by hand", "--service", service.address)
    assert code == 0
    assert "cause: tokens 0..16 were never computed" in out
