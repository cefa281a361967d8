"""Step traces over gRPC, in a session; `python -m tests.conformance.steps --rpc=session` takes them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.rpc import SessionPath
from tests.conformance.steps import main, replay_file

STEPS = Path(__file__).parent / "steps"
WHOLE = [
    "llama-async-prio-heavy-b86-s107", "llama-draftmodel2-b110-s110", "gptoss-async-heavy-b150-s116",
    "gemma3-w64-prio-heavy-b300-s119", "jamba-fine16-b120-s122",
]  # fmt: skip
ROWS = ["jamba-async-med-b130-s121"]


@pytest.mark.parametrize(("name", "whole"), [(name, True) for name in WHOLE] + [(name, False) for name in ROWS])
def test_step_trace_replays_equal_in_a_session(name, whole, client):
    done = replay_file(STEPS / f"{name}.jsonl.gz", whole, lambda spec: SessionPath(client, spec))
    assert done.values > 4500
    assert list(client.list_replicas()) == []


def test_steps_command_prints_a_line_per_path(capsys):
    assert main(["--rpc=session", str(STEPS / "llama-nocache-b100-s112.jsonl.gz")]) == 0
    whole, rows, total = capsys.readouterr().out.splitlines()
    assert whole == "same   whole llama-nocache-b100-s112.jsonl.gz: 5161 values, 1.00 messages per step"
    assert rows.startswith("same   rows  llama-nocache-b100-s112.jsonl.gz: 5480 values, ")
    assert total == "2 identical, 0 not"
