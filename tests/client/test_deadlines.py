"""Peers that keep a stream open without serving it: one that answers only pings, one that refuses frequent pings."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import grpc
import pytest

import kvplane
from kvplane import AdmitRow, NewsRow, Part, aio, part_of, wire
from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from kvplane.base.requests import Allocate, Content
from kvplane.base.session import Opened
from kvplane.rpc import channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.v1 import allocation_pb2 as pb
from tests.client.loop_thread import LIMIT_S, Blocking, shared_loop
from tests.client.mini_engine import HYBRID
from tests.client.worlds import GrpcWorld
from tests.twins import weakened

QUICK: Any = {"step_timeout_s": 0.2, "open_timeout_s": 5.0, "retry": RetryPolicy(attempts=1)}


@contextmanager
def server(handler):
    """The address of a gRPC server with gRPC's own settings."""
    place = grpc.server(ThreadPoolExecutor(30))
    place.add_generic_rpc_handlers((handler,))
    port = place.add_insecure_port("127.0.0.1:0")
    place.start()
    yield f"127.0.0.1:{port}"
    place.stop(None)


@pytest.fixture(params=["blocking", "asyncio"])
def session_at(request):
    """Opens a session of either kind at an address."""
    clients: list[Any] = []
    if request.param == "blocking":

        def open_one(address, name):
            clients.append(kvplane.connect(address))
            return clients[-1].session(name, **QUICK)

        yield open_one
        for client in clients:
            client.close()
        return

    def open_another(address, name):
        clients.append(shared_loop().make(aio.connect, address))
        return Blocking(shared_loop().do(clients[-1].session, name, **QUICK))

    yield open_another
    for client in clients:
        shared_loop().do(client.close)


class Silent(grpc.GenericRpcHandler):
    """Opens sessions and answers no step; gRPC's own threads answer pings."""

    def __init__(self):
        self.done = threading.Event()
        self.num_steps = 0

    def service(self, details):
        def serve(requests, context):
            epoch = pb.SessionRequest.FromString(next(requests)).open.epoch or 1
            opened = Opened(epoch, 0, 0, 4, 100, 60_000, HYBRID, 39, 0)
            yield pb.SessionResponse(opened=wire.encode_opened(opened)).SerializeToString()
            context.add_callback(self.done.set)
            for raw in requests:
                self.num_steps += pb.SessionRequest.FromString(raw).HasField("step")

        return grpc.stream_stream_rpc_method_handler(serve)


def test_a_service_that_answers_pings_but_no_steps_is_detected(session_at):
    silent = Silent()
    with server(silent) as address:
        session = session_at(address, "r")
        for call in (lambda: session.apply(Part()), session.receive, session.receive):
            with pytest.raises(DeadlineExceeded, match=r"not answer within 0\.2 s"):
                call()
            assert (session.in_flight, session.ended) == (1, None)
        session.close()
        assert silent.num_steps == 3, "each try sends the step again, on a stream of its own"
        assert silent.done.wait(LIMIT_S)


def test_a_call_without_a_deadline_ends_by_abort():
    with server(Silent()) as address, weakened("no deadline of a step"), kvplane.connect(address) as client:
        session, ended = client.session("r", **QUICK), threading.Event()

        def engine():
            with pytest.raises(FailedPrecondition, match="aborted"):
                session.apply(Part())
            ended.set()

        thread = threading.Thread(target=engine)
        thread.start()
        assert not ended.wait(10 * QUICK["step_timeout_s"])
        session.abort()
        assert ended.wait(LIMIT_S)
        thread.join()


@pytest.fixture(scope="module")
def world():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


class Hop(grpc.GenericRpcHandler):
    """A proxy with gRPC's default limit of pings: two within five minutes without data, then GOAWAY.

    Attributes:
        began: when each stream did.
    """

    def __init__(self, target):
        self._channel = grpc.insecure_channel(target)
        self.began = []

    def service(self, details):
        def carry(request, context):
            self.began.append(time.monotonic())
            answers: Any = self._channel.unary_stream(details.method)(request)
            context.add_callback(answers.cancel)
            try:
                yield from answers
            except grpc.RpcError:
                return

        return grpc.unary_stream_rpc_method_handler(carry)


def test_a_proxy_that_refuses_pings_is_pinged_less_often(world, monkeypatch):
    """It answers ENHANCE_YOUR_CALM and cuts the connection; gRPC doubles the interval each time, on each channel."""
    options = tuple((key, 1000 if key == "grpc.keepalive_time_ms" else value) for key, value in channel._OPTIONS)
    monkeypatch.setattr(channel, "_OPTIONS", options)
    hop = Hop(world.service.address)
    with server(hop) as address, kvplane.connect(address, retry=RetryPolicy(attempts=1000)) as client:
        batches, seen, done = client.subscribe(world.replica, 0), [], threading.Event()

        def listen():
            seen.append(next(batches))
            done.set()

        threading.Thread(target=listen, daemon=True).start()
        while len(hop.began) < 2 or time.monotonic() - hop.began[-1] < 1.5 * (hop.began[1] - hop.began[0]):
            assert len(hop.began) < 3, "the interval does not grow"
            assert not done.wait(0.05)
        world.client.allocate_slots(world.replica, Allocate("a", Content(token_ids=range(40))))
        world.client.commit_blocks(world.replica, kvplane.Commit())
        assert done.wait(LIMIT_S)
        assert seen[0].events


def test_a_timeout_of_zero_is_refused(world):
    for name in ("step_timeout_s", "open_timeout_s"):
        with pytest.raises(InvalidArgument, match=name):
            world.client.session(world.replica, **{name: 0.0})


def test_a_revive_excludes_epoch_and_stamp_table(world):
    for name, value in (("stamp_table", [1] * HYBRID.num_blocks), ("epoch", 3)):
        with pytest.raises(InvalidArgument, match=name):
            world.client.session(world.replica, kvplane.Revival, **{name: value})


def test_a_session_without_remember_cannot_begin_a_new_life(world):
    with world.client.session(world.replica, remember=False) as session:
        with pytest.raises(FailedPrecondition, match="no revive"):
            session.begin_new_life()
        assert session.apply(part_of(NewsRow(0, range(40)), AdmitRow(0))).seq == 1


def test_an_unknown_option_is_refused(world):
    options: Any = {"patience": 3}
    with pytest.raises(InvalidArgument, match="has no option"):
        world.client.session(world.replica, **options)
