"""Engines of an earlier version with a service of this one, and the reverse: by the messages that were sent."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.errors import KvplaneError, ServiceRestarted, Unavailable
from kvplane.base.session import CORE_VERSION, Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.replica_pb2 import ReplicaSpec
from kvplane.wire import decode_spec
from kvplane.wire import stream as wire
from kvplane.wire.step import decode_step, encode_step
from kvplane_core.face import loader
from kvplane_core.face.inspect import check
from kvplane_core.face.state import digest
from kvplane_core.spec.loading import load_state
from kvplane_service.decisions.recording import Frames
from kvplane_service.store.memory import MemoryStore
from kvplane_tools.replay.from_log import replay_log
from tests.versions.kept import COMMITS, HERE, Sent, files, read_messages
from tests.versions.served import NAME, Served
from tests.versions.write import SERVED, STEPS, _engine, _run, write_stores

LATER_ORDERS = ("load_key", "save_key", "move_key")  # an engine of before does not read them
STEP_FIELDS = ("granted", "admit_status", "admit_hit", "admit_granted", "preempted", "new_blocks", "orders")
CHANGED = ("classes-left-out",)  # sessions whose hits are longer now
named: dict[str, Any] = {"ids": lambda path: f"{path.parent.parent.name} {path.stem}"}


def spec_and_messages(path: Path) -> tuple[Any, list[Sent]]:
    head, *others = read_messages(path)
    return decode_spec(ReplicaSpec.FromString(head.raw)), others


def answer_of(raw: bytes) -> pb.SessionResponse:
    return pb.SessionResponse.FromString(raw)


@pytest.mark.parametrize("path", [path for path in files("sessions") if path.stem not in CHANGED], **named)
def test_an_engine_of_an_earlier_version_gets_the_answers_that_it_got(path):
    """Also over a restart of the service, in which its running requests continue."""
    spec, messages = spec_and_messages(path)
    store, compared = MemoryStore(), 0
    served = Served(store, spec)
    for sent in messages:
        if sent.way == "=":
            served.finish()
            served = Served(store, spec)
        elif sent.way == ">":
            if pb.SessionRequest.FromString(sent.raw).WhichOneof("kind") == "open":
                served.connect()
            served.send(sent.raw)
        else:
            then, now = answer_of(sent.raw), answer_of(served.receive())
            assert then.WhichOneof("kind") == now.WhichOneof("kind")
            if then.WhichOneof("kind") == "opened":
                assert (then.opened.epoch, then.opened.kept_keys) == (now.opened.epoch, now.opened.kept_keys)
            elif then.WhichOneof("kind") == "result":
                compared += 1
                for old, new in zip(then.result.parts, now.result.parts, strict=True):
                    for column in LATER_ORDERS:
                        new.orders.ClearField(column)
                    assert [getattr(old, name) for name in STEP_FIELDS] == [getattr(new, name) for name in STEP_FIELDS]
            check(served.host.replica)
    served.finish()
    assert compared > STEPS


class Played:
    """A SessionTransport with the answers of an earlier service, to an engine that sends what one of then sent."""

    draining = can_move = False

    def __init__(self, messages: list[Sent]) -> None:
        self._messages, self._at, self._is_broken = messages, 0, False

    def _next(self, way: str) -> bytes:
        if self._messages[self._at].way == "=":
            self._at, self._is_broken = self._at + 1, True
        if self._is_broken:
            raise Unavailable("the stream is broken")
        sent = self._messages[self._at]
        assert sent.way == way
        self._at += 1
        return sent.raw

    def _send(self, raw: bytes) -> None:
        try:
            assert pb.SessionRequest.FromString(raw) == pb.SessionRequest.FromString(self._next(">"))
        except Unavailable:
            return

    def open(self, request: OpenRequest) -> Opened:
        self._is_broken = False
        self._send(wire.serialized(wire.open_message(request)))
        if self._messages[self._at].way == ">":  # it was refused, and the engine began a new life
            raise ServiceRestarted("the service restarted")
        return wire.opened_of(answer_of(self._next("<")))

    def send(self, step: Step) -> None:
        self._send(wire.step_message(step, 1 << 30))

    def receive(self) -> StepResult | KvplaneError:
        answer = wire.answer_of(wire.taken(self._next("<")))
        assert answer is not None
        return answer

    def heartbeat(self, waiting_requests: int | None = None) -> None:
        """Leases do not end here."""

    def close(self) -> None:
        self._send(wire.serialized(wire.close_message()))
        self._next("<")

    def abort(self) -> None:
        """Nothing waits."""


@pytest.mark.parametrize("path", files("sessions"), **named)
def test_an_engine_of_this_version_is_served_by_an_earlier_service(path):
    """It sends what engines sent then, field by field, and reads the answers; also when its service was restarted."""
    spec, messages = spec_and_messages(path)
    number = list(SERVED).index(path.stem) + 1
    engine = _engine(Played(messages), NAME, spec, number, resumes=not spec.tiers)
    _run(engine)
    engine.session.close()
    assert engine.revivals == 1


@pytest.mark.parametrize("path", files("mirrors"), **named)
def test_a_mirrored_engine_of_another_core_version_is_refused_by_name(path):
    """Its decisions are not compared with those of other rules; one of this version is followed to the end."""
    spec, messages = spec_and_messages(path)
    served = Served(MemoryStore(), spec)
    served.connect()
    served.send(messages[0].raw)
    version = pb.SessionRequest.FromString(messages[0].raw).open.mirror.core_version
    if version != CORE_VERSION:
        with pytest.raises(KvplaneError) as refused:
            served.receive()
        assert "core_version" in refused.value.field
        return
    assert answer_of(served.receive()).opened.image_wanted
    for sent in messages[1:]:
        served.send(sent.raw)
    served.finish()
    assert served.host.mirror.divergences == 0


@pytest.mark.parametrize("path", files("recordings", "log"), **named)
def test_a_recording_of_an_earlier_version_is_read(path):
    """Its state and all its steps; one without tiers, whose jobs have other numbers now, is replayed."""
    header, life, *decisions = Frames(path)
    assert len(decisions) == STEPS
    state = load_state(decode_spec(header.header.spec), life.life.state)
    check(state)
    compiled = loader.load_replica(state.spec, life.life.state)
    check(compiled)
    assert digest(compiled) == digest(state)
    if not state.spec.tiers:
        assert replay_log(path).decisions == STEPS


@pytest.mark.parametrize("path", files("engines"), **named)
def test_messages_of_steps_and_results_are_read_as_they_were_written(path):
    """They are written again without a loss; a state of this format has the same bytes."""
    spec, (state, *messages) = spec_and_messages(path)
    replica = load_state(spec, state.raw)
    assert digest(loader.load_replica(spec, state.raw)) == digest(replica)
    for sent in messages:
        if sent.way == ">":
            message = pb.SessionRequest.FromString(sent.raw)
            again = encode_step(decode_step(message.step, replica.digest_size))
            assert decode_step(again, replica.digest_size) == decode_step(message.step, replica.digest_size)
        else:
            result = wire.answer_of(wire.taken(sent.raw))
            assert isinstance(result, StepResult)
            assert wire.answer_of(wire.taken(wire.result_message(result))) == result


def test_what_this_version_stores_has_the_formats_that_earlier_ones_read(tmp_path):
    """An earlier service takes over: after a rollback, and from a drained service of this version."""
    write_stores(tmp_path)
    for commit in COMMITS:
        for form in ("store.json", "sealed.json"):
            then, now = (json.loads((path / form).read_text()) for path in (HERE / commit, tmp_path))
            assert {name: raw[:16] for name, raw in then["records"].items()} == {
                name: raw[:16] for name, raw in now["records"].items()
            }
            assert [log[:3] for log in then["logs"]] == [log[:3] for log in now["logs"]], "other names of logs"
            heads = [{raw[:16] for _, raw in log[3]} for log in (*then["logs"], *now["logs"])]
            assert len(set().union(*heads)) == 1, "another format of chunks"
        (old, new) = (sqlite3.connect(path / "store.db") for path in (HERE / commit, tmp_path))
        asked = "SELECT sql FROM sqlite_schema ORDER BY name"
        assert old.execute(asked).fetchall() == new.execute(asked).fetchall()
