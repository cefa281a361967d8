"""Unary calls over real gRPC: statuses, rich details, repeats; the digest is the same after each refusal."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvplane.base.errors import (
    AlreadyExists,
    InternalError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    OpIdReused,
    OtherWriter,
    ReplicaLapsed,
    StaleEpoch,
)
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.replica_pb2 import GroupSpec, ModelSource, ReplicaSpec
from kvplane_service.config import Config
from kvplane_service.rpc import admin
from tests.core.specification import specification_of
from tests.service.rig import SPEC, WAIT_S, refusal, running

PROMPT = list(range(40))
HEADER = {"replica": "r"}


@pytest.fixture(scope="module")
def process():
    config = Config(listen="127.0.0.1:0", max_message_bytes=1 << 16, hash_inline_tokens=100, max_token_id=10_000_000)
    with running(config) as service:
        yield service


@pytest.fixture
def service(process):
    process.register()
    yield process
    process.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="r"))


@pytest.fixture
def unchanged(service):
    """The test changes nothing that it has not said by calling the fixture's value."""
    marks = [service.digest()]
    yield lambda: marks.append(service.digest())
    assert service.digest() == marks[-1]


def allocate(service, name="a", tokens=PROMPT, **header):
    content = None if tokens is None else {"token_ids": tokens}
    request = pb.AllocateSlotsRequest(header={**HEADER, **header}, request_id=name, content=content)
    return service.allocation.AllocateSlots(request)


def commit(service, **header):
    return service.allocation.CommitBlocks(pb.CommitBlocksRequest(header={**HEADER, **header}))


def find(service, tokens=PROMPT, **content):
    request = pb.FindCacheHitRequest(replica="r", content={"token_ids": tokens, **content}, with_blocks=True)
    return service.allocation.FindCacheHit(request)


class TestDetails:
    def test_a_refusal_carries_reason_domain_field_and_remedy(self, service, unchanged):
        with pytest.raises(grpc.RpcError) as raised:
            allocate(service, tokens=None)
        error: Any = raised.value
        assert error.code() is grpc.StatusCode.NOT_FOUND
        details = dict(error.trailing_metadata())["grpc-status-details-bin"]
        status = status_pb2.Status.FromString(details)
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(bad)
        assert (info.reason, info.domain) == ("NOT_FOUND", "kvplane")
        assert info.metadata["remedy"]
        assert bad.field_violations[0].field == "request_id"

    def test_a_stale_epoch_error_has_the_current_epoch(self, service, unchanged):
        with refusal(StaleEpoch, "epoch") as caught:
            allocate(service, epoch=7)
        assert caught[0].metadata["epoch"] == "1"


class TestReplicas:
    @pytest.mark.parametrize(
        "call",
        [
            lambda s: s.allocation.DescribeReplica(pb.DescribeReplicaRequest(replica="x")),
            lambda s: s.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="x")),
            lambda s: s.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="x", request_id="a")),
            lambda s: s.admin.Snapshot(admin_pb2.SnapshotRequest(replica="x")),
        ],
    )
    def test_an_unknown_replica_is_named(self, service, unchanged, call):
        with refusal(NotFound, "replica"):
            call(service)

    def test_an_unknown_replica_of_a_mutation_is_named(self, service, unchanged):
        with refusal(NotFound, "header.replica"):
            allocate(service, replica="x")

    def test_registering_again_answers_the_same_and_changes_nothing(self, service, unchanged):
        request = pb.RegisterReplicaRequest(replica="r", spec=SPEC)
        assert service.allocation.RegisterReplica(request) == service.allocation.RegisterReplica(request)

    def test_registering_a_name_with_another_spec_is_refused(self, service, unchanged):
        other = ReplicaSpec()
        other.CopyFrom(SPEC)
        other.num_blocks += 1
        with refusal(AlreadyExists, "replica"):
            service.register(spec=other)

    def test_registrations_of_one_name_at_once_are_one(self, service):
        request = pb.RegisterReplicaRequest(replica="same", spec=SPEC)
        calls = [service.allocation.RegisterReplica.future(request) for _ in range(8)]
        assert len({call.result(WAIT_S).SerializeToString() for call in calls}) == 1
        with refusal(AlreadyExists, "replica"):
            request.num_ranks = 2
            service.allocation.RegisterReplica(request)
        service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="same"))

    def test_an_invalid_spec_names_its_field(self, service, unchanged):
        other = ReplicaSpec()
        other.CopyFrom(SPEC)
        other.groups[1].window = 0
        with refusal(InvalidArgument, "spec.groups[1].window"):
            service.register("x", other)
        with refusal(NotFound):
            service.describe("x")

    def test_registering_without_a_source_is_refused(self, service, unchanged):
        with refusal(InvalidArgument, "source"):
            service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica="x"))

    def test_a_model_of_the_catalogue_is_planned(self, service):
        model = ModelSource(model="jamba-v0.1", tensor_parallel=2, memory_bytes=8 << 30, watermark=0.01)
        request = pb.RegisterReplicaRequest(replica="jamba", model=model, num_ranks=2)
        answer = service.allocation.RegisterReplica(request)
        assert len(answer.spec.groups) == 8
        assert answer.spec.align.block_size == answer.spec.groups[0].block_size
        assert answer.spec.watermark_blocks == int(0.01 * answer.spec.num_blocks)
        assert 0 < answer.bytes_per_block <= (8 << 30) / answer.spec.num_blocks
        assert answer.max_concurrency > 1
        service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="jamba"))

    def test_an_unknown_model_names_the_nearest(self, service, unchanged):
        with refusal(NotFound, "model.model") as caught:
            model = ModelSource(model="lama-3.1-70b", num_blocks=10)
            service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica="x", model=model))
        assert "llama-3.1-70b" in caught[0].remedy

    def test_registering_with_memory_and_num_blocks_is_refused(self, service, unchanged):
        for amount in (0, 9):
            with refusal(InvalidArgument, "model.memory_bytes"):
                model = ModelSource(model="llama-3.1-8b", num_blocks=amount, memory_bytes=amount)
                service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica="x", model=model))

    def test_a_replica_is_described(self, service):
        allocate(service)
        commit(service)
        seen = service.describe()
        assert (seen.replica, seen.epoch, seen.seq, seen.executed_through) == ("r", 1, 2, 1)
        assert (seen.num_ranks, seen.running_requests, seen.spec) == (1, 1, SPEC_AS_ANSWERED)
        assert seen.free_blocks == 40 - 6
        counters = seen.counters
        assert (counters.steps, counters.admitted, counters.granted_tokens) == (2, 1, 40)
        assert [group.used_blocks for group in counters.groups] == [3, 3]

    def test_replicas_are_listed_in_pages(self, service):
        for name in ("p1", "p2", "p3"):
            service.register(name)
        seen, token = [], ""
        while True:
            page = service.allocation.ListReplicas(pb.ListReplicasRequest(page_size=2, page_token=token))
            seen.append([one.replica for one in page.replicas])
            token = page.next_page_token
            if not token:
                break
        assert seen == [["p1", "p2"], ["p3", "r"]]
        for name in ("p1", "p2", "p3"):
            service.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica=name))

    @pytest.mark.parametrize(
        ("field", "value"),
        [("page_size", 1001), ("page_token", "no name"), ("page_token", "garbage"), ("page_token", "after:")],
    )
    def test_invalid_page_requests_are_refused(self, service, unchanged, field, value):
        with refusal(InvalidArgument, field):
            service.allocation.ListReplicas(pb.ListReplicasRequest(**{field: value}))


# Defaults are said in answers.
SPEC_AS_ANSWERED = ReplicaSpec(hash_algorithm="HASH_ALGORITHM_KVPLANE", commit="COMMIT_RULE_SAFE", align={})
SPEC_AS_ANSWERED.MergeFrom(SPEC)
for _group in SPEC_AS_ANSWERED.groups:
    _group.MergeFrom(GroupSpec(mamba_mode="MAMBA_MODE_NONE"))


class TestHits:
    def test_only_executed_content_is_found(self, service):
        allocate(service)
        assert find(service, [*PROMPT, 1]).hit_tokens == 0
        commit(service)
        found = find(service, [*PROMPT, 1])
        assert (found.hit_tokens, found.num_tokens, found.num_hashes) == (32, 41, 2)
        assert [len(group.block_ids) for group in found.blocks] == [2, 2]

    def test_content_that_skips_reading_finds_nothing(self, service):
        allocate(service)
        commit(service)
        skipped = find(service, [*PROMPT, 1], skip_reading=True)
        assert (skipped.hit_tokens, skipped.single_group_hit, skipped.num_hashes) == (0, 0, 2)

    def test_a_look_up_leaves_the_digest_unchanged(self, service, unchanged):
        find(service)

    def test_long_content_is_found_as_short_content(self, service):
        long = list(range(300))
        allocate(service, tokens=long)
        commit(service)
        assert find(service, [*long, 7]).hit_tokens == 288

    def test_a_request_is_found_by_its_name_also_a_session_s(self, service):
        stream = service.open()
        news = {"slot": bytes(4), "num_tokens": (40).to_bytes(4, "little"), "tokens": bytes(160), "request_id": ["q"]}
        stream.step({"news": news})
        found = service.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", request_id="q"))
        assert (found.num_tokens, found.num_hashes, len(found.last_hash)) == (40, 2, 32)
        stream.close()

    def test_an_unknown_request_is_named(self, service, unchanged):
        for name in ("unknown", ""):
            with refusal(NotFound, "request_id"):
                service.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", request_id=name))

    def test_a_lapsed_replica_refuses_look_ups(self, service):
        service.open().vanish()
        with refusal(ReplicaLapsed):
            while True:
                find(service)

    @pytest.mark.parametrize(
        ("content", "field"),
        [
            ({}, "content"),
            ({"token_ids": [1], "num_tokens": 1}, "content.hashes"),
            ({"token_ids": [1], "hashes": [b"h" * 32]}, "content.hashes"),
            ({"num_tokens": 40, "hashes": [b"h" * 31]}, "content.hashes[0]"),
            ({"num_tokens": 10, "hashes": [b"h" * 32]}, None),
            ({"token_ids": [1] * 1025}, "content.token_ids"),
            ({"token_ids": [1, 10_000_001]}, "content.token_ids[1]"),
            ({"token_ids": [1] * 40, "extra_keys": {"multimodal": [{"offset": 1}]}}, None),
        ],
    )
    def test_invalid_content_is_refused(self, service, unchanged, content, field):
        with refusal(InvalidArgument, field):
            service.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", content=content))
        with refusal(InvalidArgument, field):
            service.allocation.AllocateSlots(pb.AllocateSlotsRequest(header=HEADER, request_id="a", content=content))


class TestRepeats:
    def test_a_repeat_gets_the_first_answer_and_changes_nothing(self, service, unchanged):
        first = allocate(service, op_id="1")
        unchanged()
        assert allocate(service, op_id="1") == first

    def test_a_repeat_gets_the_first_answer_after_the_request_is_freed(self, service, unchanged):
        allocate(service)
        grow = pb.CommitBlocksRequest(header={**HEADER, "op_id": "c"}, request_id="a", appended={"token_ids": [1]})
        first = service.allocation.CommitBlocks(grow)
        service.allocation.Free(pb.FreeRequest(header=HEADER, request_id="a"))
        unchanged()
        assert service.allocation.CommitBlocks(grow) == first

    def test_another_call_under_the_same_op_id_is_refused(self, service, unchanged):
        allocate(service, op_id="1")
        unchanged()
        with refusal(OpIdReused, "header.op_id"):
            allocate(service, tokens=[1], op_id="1")
        with refusal(OpIdReused, "header.op_id"):
            commit(service, op_id="1")

    def test_a_refused_call_may_be_repeated_corrected(self, service):
        with refusal(NotFound):
            allocate(service, tokens=None, op_id="1")
        assert allocate(service, op_id="1").granted_tokens == 40

    def test_op_id_length_is_limited(self, service, unchanged):
        with refusal(InvalidArgument, "header.op_id"):
            allocate(service, op_id="x" * 129)


class TestLimits:
    def test_a_message_beyond_the_limit_is_refused(self, service, unchanged):
        with refusal(LimitExceeded):
            service.allocation.EvictBlocks(pb.EvictBlocksRequest(header=HEADER, block_ids=[2**31] * (1 << 16)))

    def test_invalid_bytes_are_refused(self, service, unchanged):
        with refusal(InvalidArgument):
            service.channel.unary_unary("/kvplane.v1.Allocation/AllocateSlots")(b"\xff\xff\xff")

    def test_unary_calls_are_refused_while_a_session_is_open(self, service):
        stream = service.open()
        before = service.digest()
        with refusal(OtherWriter, "replica"):
            allocate(service)
        assert service.digest() == before
        stream.close()

    def test_a_block_outside_of_the_pool_is_refused(self, service, unchanged):
        for block in (0, 41, 2**32 - 1):
            with refusal(InvalidArgument, "block_ids[0]"):
                service.allocation.EvictBlocks(pb.EvictBlocksRequest(header=HEADER, block_ids=[block]))

    def test_a_token_beyond_32_bits_is_refused_and_not_truncated(self, service, unchanged):
        """Our stubs cannot send it; another encoder's varint can, and parsers would read 2^32 + 5 as 5."""
        tokens = b"\x01" + varint(2**32 + 5)
        content = field(3, field(1, tokens))
        request = field(1, field(1, b"r")) + field(2, b"a") + content
        assert pb.AllocateSlotsRequest.FromString(request).content.token_ids == [1, 5]
        with refusal(InvalidArgument, "content.token_ids"):
            service.channel.unary_unary("/kvplane.v1.Allocation/AllocateSlots")(request)

    def test_a_count_beyond_32_bits_is_refused_and_not_truncated(self, service, unchanged):
        request = pb.AllocateSlotsRequest(header=HEADER, request_id="a", content={"token_ids": [2**28]})
        raw = request.SerializeToString() + b"\x30" + varint(2**32)
        assert pb.AllocateSlotsRequest.FromString(raw).max_new_tokens == 0
        with refusal(InvalidArgument, "max_new_tokens"):
            service.channel.unary_unary("/kvplane.v1.Allocation/AllocateSlots")(raw)

    def test_the_largest_token_is_accepted(self, service):
        request = pb.AllocateSlotsRequest(header=HEADER, request_id="a", content={"token_ids": [10_000_000] * 3})
        assert service.allocation.AllocateSlots(request).granted_tokens == 3


def varint(value: int) -> bytes:
    low = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([part | 0x80 for part in low[:-1]] + [low[-1]])


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def test_unhandled_exceptions_end_the_call_with_internal(service, monkeypatch, caplog):
    def breaks(_):
        raise ZeroDivisionError("a bug")

    host = service.app.registry.get("r").host
    monkeypatch.setattr(host.replica, "apply", breaks)
    with refusal(InternalError) as caught:
        commit(service)
    assert "ZeroDivisionError" in caught[0].message
    assert "a bug" in caplog.text
    monkeypatch.undo()
    with refusal(InternalError):
        commit(service)
    assert service.state() == "IDLE"


def test_calls_that_one_client_sends_at_once_are_all_answered(service):
    calls = [service.admin.Status.future(admin_pb2.StatusRequest()) for _ in range(400)]
    assert all(call.result(WAIT_S).replicas for call in calls)


def test_a_snapshot_names_a_violated_invariant(service):
    core = service.app.registry.get("r").host.replica

    def add_references(count):
        """To the core itself: the snapshot is read from a copy of a compiled one, which is not what is checked."""
        changed = specification_of(core)
        changed.coordinator.pool.references[3] += count
        core.adopt(changed)

    service.in_loop(lambda: add_references(1))
    with refusal(InternalError) as caught:
        service.digest()
    assert "block 3" in caught[0].message
    service.in_loop(lambda: add_references(-1))
    assert service.digest()


def test_a_snapshot_is_read_and_encoded_on_a_thread_of_its_own(service, monkeypatch):
    names = list[str]()
    for name in ("take_snapshot", "encode_snapshot"):
        monkeypatch.setattr(admin, name, on_thread(getattr(admin, name), names))
    service.digest()
    assert names == ["kvplane snapshots"] * 2


def on_thread(real, names):
    def call(*given):
        names.append(threading.current_thread().name)
        return real(*given)

    return call


def test_a_snapshot_shows_the_state(service):
    allocate(service)
    commit(service)
    whole = service.admin.Snapshot(admin_pb2.SnapshotRequest(replica="r"))
    assert whole.num_free_blocks == len(whole.free_blocks) == 34
    assert whole.distinct_keys == len(whole.keys) == 4
    assert [key.tentative for key in whole.keys] == [False] * 4
    assert [(one.request_id, one.num_tokens, one.running) for one in whole.requests] == [("a", 40, True)]
    assert [len(table.block_ids) for table in whole.requests[0].tables] == [3, 3]
    assert whole.usage == pytest.approx(6 / 40)
    summary = service.admin.Snapshot(admin_pb2.SnapshotRequest(replica="r", summary=True))
    assert (summary.digest, summary.num_free_blocks) == (whole.digest, 34)
    assert summary.ByteSize() < 120  # no lists
