"""What an operator asks a running service."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
import yaml

from kvplane import AdmitRow, Content, FactRow, NewsRow, RunRow, connect, part_of
from kvplane.base.step import End
from kvplane.requests import Allocate
from kvplane_service.cli import COMMANDS
from kvplane_service.config import Config
from tests.cli.processes import KVPLANE
from tests.cli.test_serve import end, serving
from tests.service.rig import running

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
    assert lines[1:] == ["replicas: 2 (1 live, 1 idle, 0 lapsed)", "metrics: none", "traces: off"]


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
    assert "workers: none for 1 ranks" in text
    assert "SLOWEST STEPS" in text


@pytest.mark.parametrize("command", ["status", "replicas", "describe r", "explain r --request first"])
def test_every_answer_has_three_forms(ask, command):
    words = command.split()
    parsed = json.loads(ask(*words, "-o", "json"))
    assert yaml.safe_load(ask(*words, "-o", "yaml")).keys() == parsed.keys()
    assert ask(*words, "-o", "table") != ask(*words, "-o", "json")


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


def test_explain_a_request(ask):
    text = ask("explain", "r", "--request", "second")
    assert text.splitlines()[0] == "32 of 40 tokens hit when it was tried in step 2; the longest hit would be 32"
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
    assert "why: tokens 0..16 were computed under another cache salt" in salted


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


def test_grpcurl_prints_the_same_call(ask, service):
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
        body, address, method = words[3:]
        assert address == service.address
        assert method.startswith("kvplane.v1.")
        json.loads(body)
    body = json.loads(shlex.split(ask("explain", "r", "--request", "first", "--grpcurl"))[3])
    assert body == {"replica": "r", "request_id": "first"}


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
    assert complete("kvplane describe ") == {"r", "idle"}


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


def test_a_call_through_unary_calls_is_explained_too(service, kvplane):
    with connect(service.address) as client:
        client.allocate_slots("idle", Allocate("by hand", Content(tokens=PROMPT)))
        code, out, _ = kvplane("explain", "idle", "--request", "by hand", "--service", service.address)
    assert code == 0
    assert "why: nobody has computed tokens 0..16" in out
