"""What a client without credentials can make a service hold: nothing of its messages, and a bounded rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvplane
from kvplane import ModelSource
from kvplane.base.errors import DeadlineExceeded, Unauthenticated
from kvplane.base.requests import Content
from kvplane.sansio.retry import RetryPolicy
from kvplane.v1 import admin_pb2
from kvplane_service.rpc import methods
from tests.cli.processes import KVPLANE
from tests.service import http2
from tests.service.auth.attacks import ATTACKS, LONG, LOOK_UP, PARTIAL_SESSIONS, Connection, Tally
from tests.service.guarded import Caller, Guard
from tests.service.rig import WAIT_S, error_of, running

STATUS = "/kvplane.v1.Admin/Status"
SECONDS = 1.5
MAX_RSS_MB = 300
PART_BYTES = 4 << 20
SOURCE = ModelSource(model="llama-3.1-8b", num_blocks=2100, max_model_len=1008)


@pytest.fixture
def service(tmp_path):
    with running(Guard(tmp_path).config(health_listen="127.0.0.1:0", max_connections=8)) as service:
        yield service


def test_a_refused_call_ends_before_its_message_has_arrived(service):
    async def call() -> int:
        tally = Tally()
        one = Connection(tally)
        await one.connect(service.address)
        stream = one.call(LOOK_UP)
        async with asyncio.timeout(WAIT_S):
            await one.send(stream, http2.message(bytes(LONG))[:1000], end=False)
            await one.ended(stream)
        await one.close()
        return tally.ended["ended_streams"]

    assert asyncio.run(call()) == 1


@pytest.mark.parametrize("method", [STATUS, "/kvplane.v1.Events/Subscribe", "/kvplane.v1.Allocation/Session"])
def test_a_silent_call_ends(service, monkeypatch, method):
    monkeypatch.setattr(methods, "MESSAGE_TIMEOUT_S", 0.05)
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    call: Any = service.channel.stream_stream(method)
    answers = call(iter(requests.get, None), metadata=[("authorization", "Bearer token-acme")], timeout=WAIT_S)
    with pytest.raises(grpc.RpcError) as raised:
        next(answers)
    requests.put(None)
    error = error_of(raised.value)
    assert isinstance(error, DeadlineExceeded)
    assert "the first message did not arrive" in error.message


def test_a_call_without_a_request_is_refused(service):
    call: Any = service.channel.stream_unary(STATUS)
    with pytest.raises(grpc.RpcError) as raised:
        call(iter(()), metadata=[("authorization", "Bearer token-acme")], timeout=WAIT_S)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_compressed_messages_are_refused(service):
    call: Any = Caller(service, "token-acme").channel.unary_unary(STATUS)
    request = admin_pb2.StatusRequest().SerializeToString()
    call(request, timeout=WAIT_S)
    with pytest.raises(grpc.RpcError) as raised:
        call(request + bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=WAIT_S)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_health_port_takes_short_messages_only(service):
    with grpc.insecure_channel(service.app.health_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=WAIT_S)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_connections_above_the_limit_are_closed_and_a_free_one_is_used(service):
    def unauthenticated(channel: grpc.Channel) -> bool:
        try:
            ask: Any = channel.unary_unary(STATUS)
            ask(b"", timeout=WAIT_S)
        except grpc.RpcError as error:
            return isinstance(error_of(error), Unauthenticated)
        return False

    with contextlib.ExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        channels = [stack.enter_context(grpc.insecure_channel(service.address, options)) for _ in range(9)]
        assert [unauthenticated(one) for one in channels] == [True] * 8 + [False]
        channels[0].close()
        call: Any = channels[8].unary_unary(STATUS)  # it tries to connect again
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", timeout=60, wait_for_ready=True)
        assert isinstance(error_of(raised.value), Unauthenticated)


@contextlib.contextmanager
def attacked_service(folder, *settings):
    """A guarded service in a process of its own: process, address, address of the health port."""
    config = Guard(folder).config()
    settings = (*settings, *(f"{key}={getattr(config, key)}" for key in ("auth_owners", "auth_tokens")))
    flags = [flag for setting in (*settings, "health_listen=127.0.0.1:0") for flag in ("--set", setting)]
    log = folder / "log"
    command = [*KVPLANE, "serve", "--listen=127.0.0.1:0", *flags]
    errors = log.open("wb")
    with errors, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=errors) as process:
        try:
            assert process.stdout is not None
            address, health = (process.stdout.readline().split()[-1] for _ in range(2))
            with kvplane.connect(address, token="token-acme", timeout_s=60) as client:
                client.register_replica("acme/r", SOURCE)
            yield process, address, health
        finally:
            process.kill()
    lines = log.read_text().splitlines()
    assert [line for line in lines if "the event loop was blocked" not in line] == [], "attackers can fill the log"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    with attacked_service(tmp_path_factory.mktemp("guard")) as service:
        yield service


def peak_mb(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


ON_LISTEN = [(kind, "listen") for kind in ATTACKS]
ON_HEALTH = [(kind, "health_listen") for kind in ("held_messages", "silent_streams", "watches")]


@pytest.mark.parametrize(("kind", "port"), [*ON_LISTEN, *ON_HEALTH])
def test_memory_stays_bounded_under_attack(attacked, kind, port):
    process, address, health = attacked
    where = address if port == "listen" else health
    command = [sys.executable, "-m", "tests.service.auth.attacks", kind, where, str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    tally = json.loads(done.stdout)
    assert tally["sent"] > 0
    assert peak_mb(process.pid) < MAX_RSS_MB
    check_victim(address)
    with grpc.insecure_channel(health) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def check_victim(address: str) -> None:
    patient = RetryPolicy(attempts=None)  # the service may still cancel calls while it ends those of the attackers
    with kvplane.connect(address, token="token-acme", timeout_s=60, retry=patient) as client:
        assert client.find_cache_hit("acme/r", Content(token_ids=list(range(64)))).hit_tokens == 0


def test_parts_of_messages_over_grpc_take_what_their_number_allows(tmp_path):
    with attacked_service(tmp_path, f"max_message_bytes={PART_BYTES}") as (process, address, _):
        with kvplane.connect(address, token="token-acme", timeout_s=60) as client:
            for number in range(PARTIAL_SESSIONS):
                client.register_replica(f"acme/{number}", SOURCE)
        before = peak_mb(process.pid)
        command = [sys.executable, "-m", "tests.service.auth.attacks", "partial_sessions", address, str(SECONDS)]
        done = subprocess.run([*command, "token-acme", str(PART_BYTES)], capture_output=True, timeout=120, check=True)
        most = PARTIAL_SESSIONS * PART_BYTES
        assert json.loads(done.stdout)["sent"] > most // 2
        assert peak_mb(process.pid) - before < 1.25 * (most >> 20) + 20
        check_victim(address)
