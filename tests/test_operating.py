"""docs/operating.md and the pages below it: every command in them runs, and the example of TLS does."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from kvplane import AdmitRow, NewsRow, connect, part_of
from kvplane.v1.admin_pb2 import RecordRequest
from kvplane_tools.cli.query.recorder import record
from tests.cli.processes import run_kvplane
from tests.cli.test_serve import serving
from tests.service.rig import running
from tests.test_readme import fenced_blocks

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "operating.md", *sorted((DOCS / "operating").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
COMMANDS = sorted(set(re.findall(r"`(kvplane [a-z][^`]*)`", TEXT)))
# Full-screen; needs a store, a cluster, certificates or a replica; runs until stopped: other tests run them.
LEFT_OUT = {
    "kvplane top", "kvplane bench", "kvplane store inspect", "kvplane worker --service a:7070,b:7070", "kvplane mrc",
    "kvplane status --tls-ca ca.pem --token-file token", "kvplane doctor --kubernetes -n NAMESPACE",
}  # fmt: skip
FLEET = [command for command in COMMANDS if command.startswith("kvplane fleet")]  # tests/router/test_cli.py runs them
CHANGES = ("deregister", "reset", "evict")
OFFLINE = ("kvplane plan", "kvplane models", "kvplane replay", "kvplane token", "kvplane erase")


def test_operating_notes_show_the_commands():
    assert {command.split()[1] for command in COMMANDS} >= {
        "serve", "status", "replicas", "describe", "top", "doctor", "explain", "drain", "plan", "record", "replay",
    }  # fmt: skip


def test_serve_with_metrics_command_runs():
    (command,) = [command for command in COMMANDS if command.startswith("kvplane serve --metrics")]
    words = shlex.split(command.replace(":9464", ":0"))[2:]
    with serving(*words) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvplane: metrics on http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("command", [one for one in COMMANDS if "serve" not in one and one not in (*LEFT_OUT, *FLEET)])
def test_command_of_the_notes_runs(command, tmp_path):
    log, new = tmp_path / "log", tmp_path / "new"
    if command.split()[1] == "drain":
        with serving() as (process, address):
            assert run_kvplane(*shlex.split(command)[1:], "--service", address).returncode == 0
            assert process.wait(30) == 0
        return
    with running() as service, connect(service.address) as client:
        service.register()
        service.register("idle")
        with client.session("r") as session:
            session.apply(part_of(NewsRow(0, tokens=[1] * 40, request_id="named"), AdmitRow(0)))
            session.apply(part_of())  # so that the keys of the first one are published
            record(service.address, RecordRequest(replica="r"), log, 1)
            values = {"REPLICA": "r", "NAME": "named", "MODEL": "llama-3.1-8b", "FILE": str(log), "N": "60"}
            values |= {"OWNER": "team-a", "FOLDER": str(tmp_path)}
            words = [values.get(word, word) for word in shlex.split(command)][1:]
            if words[0] in CHANGES:  # the engine of the other one runs no further step
                words = [*("idle" if word == "r" else word for word in words), "--yes"]
            if words[0] == "lookup":
                new.write_text("1 " * 40)
                words = ["lookup", "--tokens", str(new)]
            if words[0] == "record":
                words = ["record", "r", str(new), "--decisions", "1"]
            if words[0] == "describe" and "r" not in words:
                words.insert(1, "r")
            if not command.startswith(OFFLINE):
                words += ["--service", service.address]
            done = run_kvplane(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_unit_of_systemd_starts_what_the_page_installs(tmp_path):
    page = (DOCS / "setup.md").read_text()
    (configuration,), (unit,) = fenced_blocks(page, "yaml"), fenced_blocks(page, "ini")
    file = tmp_path / "kvplane.yaml"
    file.write_text(configuration)
    parser = ConfigParser()
    parser.read_string(unit)
    command = parser["Service"]["ExecStart"].replace("/etc/kvplane.yaml", str(file)).split()
    assert command[0].endswith("/bin/kvplane")
    assert command[1] == "serve"
    checked = run_kvplane("config", *command[2:])
    assert checked.returncode == 0, checked.stderr
    folder = f"/var/lib/{parser['Service']['StateDirectory']}/"
    assert f"sqlite:{folder}" in checked.stdout
    assert int(parser["Service"]["TimeoutStopSec"]) * 1000 > yaml.safe_load(configuration)["drain_grace_ms"]


def test_extras_that_the_page_names_exist():
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    page = (DOCS / "setup.md").read_text()
    named = re.findall(r"^\| `([\w,-]+)` \|", page, flags=re.MULTILINE)
    assert len(named) > 3
    assert {one for each in named for one in each.split(",")} <= set(project["optional-dependencies"])


def test_example_of_tls_runs_as_printed(tmp_path, monkeypatch):
    page = (DOCS / "operating" / "tls.md").read_text()
    openssl, commands = fenced_blocks(page, "sh")
    (configuration,), (code,) = fenced_blocks(page, "yaml"), fenced_blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    for line in openssl.splitlines():
        subprocess.run(line, shell=True, check=True, capture_output=True)
    Path("kvplane.yaml").write_text(configuration)
    start, ask = (shlex.split(line)[1:] for line in commands.splitlines())
    with serving(*start[1:]) as (_, address):
        there = f"localhost:{address.rpartition(':')[2]}"
        asked = run_kvplane(*(there if word == "localhost:7070" else word for word in ask))
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.startswith("kvplane ")
        run = [sys.executable, "-c", code.replace("localhost:7070", there)]
        assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "0 replicas\n"
        without = [word for word in ask if "client." not in word and word not in ("--tls-cert", "--tls-key")]
        refused = run_kvplane(*(there if word == "localhost:7070" else word for word in without))
        assert refused.returncode != 0, "it asks for a certificate"
