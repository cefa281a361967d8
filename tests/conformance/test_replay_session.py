"""Operation traces over gRPC: all operations up to the next answer that is needed in one message of a session.

A trace per kind of model and per way of scheduling; `python -m tests.conformance.replay --rpc=session` takes them all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conformance.divergence import Divergence
from tests.conformance.forms import BadRecording
from tests.conformance.planting import changes, records_of, write_records
from tests.conformance.replay import main, replay_file
from tests.conformance.rpc import make_replayer

TRACES = Path(__file__).parent / "traces"
NAMES = [
    "llama-full-b60-s1", "llama-full-spec-b150-s4", "gpt-oss-async-b250-s27", "gpt-oss-ext-b250-s26",
    "gpt-oss-fullfit-wm-b200-s28", "gemma3-7groups-w256-b300-s32", "gemma4-mixed-bs-b200-s41",
    "llama4-chunked-b200-s51", "jamba-align-b120-s61", "mamba64-align-fine16-b300-s67", "dsv4-5groups-b1500-s71",
]  # fmt: skip
SMALL = TRACES / "mamba64-align-fine16-b300-s67.jsonl.gz"


@pytest.mark.parametrize("name", NAMES)
def test_operation_trace_replays_equal_in_a_session(name, client):
    done = replay_file(TRACES / f"{name}.jsonl.gz", make_replayer("session", client))
    assert done.values > 1400
    assert done.operations > 1.3 * done.messages


def test_a_planted_change_is_found_in_a_session_and_its_replica_removed(client, tmp_path):
    records = records_of(SMALL)
    number = next(at for at, record in enumerate(records) if record.get("copies"))
    records[number] = next(changes(records[number], "copies"))
    with pytest.raises(Divergence) as found:
        replay_file(write_records(tmp_path / "planted.jsonl.gz", records), make_replayer("session", client))
    assert (found.value.line, found.value.name) == (number + 1, "copies")
    assert list(client.list_replicas()) == []


def test_an_operation_refused_by_the_service_is_named(client, tmp_path):
    records = records_of(SMALL)
    evict = next(record for record in records if record.get("op") == "evict")
    evict["ids"] = [9999]
    with pytest.raises(BadRecording, match=r"refused: .*9999"):
        replay_file(write_records(tmp_path / "bad.jsonl.gz", records), make_replayer("session", client))
    assert list(client.list_replicas()) == []


def test_replay_command_prints_operations_per_message(capsys):
    assert main(["--rpc=session", str(SMALL)]) == 0
    line, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"same   mamba64-align-fine16\S+: \d+ values, 1\.71 operations per message", line)
    assert total == "1 identical, 0 not; 1.71 operations per message"
