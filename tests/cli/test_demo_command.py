"""`kvplane demo`, run as a process: without a terminal, with one, and interrupted."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from urllib.request import urlopen

from tests.cli.processes import KVPLANE, Watched, children, interrupt, run_kvplane, running
from tests.test_readme_figures import README, rows_of

MODELS = ("llama-3.1-70b", "gpt-oss-120b", "gemma-3-27b", "jamba-v0.1")
COUNTS = re.compile(
    r"(\S+): (\d+) requests, ([\d,]+) hit tokens \(\d+%\), ([\d,]+) evictions, ([\d,]+) preemptions, ([\d,]+) steps"
)
CACHES = ("hybrid", "uniform", "no prefix cache")
ROW = re.compile(rf"^(\S+) +\d+ GiB +({'|'.join(CACHES)}) +(\d+)% +(\d+) +([\d,]+)$", re.MULTILINE)


def test_demo_shows_all_effects_and_what_each_cache_saves(tmp_path, monkeypatch):
    """Exit code 0: the service's counters equal the engines' counts. No process of the demo imports torch."""
    marker = tmp_path / "imported"
    (tmp_path / "torch.py").write_text(f"open({str(marker)!r}, 'w')\nraise ImportError('the demo needs no torch')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    picture = tmp_path / "demo.svg"
    done = run_kvplane("demo", "--svg", picture)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not marker.exists()
    by_model = COUNTS.findall(done.stdout)
    assert tuple(model for model, *_ in by_model) == MODELS
    for model, *counts in by_model:
        assert all(int(count.replace(",", "")) > 0 for count in counts), model
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    assert all(model in drawn for model in MODELS)
    assert "8 conversations of 3 turns, each about a document of 16,000 tokens" in done.stdout
    table = {
        (model, cache): tuple(int(one.replace(",", "")) for one in rest)
        for model, cache, *rest in ROW.findall(done.stdout)
    }
    cells = [one[0] for one in rows_of(README)]
    for (model, cache), (hit, at_once, computed) in table.items():
        name = next(cell for cell in cells if cell.startswith(f"{model}, "))
        row = [name if cache == "hybrid" else "", cache, f"{hit}%", str(at_once), f"{computed:,}"]
        assert row in rows_of(README)[cells.index(name) :][:3]
    assert set(table) == {(model, cache) for model in ("gpt-oss-120b", "gemma-3-27b") for cache in CACHES}
    for model in ("gpt-oss-120b", "gemma-3-27b"):
        hybrid, uniform, none = (table[model, cache] for cache in CACHES)
        assert hybrid[0] > uniform[0] >= none[0] == 0
        assert hybrid[1] > uniform[1]
        assert hybrid[2] < uniform[2] <= none[2]
        said = next(line for line in done.stdout.splitlines() if line.startswith(f"{model}: a hybrid cache hits"))
        assert f"{hybrid[0]}% of the tokens and runs {hybrid[1]} requests at once" in said
        assert f"{uniform[0]}% and {uniform[1]};" in said
        assert f"{none[2] / hybrid[2]:.1f} times as many tokens" in said


def test_fake_torch_is_found_before_the_real_one(tmp_path):
    """The test above relies on it."""
    (tmp_path / "torch.py").write_text("print('planted')")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "planted\n"


def test_commands_that_the_demo_prints_work_while_it_runs():
    """The engines are stopped as soon as they have answered some requests, so that the demo does not end meanwhile."""
    with running("demo") as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        head = [next(lines) for _ in range(5)]
        next(line for line in lines if re.match(r"gemma-3-27b +\d\d+ done", line))
        demo.send_signal(signal.SIGSTOP)
        try:
            top, describe, explain = (line.split()[1:] for line in head[2:5])
            asked = [run_kvplane(*words) for words in ([*top, "--once"], describe, explain)]
        finally:
            demo.send_signal(signal.SIGCONT)
    for words, done in zip(("top", "describe", "explain"), asked, strict=True):
        assert done.returncode == 0, (words, done.stderr)
    seen_top, seen_replica, seen_hit = (done.stdout for done in asked)
    assert all(model in seen_top for model in MODELS)
    assert "gemma-3-27b" in seen_replica
    assert re.match(r"\d+ of \d+ tokens hit in step \d+", seen_hit), seen_hit
    assert "sliding_window" in seen_hit


def on_a_terminal(*options: str) -> tuple[int, int]:
    """A demo on a terminal of its own: process id, and the other end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        size = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        os.execve(KVPLANE[0], [*KVPLANE, "demo", *options], {**os.environ, **size})
    return pid, terminal


def rest_of(terminal: int) -> bytes:
    """Read a terminal until its other end is closed, which a pty reports as an error."""
    said = b""
    try:
        while chunk := os.read(terminal, 4096):
            said += chunk
    except OSError:
        pass
    finally:
        os.close(terminal)
    return said


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_on_a_terminal_the_demo_serves_until_ctrl_c_after_its_tables():
    pid, terminal = on_a_terminal("--plain")
    said = b""
    while b"the service runs until Ctrl-C" not in said or not said.endswith(b"/\r\n"):
        said += os.read(terminal, 4096)
    lines = said.decode().rpartition("the service runs until Ctrl-C; in another terminal:")[2].split("\r\n")[1:]
    service = [Watched(child) for child in children(pid)]
    try:
        asked = [run_kvplane(*line.split()[1:]) for line in (lines[0] + " --once", *lines[1:3])]
        page = urlopen(lines[3].split()[-1], timeout=10).read()
    finally:
        os.kill(pid, signal.SIGINT)
        rest_of(terminal)
    assert exit_code(pid) == 0
    assert all(one.wait_for_end() for one in service)
    assert [one.returncode for one in asked] == [0, 0, 0], [one.stderr for one in asked]
    assert all(model in asked[0].stdout for model in MODELS)
    assert re.match(r"\d+ of \d+ tokens hit in step \d+", asked[2].stdout), asked[2].stdout
    assert b"<title>" in page


def test_the_demo_exits_on_a_terminal_where_it_is_asked_to():
    pid, terminal = on_a_terminal("--plain", "--once")
    said = rest_of(terminal)
    assert exit_code(pid) == 0
    assert b"without a prefix cache" in said
    assert b"until Ctrl-C" not in said


def test_ctrl_c_of_the_demo_leaves_no_child():
    with running("demo") as process:
        assert process.stdout is not None
        assert "starting a service" in process.stdout.readline()
        assert "the service listens on" in process.stdout.readline()
        (child,) = children(process.pid)
        service = Watched(child)
        assert interrupt(process) == 130
        assert service.wait_for_end()


def test_ctrl_c_of_the_demo_restores_the_terminal():
    """On a terminal the live view hides the cursor; it must be shown again."""
    pid, terminal = on_a_terminal()
    said = b""
    while MODELS[0].encode() not in said:
        said += os.read(terminal, 4096)
    assert b"\x1b[?25l" in said
    os.kill(pid, signal.SIGINT)
    said += rest_of(terminal)
    assert exit_code(pid) == 130
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")
