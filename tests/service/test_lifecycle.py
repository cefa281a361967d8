"""A service starts, stalls, fails in the background, and ends."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.base.errors import DeadlineExceeded, InternalError
from kvplane_service.config import Config, is_open_to_all
from kvplane_service.process import app
from kvplane_service.process.app import serve
from kvplane_service.rpc import methods
from kvplane_service.store.sqlite import SqliteStore
from tests.service.rig import WAIT_S, Service, Stream, running, until
from tests.twins import weakened

LEASE_MS = 2000
STALL_S = 3.0


def stand_still(service) -> int:
    """How often the replica was withdrawn: its engine sends heartbeats before and after, which are not read
    meanwhile.
    """
    service.register()
    stream = service.open()
    host = service.app.registry.get("r").host
    stream.send(heartbeat={})
    stream.step()
    service.in_loop(lambda: time.sleep(STALL_S))
    stream.step()
    service.in_loop(lambda: None)
    return host.events.num_withdrawals


def test_a_stalled_service_extends_leases():
    with running(Config(listen="127.0.0.1:0", lease_ms=LEASE_MS)) as service:
        assert stand_still(service) == 0
        until(lambda: service.state() == "LAPSED")  # a silent engine lapses while the service can read


def test_lapse_by_own_delay_is_caught():
    with weakened("lapse by own delay"), running(Config(listen="127.0.0.1:0", lease_ms=LEASE_MS)) as service:
        assert stand_still(service) == 1


def test_a_stream_without_open_is_ended(monkeypatch):
    monkeypatch.setattr(methods, "MESSAGE_TIMEOUT_S", 0.05)
    with running() as service:
        mute = Stream(service.channel)
        error = mute.end()
        assert isinstance(error, DeadlineExceeded)
        assert "the first message did not arrive" in error.message
        service.register()
        assert service.open().step().result.seq == 1, "who opens in time stays"


# -- a task of the service that ends


class Running:
    """`serve` on an event loop of its own."""

    def __init__(self, config: Config) -> None:
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config,))
        self._thread.start()
        assert self.ready.wait(WAIT_S)

    def _run(self, config: Config) -> None:
        def ready(app_: app.App) -> None:
            self.service = Service(app_, app_.address, asyncio.get_running_loop())
            self.ready.set()

        try:
            asyncio.run(serve(config, ready))
        except InternalError as error:
            self.error = error

    def wait(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_a_failed_background_task_drains_the_service(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(asyncio.BaseEventLoop, "add_signal_handler", lambda *_: None, raising=False)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)
    path = tmp_path / "entries.db"
    config = Config(listen="127.0.0.1:0", store=f"sqlite:{path}", store_flush_ms=3_600_000, lease_ms=400)
    process = Running(config)
    service = process.service
    service.register()
    stream = service.open()
    assert stream.step().result.seq == 1
    host = service.app.registry.get("r").host
    monkeypatch.setattr(type(host), "expire", lambda self: [][0])
    assert stream.receive().WhichOneof("kind") == "draining"
    health = health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    stream.close()
    process.wait()
    assert isinstance(process.error, InternalError)
    assert "background task 'leases' ended: IndexError" in process.error.message
    assert "background task 'leases' ended unexpectedly" in caplog.text
    with closing(SqliteStore(path)) as store:
        assert [name for name, _ in store.records()] == ["r"], "what waited was written"


async def test_parts_that_hang_at_shutdown_are_logged(monkeypatch, caplog):
    hang = threading.Event()
    service = app.App(Config(listen="127.0.0.1:0", audit_log="-"))
    await service.start()
    assert service._gate is not None
    monkeypatch.setattr(service._gate, "close", hang.wait)
    began_s = time.monotonic()
    await service.stop()
    assert time.monotonic() - began_s < WAIT_S
    hang.set()
    assert "could not stop the audit log in time" in caplog.text


# -- who may call


@pytest.mark.parametrize(
    ("listen", "is_open"),
    [
        ("0.0.0.0:7070", True),
        ("[::]:7070", True),
        ("10.0.0.1:7070", True),
        ("kvplane.example:7070", True),
        ("127.0.0.1:7070", False),
        ("[::1]:7070", False),
        ("localhost:7070", False),
        ("unix:/run/kvplane", False),
    ],
)
def test_open_addresses_are_detected(listen, is_open):
    assert is_open_to_all(Config(listen=listen)) is is_open
    assert not is_open_to_all(Config(listen=listen, tls_cert="cert.pem", tls_key="key.pem"))
    assert not is_open_to_all(Config(listen=listen, auth_owners="owners.yaml", auth_tokens="tokens"))
