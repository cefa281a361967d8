"""HTTP clients of `vllm serve` see the same from stock vLLM and from one with kvplane's scheduler."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.vllm import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


def run(kind):
    environment.set_up()
    script = Path(__file__).with_name("serving.py")
    command = [str(environment.PYTHON), str(script), "llama", kind, "7", "60"]
    done = subprocess.run(command, env=environment.variables(), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_http_clients_and_subscribers_see_what_stock_sends():
    stock, ours = run("stock"), run("kvplane")
    assert stock["numbers"] == list(range(len(stock["events"]))), "the subscriber missed batches"
    assert len(stock["events"]) > 50
    assert sum(cached for _, cached in stock["in_turn"]) > 5000
    assert stock["broken_off"] == stock["at_once"].count(None) > 10
    assert ours == stock
