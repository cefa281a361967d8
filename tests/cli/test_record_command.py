"""`kvplane record` and `kvplane replay --log`."""

from __future__ import annotations

import json
import threading

import pytest

from kvplane import AdmitRow, End, ExtraKeys, FactRow, NewsRow, RunRow, connect, part_of
from kvplane.v1.admin_pb2 import RecordRequest
from kvplane_service.config import Config
from kvplane_service.decisions.recording import Frames
from kvplane_tools.cli.query.recorder import Rotation, record
from tests.service.rig import running, until

CANARY = 987_654_321


def serve(session, slot: int, fill: int) -> None:
    """A request with tokens and a salt, from admission to end."""
    keys = ExtraKeys(salt="a secret salt")
    session.apply(part_of(NewsRow(slot, tokens=[fill] * 40, request_id=f"r{slot}", extra_keys=keys), AdmitRow(slot)))
    session.apply(part_of(FactRow(slot, tokens=[fill]), RunRow(slot)))
    session.apply(part_of(FactRow(slot, end=End.FREE)))


def test_a_recording_follows_the_replica_to_its_end(kvplane, tmp_path):
    path = tmp_path / "log"
    counts: list[int] = []
    with running() as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            serve(session, 0, CANARY)
            request = RecordRequest(replica="r")
            thread = threading.Thread(target=lambda: counts.append(record(service.address, request, path, None)))
            thread.start()
            serve(session, 1, CANARY)
            serve(session, 2, 5)
        client.deregister_replica("r")
        thread.join(20)
    assert counts == [10]  # nine steps, and the one that frees the requests of the closed session
    raw = path.read_bytes()
    assert CANARY.to_bytes(4, "little") not in raw
    assert b"a secret salt" not in raw
    assert b"r1" in raw
    code, out, _ = kvplane("replay", str(path), "--log")
    assert code == 0
    assert "10 of 10 decisions identical" in out
    assert [line.split() for line in out.splitlines() if line.startswith("hit tokens")] == [["hit", "tokens", "32"]]


def test_what_if_is_compared_with_the_recording(kvplane, tmp_path):
    path = tmp_path / "log"
    with running() as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            serve(session, 0, 7)
            serve(session, 0, 8)
            assert kvplane("record", "r", str(path), "--decisions", "6", "--service", service.address)[0] == 0
    code, out, _ = kvplane("replay", str(path), "--log", "--pool-blocks", "9")
    assert code == 0
    assert out.splitlines()[1].split() == ["41", "BLOCKS", "9", "BLOCKS"]
    answer = json.loads(kvplane("replay", str(path), "--log", "--pool-blocks", "9", "--json")[1])
    assert answer["as_recorded"]["identical"] == 6
    assert answer["other_pool"]["counts"]["evicted_keys"] > answer["as_recorded"]["counts"]["evicted_keys"] == 0


def test_a_different_decision_fails_the_replay(kvplane, tmp_path):
    path = tmp_path / "log"
    with running() as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            serve(session, 0, 7)
            record(service.address, RecordRequest(replica="r"), path, 3)
    from kvplane_service.decisions.recording import MAGIC, Frames, write_frame

    frames = list(Frames(path))
    frames[-1].decision.result_digest = bytes(32)
    with path.open("wb") as file:
        file.write(MAGIC)
        for frame in frames:
            write_frame(file, frame)
    code, out, _ = kvplane("replay", str(path), "--log")
    assert code == 1
    assert "2 of 3 decisions identical; the first difference is in step 2/3" in out


@pytest.mark.parametrize("fault", ["beyond the log", "file exists", "no replica", "no folder"])
def test_record_refusals_name_the_cause(kvplane, tmp_path, fault):
    path = tmp_path / "log"
    with running(Config(listen="127.0.0.1:0", decision_log_steps=2)) as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            session.apply(part_of())
            if fault == "beyond the log":
                serve(session, 0, 1)
            elif fault == "file exists":
                path.touch()
            elif fault == "no folder":
                path = tmp_path / "no" / "folder"
            name = "unknown" if fault == "no replica" else "r"
            code, _, errors = kvplane("record", name, str(path), "--decisions", "1", "--service", service.address)
    expected = {
        "beyond the log": (1, "decisions (record from now on (--from-now)"),
        "file exists": (1, "already exists (name another"),
        "no replica": (2, "there is no replica 'unknown'"),
        "no folder": (2, "No such file or directory"),
    }
    assert code == expected[fault][0]
    assert expected[fault][1] in errors


def test_a_recording_begins_at_any_time_with_the_state(kvplane, tmp_path):
    path = tmp_path / "log"
    with running(Config(listen="127.0.0.1:0", decision_log_steps=4)) as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            for slot in range(4):
                serve(session, slot, CANARY)
            keys = ExtraKeys(salt="a secret salt")
            session.apply(part_of(NewsRow(9, tokens=[CANARY] * 50, request_id="runs", extra_keys=keys), AdmitRow(9)))
            code, _, errors = kvplane("record", "r", str(path), "--decisions", "1", "--service", service.address)
            assert code == 1
            assert "--from-now" in errors
            request, counts = RecordRequest(replica="r", from_now=True), list[int]()
            thread = threading.Thread(target=lambda: counts.append(record(service.address, request, path, 4)))
            thread.start()
            until(path.exists)
            session.apply(part_of(FactRow(9, tokens=[3]), RunRow(9)))
            serve(session, 1, CANARY)  # a hit of what was cached before
            thread.join(20)
    assert counts == [4]
    assert CANARY.to_bytes(4, "little") not in path.read_bytes()
    assert b"a secret salt" not in path.read_bytes()
    code, out, errors = kvplane("replay", str(path), "--log")
    assert (code, errors) == (0, "")
    assert "4 of 4 decisions identical" in out
    assert ["admitted", "1"] in [line.split() for line in out.splitlines()]  # in the recording, of 6 in all
    code, out, _ = kvplane("replay", str(path), "--log", "--pool-blocks", "60")
    assert code == 0
    assert "60 BLOCKS" in out


def test_rotated_files_have_every_decision_once_and_replay_alone(kvplane, tmp_path):
    path, steps = tmp_path / "log", 120
    with running() as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            serve(session, 0, 7)
            rotation = Rotation(service.address, "r", path, 2_500, 1000)
            thread = threading.Thread(target=rotation.run)
            thread.start()
            until((tmp_path / "log.1").exists)
            for slot in range(steps // 3):
                serve(session, slot % 3, slot % 5)
        client.deregister_replica("r")
        thread.join(60)
    files = sorted(tmp_path.iterdir(), key=lambda file: int(file.suffix[1:]))
    assert len(files) > 2
    seqs = [frame.decision.step.seq for file in files for frame in Frames(file) if frame.HasField("decision")]
    assert seqs == list(range(4, steps + 5))
    for file in files:
        assert kvplane("replay", str(file), "--log")[0] == 0


def test_rotation_keeps_the_last_files(tmp_path):
    rotation = Rotation("unix:/none", "r", tmp_path / "log", 1, 2)
    for _ in range(5):
        rotation._next_file().close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.4", "log.5"]
