"""Who calls a worker: the kernel names the process of each connection, and each call has the token."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from kvplane.base.errors import FailedPrecondition, KvplaneError, OtherWriter, PermissionDenied, StaleEpoch, Unavailable
from kvplane.rpc.peers import Peer, check_listener
from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.attach import WorkerClient, attach, describe, read_stamps
from kvplane_worker.lending.rundir import GRPC_SOCKET, SOCKET, read_token, run_dir_of
from kvplane_worker.rpc import callers
from tests.service.rig import until
from tests.worker.rig import World, refusal, world

NOBODY = 65534
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
CALLS = ["Describe", "Attach", "Transfer", "Checksum", "Claim"]


class Called:
    """A worker and its directory."""

    def __init__(self, here: World) -> None:
        self.world = here
        _, self.address = here.worker()
        self.run_dir = run_dir_of(self.address)
        self.token = read_token(self.run_dir)

    def call(self, method: str, **fields: object) -> Message:
        request, answer = getattr(pb, f"{method}Request"), getattr(pb, f"{method}Response")
        with WorkerClient(self.run_dir) as client:
            return client.call(method, request(**fields), answer)

    def refusal(self, method: str, **fields: object) -> KvplaneError:
        return refusal(lambda: self.call(method, **fields))

    def state(self) -> tuple[object, ...]:
        described = describe(self.address)
        described.ClearField("free_bytes")
        return described.SerializeToString(), read_stamps(self.address).snapshot()


@pytest.fixture
def called(here: World) -> Called:
    return Called(here)


@pytest.mark.parametrize("method", CALLS)
def test_every_call_needs_the_token(called: Called, method):
    before = called.state()
    for token in ("", "guessed", called.token[:-1]):
        error = called.refusal(method, token=token)
        assert (type(error), error.field) == (PermissionDenied, "token")
    assert called.state() == before


def test_attach_lends_to_the_process_of_the_connection(called: Called):
    """A request has no field for another process."""
    assert set(pb.AttachRequest.DESCRIPTOR.fields_by_name) == {"token", "plan_digest", "stamps_only", "opaque_plan"}
    engine = called.world.engine()
    engine.do("attach", called.address)
    assert describe(called.address).attached_pid == engine.pid
    error = called.refusal("Attach", token=called.token)
    assert (type(error), error.metadata) == (OtherWriter, {"pid": str(engine.pid)})


def test_connection_past_the_worker_s_socket_attaches_nothing(called: Called):
    """The socket on which gRPC listens is in the same directory; a connection to it has no process."""
    request = pb.AttachRequest(token=called.token).SerializeToString()
    with grpc.insecure_channel(f"unix:{called.run_dir / GRPC_SOCKET}") as channel:
        attach_directly: Any = channel.unary_unary("/kvplane.v1.Worker/Attach")
        with pytest.raises(grpc.RpcError) as caught:
            attach_directly(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert describe(called.address).attached_pid == 0


def test_process_of_another_namespace_attaches_nothing(called: Called, tmp_path: Path):
    """The kernel shows it with pid 0."""
    passed = callers.Callers(tmp_path / "a", tmp_path / "b")
    passed._processes["unix-abstract:x"] = callers._name_of(socket.socketpair()[0], Peer(0, os.getuid()))
    passed.close()
    error = refusal(passed.process_of, "unix-abstract:x")
    assert (type(error), error.field) == (FailedPrecondition, "pid")


def test_process_that_left_before_it_was_named_is_unknown():
    """Its pid could be that of another process by now."""
    ours, theirs = socket.socketpair()
    name = callers._name_of(ours, Peer(os.getpid(), os.getuid()))
    assert name is not None
    assert name.pid == os.getpid()
    theirs.send(b"PRI * HTTP/2.0")  # what it sent is still there
    theirs.close()
    assert callers._name_of(ours, Peer(os.getpid(), os.getuid())) is None
    ours.close()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users can reach, unlike those of pytest."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@ROOT
def test_connection_of_another_user_is_closed_before_it_is_read(reachable: Path):
    """Also where the directory was opened by mistake."""
    with world(reachable) as it:
        it.register()
        called = Called(it)
        for place in (called.run_dir, *called.run_dir.iterdir()):
            place.chmod(0o777)
        assert it.engine().do("greeting", called.address), "gRPC greets processes of the worker's user"
        assert it.engine(NOBODY).do("greeting", called.address) == b""
        called.run_dir.chmod(0o700)


@ROOT
def test_socket_of_another_user_gets_no_token(here: World, reachable: Path):
    """A client looks whose process listens before it sends anything."""
    folder = reachable / "run"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "token").write_text("secret")
    impostor = here.engine(NOBODY)
    impostor.do("listen", str(folder / SOCKET))
    error = refusal(attach, folder)
    assert (type(error), error.field) == (PermissionDenied, "run_dir")
    assert impostor.do("received") == b""


def test_socket_without_a_listener_is_unavailable(tmp_path: Path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "left.sock"))
    left.close()
    for name in ("none.sock", "left.sock"):
        assert isinstance(refusal(check_listener, str(tmp_path / name), "the worker"), Unavailable)


def test_connections_are_limited_and_make_room(called: Called):
    with ExitStack() as held, WorkerClient(called.run_dir) as earlier:
        request = pb.DescribeRequest(token=called.token)
        earlier.call("Describe", request, pb.DescribeResponse)
        for _ in range(callers.MAX_CONNECTIONS + 5):
            connection = held.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(called.address.removeprefix("unix:"))
        connection.settimeout(30)
        assert connection.recv(1) == b"", "the last one is closed"
        earlier.call("Describe", request, pb.DescribeResponse)
    assert describe(called.address).attached_pid == 0


def test_a_worker_that_ends_warns_of_no_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Late:
        """A socket that is shut down long before it is closed."""

        def __init__(self, inner: socket.socket) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def close(self) -> None:
            until(lambda: bool(caplog.records) or not accepting.is_alive())
            self.inner.close()

    one = callers.Callers(tmp_path / "a", tmp_path / "b")
    one._listener = Late(one._listener)  # type: ignore[assignment]
    one.start()
    (accepting,) = [thread for thread in threading.enumerate() if thread.name == "kvplane-callers"]
    one.close()
    assert not caplog.records


def test_claim_that_means_another_worker_is_refused(called: Called):
    own = describe(called.address).worker.worker_id
    before = called.state()
    error = called.refusal("Claim", token=called.token, epoch=9, worker_id=own ^ 1)
    assert (type(error), error.field) == (FailedPrecondition, "worker_id")
    assert called.state() == before
    called.call("Claim", token=called.token, epoch=9, worker_id=own)
    assert read_stamps(called.address).owner_epoch == 9
    assert isinstance(called.refusal("Claim", token=called.token, epoch=9, worker_id=own), StaleEpoch)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[World]:
    """A replica whose stamps are longer than what the worker passes on at once."""
    with world(tmp_path) as it:
        it.register(num_blocks=200_000)
        yield it


def test_long_answers_are_passed_on_whole(large: World):
    called = Called(large)
    answer = called.call("Claim", token=called.token, epoch=3)
    assert isinstance(answer, pb.ClaimResponse)
    assert answer.stamps == b"".join(stamp.to_bytes(8, "little") for stamp in read_stamps(called.address).read_all())
    assert len(answer.stamps) == 8 * 200_000
