"""`kvplane demo`, run as a process: without a terminal, with one, and interrupted."""

from __future__ import annotations

import os
import pty
import re
import signal

from tests.cli.processes import KVPLANE, Watched, children, interrupt, run_kvplane, running

MODELS = ("llama-3.1-70b", "gpt-oss-120b", "gemma-3-27b", "jamba-v0.1")
COUNTS = re.compile(
    r"(\S+): (\d+) requests, ([\d,]+) hit tokens \(\d+%\), ([\d,]+) evictions, ([\d,]+) preemptions, ([\d,]+) steps"
)


def test_demo_shows_all_effects_of_every_model_and_a_summary(tmp_path):
    """Exit code 0: the service's counters equal the engines' counts."""
    picture = tmp_path / "demo.svg"
    done = run_kvplane("demo", "--svg", picture)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    summary = done.stdout.splitlines()[-1]
    by_model = COUNTS.findall(summary)
    assert tuple(model for model, *_ in by_model) == MODELS
    for model, *counts in by_model:
        assert all(int(count.replace(",", "")) > 0 for count in counts), model
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    assert all(model in drawn for model in MODELS)


def test_ctrl_c_of_the_demo_leaves_no_child():
    with running("demo") as process:
        assert process.stdout is not None
        assert "starting the service" in process.stdout.readline()
        assert MODELS[0] in process.stdout.readline()
        (child,) = children(process.pid)
        service = Watched(child)
        assert interrupt(process) == 130
        assert service.wait_for_end()


def test_ctrl_c_of_the_demo_restores_the_terminal():
    """On a terminal the live view hides the cursor; it must be shown again."""
    pid, terminal = pty.fork()
    if pid == 0:
        size = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        os.execve(KVPLANE[0], [*KVPLANE, "demo"], {**os.environ, **size})
    said = b""
    while MODELS[0].encode() not in said:
        said += os.read(terminal, 4096)
    assert b"\x1b[?25l" in said
    os.kill(pid, signal.SIGINT)
    try:
        while chunk := os.read(terminal, 4096):
            said += chunk
    except OSError:
        pass  # how a pty says that its other end is closed
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")
