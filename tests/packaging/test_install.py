"""A first install: the source distribution in an empty environment, without and with the commands."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.packaging.environments import QUIET_PIP, ROOT

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

LIMIT_S = 120


def environment() -> dict[str, str]:
    """Environment variables without those that name code or services."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVPLANE_"))}


class Installed:
    """An environment of its own with kvplane; commands run in an empty folder."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self._folder, self.archive = folder, archive
        self._bin = folder / "bin"
        venv.create(folder, symlinks=True)
        self.install(str(archive))

    def install(self, *words: str) -> None:
        command = [*QUIET_PIP, "--python", str(self._bin / "python"), "install", *words]
        subprocess.run(command, check=True, env=environment())

    def command(self, *words: str) -> list[str]:
        return [str(self._bin / "kvplane"), *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            cwd=self._folder,
            env=environment(),
            timeout=LIMIT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """The base install, from the source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (archive,) = folder.glob("kvplane-*.tar.gz")
    return Installed(tmp_path_factory.mktemp("environment"), archive)


@pytest.fixture(scope="module")
def complete(installed) -> Installed:
    """The same environment after the command that it names itself; tests of the base install come before."""
    named = shlex.split(installed.run("serve").stderr.partition("typer: ")[2])
    assert named[:2] == ["pip", "install"]
    installed.install(*named[2:])
    return installed


@pytest.fixture(scope="module")
def address(complete) -> Iterator[str]:
    """A service that `kvplane serve` runs."""
    serve = complete.command("serve", "--listen", "127.0.0.1:0")
    process = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("words", [(), ("serve",), ("--help",)])
def test_base_install_names_the_pip_command(installed, words):
    done = installed.run(*words)
    said = f"kvplane: this command needs typer: pip install '{installed.archive}[cli,service]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_commands_run_outside_the_repository(complete, address):
    assert complete.run("version").stdout.startswith("kvplane ")
    assert "Control plane of the KV cache" in complete.run("--help").stdout
    status = complete.run("status", "--service", address)
    assert (status.returncode, status.stderr) == (0, "")
    plan = complete.run("plan", "gpt-oss-120b")
    assert plan.stdout.startswith("gpt-oss-120b in 40GiB per rank: 72,817 blocks")
    demo = complete.run("demo", "--plain")
    assert (demo.returncode, demo.stderr) == (0, ""), demo.stdout


def test_a_command_without_its_package_names_the_extra(complete, tmp_path):
    where = ("--run-dir", str(tmp_path / "run"), "--service", "127.0.0.1:9")
    done = complete.run("worker", "--replica", "r", "--device", "cpu", *where)
    assert (done.returncode, done.stdout) == (2, "")
    remedy = f"pip install '{complete.archive}[cli,worker]'"
    assert done.stderr == f"kvplane: worker: the package torch is not installed ({remedy})\n"


def test_top_draws_and_ends(complete, address):
    process, terminal = on_a_terminal(complete.command("top", "--service", address))
    try:
        drawn, ends = b"", time.monotonic() + LIMIT_S
        while b"no replica" not in drawn.lower() and time.monotonic() < ends:
            if select.select([terminal], [], [], 1.0)[0]:
                drawn += os.read(terminal, 65_536)
        assert b"no replica" in drawn.lower(), drawn[-2000:]
        os.write(terminal, b"q")
        while process.poll() is None and time.monotonic() < ends:
            if select.select([terminal], [], [], 0.1)[0]:
                with suppress(OSError):  # the terminal is closed: the program has ended
                    os.read(terminal, 65_536)  # a full terminal would hold the program
        assert process.poll() == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def on_a_terminal(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A process on a terminal of its own, and the other end of that."""
    ours, theirs = pty.openpty()
    variables = {**environment(), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True
    )
    os.close(theirs)
    return process, ours
