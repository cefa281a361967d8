"""`kvplane serve` as a process: address, signals, exit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvplane.base.errors import OtherWriter, Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.v1.replica_pb2 import ModelSource
from kvplane_service.config import Config
from tests.service.rig import NONCES, SPEC, WAIT_S, Stream, running

KVPLANE = [sys.executable, "-c", "from kvplane_tools.cli import main; main()"]


@contextmanager
def serving(
    *arguments: str, listen: str = "127.0.0.1:0", **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address that it prints."""
    process = subprocess.Popen(
        [*KVPLANE, "serve", "--listen", listen, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and log."""
    _, logged = process.communicate(timeout=WAIT_S)
    return process.returncode, logged


def session(channel: grpc.Channel) -> Stream:
    AllocationStub(channel).RegisterReplica(pb.RegisterReplicaRequest(replica="r", spec=SPEC))
    stream = Stream(channel)
    stream.send(open={"replica": "r", "nonce": next(NONCES)})
    stream.opened = stream.receive().opened
    return stream


def test_a_parent_that_reads_the_address_and_closes_the_pipe_does_not_end_the_service():
    with serving(PYTHONUNBUFFERED="1") as (process, address):
        assert process.stdout is not None
        process.stdout.close()
        with grpc.insecure_channel(address) as channel:
            session(channel).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("loop", ["uvloop=true", "uvloop=false"])
def test_serve_takes_a_free_port_and_drains_on_sigterm(loop):
    with serving("--set", loop) as (process, address):
        assert not address.endswith(":0")
        with grpc.insecure_channel(address) as channel:
            stream = session(channel)
            process.send_signal(signal.SIGTERM)
            assert stream.receive().WhichOneof("kind") == "draining"
            assert stream.step().result.seq == 1
            stream.close()
        code, logged = end(process)
    assert code == 0
    assert "SIGTERM: draining" in logged
    assert logged.rstrip().endswith("drained")


def test_clients_that_disconnect_are_not_logged():
    """In the middle of a step, of a stream, of a call; also a program that kills itself."""
    client = "import grpc, os, sys; from tests.cli.test_serve import session; "
    client += "session(grpc.insecure_channel(sys.argv[1])); os.kill(os.getpid(), 9)"
    with serving() as (process, address):
        with grpc.insecure_channel(address) as channel:
            stream = session(channel)
            for seq in range(1, 100):
                header = {"epoch": stream.opened.epoch, "seq": seq, "executed_through": seq - 1}
                stream.send(step={**header, "parts": [{}]})
            AllocationStub(channel).ListReplicas.future(pb.ListReplicasRequest())
        subprocess.run([sys.executable, "-c", client, address], check=False, timeout=WAIT_S)
        with grpc.insecure_channel(address) as channel:
            session(channel).vanish()
            older = session(channel)
            session(channel)
            assert isinstance(older.end(), OtherWriter)
        process.send_signal(signal.SIGTERM)
        code, logged = end(process)
    assert code == 0
    of_the_machine = "the event loop was blocked"  # on a loaded one
    assert [line for line in logged.splitlines() if " INFO " not in line and of_the_machine not in line] == []


def test_a_second_signal_stops_at_once():
    with serving(KVPLANE_DRAIN_GRACE_MS="3600000") as (process, address), grpc.insecure_channel(address) as channel:
        stream = session(channel)
        process.send_signal(signal.SIGTERM)
        assert stream.receive().WhichOneof("kind") == "draining"
        process.send_signal(signal.SIGINT)
        assert isinstance(stream.end(), Unavailable)
        code, logged = end(process)
    assert code == 0
    assert "SIGINT: stopping at once" in logged


def test_sigterm_during_a_registration_ends_cleanly():
    """The call is answered or refused; the process exits with 0."""
    with serving() as (process, address), grpc.insecure_channel(address) as channel:
        stub = AllocationStub(channel)
        request = pb.RegisterReplicaRequest(replica="large", model=ModelSource(model="gemma-3-27b", num_blocks=1 << 17))
        call = stub.RegisterReplica.future(request, wait_for_ready=True)
        stub.ListReplicas(pb.ListReplicasRequest())  # answered behind the start of the registration
        process.send_signal(signal.SIGTERM)
        outcome = call.code()
        code, logged = end(process)
    assert outcome in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE), outcome
    assert code == 0
    assert "Traceback" not in logged


def test_a_used_port_is_refused_with_a_remedy(kvplane):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, output, errors = kvplane("serve", "--listen", address)
    assert (code, output) == (3, "")
    assert errors.startswith(f"kvplane: listen: cannot listen on {address}: Address already in use")
    assert "--listen" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix:{tmp_path}/s"])
def test_a_second_service_does_not_share_the_address(kvplane, tmp_path, listen):
    with running(Config(listen=listen.format(tmp_path=tmp_path))) as service:
        code, _, errors = kvplane("serve", "--listen", service.address)
        service.register()
    assert code == 3
    assert "already in use" in errors


@pytest.mark.parametrize("listen", ["192.0.2.1:7070", "unix:/nowhere/at/all", "unix:" + "x" * 200])
def test_a_foreign_address_is_refused_by_name(kvplane, listen):
    code, _, errors = kvplane("serve", "--listen", listen)
    assert code == 3
    assert f"cannot listen on {listen}: " in errors


def test_a_stale_socket_file_is_replaced(tmp_path):
    listen = f"unix:{tmp_path}/s"
    with serving(listen=listen) as (process, _):
        process.kill()
        process.wait(WAIT_S)
        with serving(listen=listen) as (_, address), grpc.insecure_channel(address) as channel:
            session(channel).close()
