"""`kvplane record` and `kvplane replay --log`."""

from __future__ import annotations

import json
import threading

import pytest

from kvplane import AdmitRow, End, ExtraKeys, FactRow, NewsRow, RunRow, connect, part_of
from kvplane_service.cli.query.recorder import record
from kvplane_service.config import Config
from tests.service.rig import running

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
            thread = threading.Thread(target=lambda: counts.append(record(service.address, "r", path, None)))
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
    assert answer["replayed"]["counts"]["evicted_keys"] > answer["as_recorded"]["counts"]["evicted_keys"] == 0


def test_a_different_decision_fails_the_replay(kvplane, tmp_path):
    path = tmp_path / "log"
    with running() as service, connect(service.address) as client:
        service.register()
        with client.session("r") as session:
            serve(session, 0, 7)
            record(service.address, "r", path, 3)
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
        "beyond the log": (1, "decisions (start recording right after registration"),
        "file exists": (1, "already exists (name another"),
        "no replica": (2, "there is no replica 'unknown'"),
        "no folder": (2, "No such file or directory"),
    }
    assert code == expected[fault][0]
    assert expected[fault][1] in errors
