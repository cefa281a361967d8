"""Health.Watch: statuses arrive, and a client that does not read delays neither the service nor other clients."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane_service.config import Config
from kvplane_service.rpc import health
from tests.service.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    SETTINGS,
    call_headers,
    frame,
    message,
)
from tests.service.rig import WAIT_S, Service, running, until
from tests.service.test_drain import drain

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class DeafClient:
    """Calls Health.Watch over HTTP/2 with a window of 0 bytes: it answers pings, and no status can be sent to it."""

    def __init__(self, address: str, name: str) -> None:
        self.answered = threading.Event()  # the call began: its headers came, and its first status waits for the window
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        request = health_pb2.HealthCheckRequest(service=name).SerializeToString()
        self._socket.sendall(
            PREFACE
            + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
            + frame(HEADERS, END_HEADERS, 1, call_headers("/grpc.health.v1.Health/Watch"))
            + frame(DATA, END_STREAM, 1, message(request))
        )
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):  # the service closed the connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._socket.close()

    def _answer(self) -> None:
        with suppress(ConnectionError), self._socket.makefile("rb") as received:  # the service may end it
            while len(header := received.read(HEADER_BYTES)) == HEADER_BYTES:
                body = received.read(int.from_bytes(header[:3], "big"))
                kind, flags = header[3], header[4]
                if kind == HEADERS:
                    self.answered.set()
                elif kind == SETTINGS and not flags & ACK:
                    self._socket.sendall(frame(SETTINGS, ACK, 0))
                elif kind == PING and not flags & ACK:
                    self._socket.sendall(frame(PING, ACK, 0, body))


@contextmanager
def deaf(service: Service, name: str) -> Iterator[None]:
    client = DeafClient(service.address, name)
    try:
        assert client.answered.wait(WAIT_S)
        yield
    finally:
        client.close()


def watch(service: Service, name: str) -> Any:
    request = health_pb2.HealthCheckRequest(service=name)
    return health_pb2_grpc.HealthStub(service.channel).Watch(request, timeout=WAIT_S)


def check(service: Service, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return health_pb2_grpc.HealthStub(service.channel).Check(request, timeout=WAIT_S).status


@pytest.fixture
def service() -> Iterator[Service]:
    with running(Config(listen="127.0.0.1:0", drain_grace_ms=60_000)) as service:
        service.register()
        yield service


def test_watch_sends_each_change(service):
    states = watch(service, "state")
    assert next(states).status == SERVING
    for is_sound, status in ((False, NOT_SERVING), (True, SERVING)):
        service.in_loop(lambda is_sound=is_sound: service.app._server.health.state(is_sound))
        assert next(states).status == status
    states.cancel()


def test_watch_sends_nothing_without_a_change(service):
    states = watch(service, "state")
    assert next(states).status == SERVING
    reports = service.app._server.health

    def changes():
        reports.state(True)
        reports.store(True)
        reports.state(False)

    service.in_loop(changes)
    assert next(states).status == NOT_SERVING
    states.cancel()


def test_watch_of_an_unknown_name_waits_until_it_is_known(service):
    states = watch(service, "store")
    assert next(states).status == UNKNOWN
    service.in_loop(lambda: service.app._server.health.store(True))
    assert next(states).status == SERVING
    states.cancel()


@pytest.mark.parametrize("name", ["", "liveness", "readiness"])
def test_drain_does_not_wait_for_a_deaf_watch(name):
    with running(Config(listen="127.0.0.1:0", drain_grace_ms=50)) as service, deaf(service, name):
        drain(service).result(WAIT_S)


def test_status_changes_while_a_watch_is_deaf(service):
    session = service.open()
    with deaf(service, "readiness"):
        states = watch(service, "readiness")
        assert next(states).status == SERVING
        done = drain(service)
        assert next(states).status == NOT_SERVING
        assert check(service, "readiness") == NOT_SERVING
        assert session.receive().WhichOneof("kind") == "draining"
        session.close()
        done.result(WAIT_S)


def test_leases_expire_while_a_watch_is_deaf():
    with running(Config(listen="127.0.0.1:0", lease_ms=400)) as service:
        service.register()
        host = service.app.registry.get("r").host
        with deaf(service, "state"):
            session = service.open()  # kept, since its end would end the lease
            session.step()
            until(lambda: host.events.num_withdrawals == 1)


def test_service_stops_while_a_watch_is_deaf():
    with ExitStack() as clients, running() as service:
        clients.enter_context(deaf(service, "readiness"))


def test_watch_calls_are_bounded(service, monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHES", 1)
    first = watch(service, "")
    assert next(first).status == SERVING
    with pytest.raises(grpc.RpcError) as raised:
        next(watch(service, ""))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert check(service, "") == SERVING
    first.cancel()
    until(lambda: service.in_loop(lambda: service.app._server.health.servicer._num_watches) == 0)
    second = watch(service, "")
    assert next(second).status == SERVING
    second.cancel()
