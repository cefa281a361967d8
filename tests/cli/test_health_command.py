"""`kvplane health`, run as an exec probe does."""

from __future__ import annotations

import asyncio

import pytest

from kvplane_service.config import Config
from kvplane_tools.cli.options import FAILED, UNAVAILABLE, WRONG_USE
from tests.cli.processes import run_kvplane
from tests.service.rig import running


@pytest.fixture
def service():
    config = Config(listen="127.0.0.1:0", health_listen="127.0.0.1:0", drain_grace_ms=60_000)
    with running(config) as service:
        service.register()
        yield service


def test_health_of_a_serving_service(service):
    done = run_kvplane("health", service.app.health_address)
    assert (done.returncode, done.stdout) == (0, "serving\n")


def test_health_of_a_draining_service(service):
    stream = service.open()
    gone = asyncio.run_coroutine_threadsafe(service.app.drain(), service.loop)
    stream.receive()
    address = service.app.health_address
    assert run_kvplane("health", address, "--name", "readiness").returncode == FAILED
    assert run_kvplane("health", address, "--name", "liveness").returncode == 0
    stream.close()
    gone.result(60)


def test_health_of_an_unknown_name_is_wrong_use(service):
    assert run_kvplane("health", service.address, "--name", "redness").returncode == WRONG_USE


def test_health_of_an_unreachable_service_is_unavailable():
    assert run_kvplane("health", "127.0.0.1:1").returncode == UNAVAILABLE
