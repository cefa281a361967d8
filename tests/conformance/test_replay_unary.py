"""Operation traces over gRPC, a unary call for each operation.

A trace per sort of call and of group; `python -m tests.conformance.replay --rpc=unary` takes them all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.divergence import Divergence
from tests.conformance.planting import changes, records_of, write_records
from tests.conformance.replay import replay_file
from tests.conformance.rpc import make_replayer

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(__file__).parent / "traces"
NAMES = [
    "llama-full-b60-s1", "llama-full-spec-b150-s4", "llama-full-ext-b150-s5", "gpt-oss-async-b250-s27",
    "gpt-oss-fullfit-wm-b200-s28", "gemma4-mixed-bs-b200-s41", "mamba64-align-fine16-b300-s67",
    "dsv4-5groups-b1500-s71",
]  # fmt: skip
SMALL = TRACES / "dsv4-5groups-b1500-s71.jsonl.gz"


@pytest.mark.parametrize("name", NAMES)
def test_operation_trace_replays_equal_by_unary_calls(name, client):
    done = replay_file(TRACES / f"{name}.jsonl.gz", make_replayer("unary", client))
    assert done.values > 1400
    assert done.operations == done.messages


def test_a_planted_change_is_found_by_unary_calls_and_its_replica_removed(client, tmp_path):
    records = records_of(SMALL)
    number = next(at for at, record in enumerate(records) if record.get("zero"))
    records[number] = next(changes(records[number], "zero"))
    with pytest.raises(Divergence) as found:
        replay_file(write_records(tmp_path / "planted.jsonl.gz", records), make_replayer("unary", client))
    assert (found.value.line, found.value.name) == (number + 1, "zero")
    assert list(client.list_replicas()) == []


def test_replay_command_prints_a_line_per_file_after_a_difference(tmp_path):
    """The replayer runs as a separate program."""
    records = records_of(SMALL)
    records[2]["free"] -= 1
    planted = write_records(tmp_path / "planted.jsonl.gz", records)
    command = [sys.executable, "-m", "tests.conformance.replay", "--rpc=unary", str(planted), str(SMALL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    differs, _, same, total = done.stdout.splitlines()
    assert differs.startswith("DIFFER planted.jsonl.gz: line 3: free: expected ")
    assert same.startswith("same   dsv4-5groups-b1500-s71.jsonl.gz: 1455 values, 1.00 ")
    assert total == "1 identical, 1 not; 1.00 operations per message"
