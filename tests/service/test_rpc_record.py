"""A recording over gRPC: decisions that its client does not read take bounded memory."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvplane.base.errors import LimitExceeded
from kvplane.base.step import Facts, Part, PartResult, Step, StepResult
from kvplane.v1 import admin_pb2
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_service.config import Config
from kvplane_service.decisions.log import Decision
from tests.service.rig import Service, error_of, running

WIDE = list(range(5000))  # a decision of about 10 kB, so that a few fill the connection
AT_ONCE = 100
LIMIT = 300  # decisions that may wait
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr("kvplane_service.rpc.admin.MAX_UNRECORDED", LIMIT)
    with running(Config(listen="127.0.0.1:0")) as service:
        service.register()
        yield service


def decide(service: Service, count: int) -> None:
    """Append decisions."""
    log = service.app.registry.get("r").host.decisions
    wide = Step(1, 1, [Part(facts=Facts(slot=WIDE))])
    for _ in range(count):
        log.append(Decision(wide, StepResult(1, 0, [PartResult()]), ((),), 0, 0))


def test_recording_that_is_not_read_keeps_a_bounded_number_of_decisions(service):
    with grpc.insecure_channel(service.address, options=SMALL_WINDOW) as channel:
        call = AdminStub(channel).Record(admin_pb2.RecordRequest(replica="r"))
        assert next(call).HasField("header")
        follower: Any = service.app.registry.get("r").host.decisions._followers[-1]
        waiting = follower.__self__

        def decide_and_count() -> int:
            decide(service, AT_ONCE)
            return len(waiting)

        counts = [service.in_loop(decide_and_count) for _ in range(6)]
        assert LIMIT - AT_ONCE < max(counts) <= LIMIT
        assert counts[-1] == 0, "dropped"
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        error = error_of(raised.value)
        assert isinstance(error, LimitExceeded)
        assert str(error).startswith(f"more than {LIMIT} decisions wait for the client")
        assert error.remedy == "read the stream faster"


def test_recording_that_is_read_gets_every_decision(service):
    call = service.admin.Record(admin_pb2.RecordRequest(replica="r"))
    assert next(call).HasField("header")
    for _ in range(2 * LIMIT // AT_ONCE):
        service.in_loop(lambda: decide(service, AT_ONCE))
        assert all(next(call).HasField("decision") for _ in range(AT_ONCE))
    service.in_loop(lambda: service.app.registry.remove("r"))
    assert list(call) == []
