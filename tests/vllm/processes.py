"""Processes of these tests: scripts in the environment of vLLM, and kvplane workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm import environment


@contextmanager
def worker_in(folder: Path) -> Iterator[Path]:
    """Run a kvplane worker without a service in a directory."""
    command = "from kvplane_service.cli import main; main()"
    options = ["worker", "--opaque", "--replica", "r", "--run-dir", str(folder)]
    process = subprocess.Popen([sys.executable, "-c", command, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "pages at" in process.stdout.readline()
    try:
        yield folder
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def run(script: str, *arguments: object) -> Any:
    """Run a script of this folder with vLLM; returns its result."""
    command = [str(environment.PYTHON), str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, env=environment.variables(), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))
