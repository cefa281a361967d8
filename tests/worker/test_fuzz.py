"""Mutations of valid calls: each is answered or refused by field, and a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.rank_plan import RankPlan
from kvplane.base.worker import WorkerInfo, WorkerState
from kvplane.v1 import plan_pb2
from kvplane.v1 import worker_pb2 as pb
from kvplane_kernels.select import choose
from kvplane_plan.planner import to_rank_plan
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.rpc.server import WorkerServer
from kvplane_worker.rpc.servicer import ServedRank, WorkerServicer
from tests.plan.layers import named, plan, state, window
from tests.service.mutations import mutated
from tests.worker.rig import LAYERS, World

EXAMPLES = 120
BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
# The mutations use these texts, so that some mutated calls are valid.
TOKEN, REPLICA = "a", "r"
INFO = WorkerInfo(0, 1, "unix:/r", 3, "c", WorkerState.READY, 5, 2, "b")

WRITE: dict[str, Any] = {"token": TOKEN, "epoch": 3, "seq": 2, "part": 1}
VALID: dict[str, list[Message]] = {
    "Describe": [pb.DescribeRequest(token=TOKEN)],
    "Attach": [pb.AttachRequest(token=TOKEN, plan_digest="b"), pb.AttachRequest(token=TOKEN, stamps_only=True)],
    "Transfer": [
        pb.TransferRequest(**WRITE, kind="TRANSFER_KIND_COPY", group=1, blocks=[1, 2], dst_blocks=[2, 3]),
        pb.TransferRequest(**WRITE, kind="TRANSFER_KIND_ZERO", blocks=[5], expected_stamps=[15], load_after=1),
        pb.TransferRequest(token=TOKEN, epoch=3, kind="TRANSFER_KIND_GATHER", blocks=[5, 16], first_row=2),
        pb.TransferRequest(**WRITE, kind="TRANSFER_KIND_SCATTER", blocks=[5, 17], first_row=3),
    ],
    "Checksum": [pb.ChecksumRequest(token=TOKEN, group=1, blocks=[0, 1, 17])],
    "Claim": [pb.ClaimRequest(token=TOKEN, epoch=4, worker_id=1)],
}
WORKERS: dict[str, list[Message]] = {
    "RegisterWorker": [plan_pb2.RegisterWorkerRequest(replica=REPLICA, worker=wire.encode_worker(INFO))],
    "RenewWorker": [plan_pb2.RenewWorkerRequest(replica=REPLICA, worker=wire.encode_worker(INFO))],
    "DeregisterWorker": [plan_pb2.DeregisterWorkerRequest(replica=REPLICA, worker_id=1)],
}


def serve_rank(place: RunDir) -> ServedRank:
    """A rank with pages of epoch 3, whose first step is executed, and whose second one has begun."""
    rank = to_rank_plan(plan(LAYERS, num_blocks=40, max_model_len=64, max_batched_tokens=16))
    holdings = Holdings.allocate(rank, "cpu", place, 1 << 12)
    holdings.stamps.claim(3)
    holdings.stamps.write(range(1, 40), range(11, 50))
    holdings.stamps.begin(2, 1)
    holdings.stamps.finish()
    holdings.stamps.set_executed(1)
    return ServedRank(REPLICA, replace(INFO, device="cpu", plan_digest="b"), TOKEN, holdings, choose("cpu"))


def bytes_of(holdings: Holdings) -> tuple[bytes, ...]:
    """The bytes of pages, staging buffer and stamp table."""
    memory, staging = (bytes(one.numpy()) for one in (holdings.buffers.memory, holdings.staging))
    return memory, staging, holdings.stamps.snapshot()


class Served:
    """A worker's server in this process, and the bytes that it holds."""

    def __init__(self, folder: Path) -> None:
        self.place = RunDir(folder / "r")
        served = serve_rank(self.place)
        self.holdings = served.holdings
        self.servicer = WorkerServicer(served)
        self.server = WorkerServer(self.servicer, self.place.path)
        self.server.start()
        self.channel = grpc.insecure_channel(self.place.address)

    def kept(self) -> tuple[bytes, ...]:
        return bytes_of(self.holdings)

    def end(self) -> None:
        self.channel.close()
        self.server.stop(0)
        self.servicer.close()
        self.holdings.close()
        self.place.leave()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it = Served(tmp_path)
    yield it
    it.end()


def outcome(channel: grpc.Channel, path: str, raw: bytes) -> grpc.StatusCode:
    call: Any = channel.unary_unary(f"/kvplane.v1.{path}")
    try:
        call(raw)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", VALID)
def test_mutated_worker_call_is_answered_or_refused(served: Served, method):
    outcomes = set()

    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(VALID[method]).flatmap(mutated))
    def check(raw: bytes):
        before = served.kept()
        code = outcome(served.channel, f"Worker/{method}", raw)
        outcomes.add(code)
        assert code not in BUGS
        assert code is grpc.StatusCode.OK or served.kept() == before

    for request in VALID[method]:
        assert outcome(served.channel, f"Worker/{method}", request.SerializeToString()) is grpc.StatusCode.OK
    check()
    assert len(outcomes) > 1, "the mutations are too tame"


def test_block_id_above_32_bits_is_refused(served: Served):
    """2^32 + 5 is not block 5."""
    before = served.kept()
    zero = pb.TransferRequest(**WRITE, kind="TRANSFER_KIND_ZERO").SerializeToString()
    big = bytes([pb.TransferRequest.BLOCKS_FIELD_NUMBER << 3, 0x85, 0x80, 0x80, 0x80, 0x10])
    assert pb.TransferRequest.FromString(zero + big).blocks == [5]
    assert outcome(served.channel, "Worker/Transfer", zero + big) is grpc.StatusCode.INVALID_ARGUMENT
    assert served.kept() == before


@pytest.mark.parametrize("method", WORKERS)
def test_mutated_call_about_a_worker_is_answered_or_refused(here: World, method):
    channel, outcomes = here.service.channel, set()
    known = WORKERS["RegisterWorker"][0].SerializeToString()

    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(WORKERS[method]).flatmap(mutated))
    def check(raw: bytes):
        before = [worker.SerializeToString() for worker in here.shown()]
        code = outcome(channel, f"Workers/{method}", raw)
        outcomes.add(code)
        assert code not in BUGS
        if code is not grpc.StatusCode.OK:
            assert [worker.SerializeToString() for worker in here.shown()] == before
        for worker in here.shown():
            request = plan_pb2.DeregisterWorkerRequest(replica=REPLICA, worker_id=worker.worker_id)
            assert outcome(channel, "Workers/DeregisterWorker", request.SerializeToString()) is grpc.StatusCode.OK
        assert outcome(channel, "Workers/RegisterWorker", known) is grpc.StatusCode.OK

    assert outcome(channel, "Workers/RegisterWorker", known) is grpc.StatusCode.OK
    check()
    assert len(outcomes) > 1, "the mutations are too tame"


def test_mutated_plan_is_accepted_or_refused_by_field():
    """A plan is accepted only when its pages are inside the memory and do not overlap."""
    rank = to_rank_plan(plan(named(s=(2, state()), w=(3, window())), num_blocks=40, max_model_len=64))
    taken = []

    @settings(max_examples=EXAMPLES)
    @given(mutated(wire.encode_plan(rank)))
    def check(raw: bytes):
        try:
            read = wire.decode_plan(plan_pb2.RankPlan.FromString(raw))
        except (DecodeError, InvalidArgument):
            return
        taken.append(read)
        _check_by_bytes(read)

    check()
    assert taken


def _check_by_bytes(plan: RankPlan) -> None:
    """Count owners of each byte: no byte of the memory belongs to two pages of a group."""
    if plan.size_bytes > 1 << 20 or plan.num_blocks > 1000:
        return
    for group in range(len(plan.groups)):
        used = bytearray(plan.size_bytes)
        for place in plan.places():
            if place.group != group:
                continue
            for block in range(plan.num_blocks):
                start = place.offset_bytes + block * place.block_stride_bytes
                page = used[start : start + place.spec.page_bytes]
                assert len(page) == place.spec.page_bytes
                assert not any(page)
                used[start : start + place.spec.page_bytes] = b"\1" * place.spec.page_bytes
