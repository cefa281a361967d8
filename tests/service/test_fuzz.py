"""Mutations of valid messages: whatever arrives is answered or refused by name, and a refusal changes nothing.

Fields get values at and beyond their bounds, go missing, are doubled; bytes are flipped and cut. No call may end with
INTERNAL or UNKNOWN, and the snapshot after it, which proves the invariants, must have the digest of before when the
call was refused.
"""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.v1 import admin_pb2, events_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.replica_pb2 import GroupSpec, Layer, LayerSource, ModelSource, ReplicaSpec
from kvplane.v1.step_pb2 import ExtraKeys
from kvplane_service.config import Config
from tests.service.mutations import mutated
from tests.service.rig import SPEC, Stream, column, running

EXAMPLES = 150
BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
PROMPT = list(range(40))
KEYS = ExtraKeys(lora_name="l", lora_path="p", salt="s", multimodal=[{"identifier": "i", "offset": 1, "length": 20}])

HEADER = pb.MutationHeader(replica="r", epoch=1, op_id="op", executed_through=1)
FORMAT = {
    "kind": "GROUP_KIND_SLIDING_WINDOW",
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": "bfloat16",
    "window": 64,
}
STATE = {
    "kind": "GROUP_KIND_MAMBA",
    "block_size": 16,
    "mamba_mode": "MAMBA_MODE_ALIGN",
    "states": [{"shape": [16, 64], "dtype": "bfloat16"}],
    "page_size_padded": 8192,
}
LAYERS = LayerSource(
    layers=[
        Layer(name="a", format=FORMAT),
        Layer(name="b", format=STATE),
        Layer(name="c", format={**FORMAT, "kind": "GROUP_KIND_FULL_ATTENTION", "window": 0, "is_draft": True}),
        Layer(name="d", shares_with="c"),
    ],
    num_blocks=500,
    max_model_len=512,
    watermark=0.1,
    stages=[{"layer_names": ["a", "b"]}, {"layer_names": ["c"]}],
)

# States next to attention, hits inside blocks, drafts; SPEC has windows.
STATES = ReplicaSpec(
    groups=[
        GroupSpec(
            kind="GROUP_KIND_MAMBA", block_size=16, mamba_mode="MAMBA_MODE_ALIGN", speculative_blocks=1, lookup_class=1
        ),
        GroupSpec(kind="GROUP_KIND_FULL_ATTENTION", block_size=16),
    ],
    num_blocks=41,
    max_model_len=1024,
    hash_block_size=8,
    scheduler_block_size=16,
    max_in_flight_tokens=256,
    partial_hits=True,
    align={"block_size": 16, "chunk_limit": 4096, "stop_at_tail": True},
)

# method -> valid requests, for a replica "r" at step 2 with a request "a" running and "b" waiting
VALID: dict[str, list[Message]] = {
    "RegisterReplica": [
        pb.RegisterReplicaRequest(replica="s", spec=SPEC, num_ranks=4, namespace_digest=b"n"),
        pb.RegisterReplicaRequest(
            replica="s", model=ModelSource(model="gpt-oss-20b", tensor_parallel=4, num_blocks=3000, watermark=0.1)
        ),
        pb.RegisterReplicaRequest(replica="s", layers=LAYERS),
    ],
    "DeregisterReplica": [pb.DeregisterReplicaRequest(replica="r", epoch=1)],
    "DescribeReplica": [pb.DescribeReplicaRequest(replica="r")],
    "ListReplicas": [pb.ListReplicasRequest(page_size=10, page_token="after:a")],
    "FindCacheHit": [
        pb.FindCacheHitRequest(
            replica="r",
            content={"token_ids": PROMPT, "extra_keys": KEYS, "domain": "d", "max_tokens": 100},
            with_blocks=True,
        ),
        pb.FindCacheHitRequest(replica="r", content={"hashes": [b"h" * 32] * 2, "num_tokens": 40}),
        pb.FindCacheHitRequest(replica="r", request_id="a", with_blocks=True),
    ],
    "AllocateSlots": [
        pb.AllocateSlotsRequest(
            header=HEADER,
            request_id="new",
            content={"token_ids": PROMPT, "extra_keys": KEYS, "domain": "d", "skip_reading": True, "max_tokens": 100},
            max_new_tokens=20,
            external_tokens=0,
            expected_hit_tokens=0,
            watermark="WATERMARK_USE_ALWAYS",
            reserved_blocks=1,
            full_fit=True,
            encoder_tokens=0,
        ),
        pb.AllocateSlotsRequest(
            header=HEADER,
            request_id="a",
            computed_tokens=40,
            appended={"token_ids": [1, 2, 3]},
            extra_tokens=-1,
            lookahead_tokens=2,
            in_flight_tokens=0,
            victims=["b"],
            unaligned=True,
        ),
        pb.AllocateSlotsRequest(header=HEADER, request_id="hashed", content={"hashes": [b"h" * 32], "num_tokens": 20}),
    ],
    "CommitBlocks": [
        pb.CommitBlocksRequest(
            header=HEADER, request_id="a", computed_tokens=40, appended={"token_ids": PROMPT}, commit_tokens=48
        )
    ],
    "Free": [pb.FreeRequest(header=HEADER, request_id="a", end="END_KIND_PREEMPTED", fence_seq=1)],
    "EvictBlocks": [pb.EvictBlocksRequest(header=HEADER, block_ids=[1, 2, 40])],
    "ResetPrefixCache": [pb.ResetPrefixCacheRequest(header=HEADER)],
    "Snapshot": [admin_pb2.SnapshotRequest(replica="r", summary=True)],
    "Subscribe": [events_pb2.SubscribeRequest(replica="r", after_seq=0)],
}
SERVICES = {"Snapshot": "Admin", "Subscribe": "Events"}
# The same on STATES, where more can go wrong: drafts, a load of external tokens under way, hits inside blocks.
VALID_ON_STATES: dict[str, list[Message]] = {
    "AllocateSlots": [
        pb.AllocateSlotsRequest(
            header=HEADER,
            request_id="new",
            content={"token_ids": [*PROMPT[:30], *range(500, 540)]},
            external_tokens=16,
            delay_caching=True,
        ),
        pb.AllocateSlotsRequest(
            header=HEADER,
            request_id="a",
            appended={"token_ids": [1]},
            extra_tokens=1,
            lookahead_tokens=1,
            in_flight_tokens=0,
        ),
    ],
    "CommitBlocks": VALID["CommitBlocks"],
    "FindCacheHit": VALID["FindCacheHit"],
    "Free": VALID["Free"],
}
CASES = [(method, SPEC, requests) for method, requests in VALID.items()]
CASES += [(method, STATES, requests) for method, requests in VALID_ON_STATES.items()]
NAMES = [f"{method}{' on states' if spec is STATES else ''}" for method, spec, _ in CASES]

OPEN = pb.SessionRequest(
    open={"replica": "r", "nonce": 7, "client": "c", "with_events": True, "busy_blocks": column(30), "owner_epoch": 1}
)
STEP_ONE = pb.SessionRequest(
    step={
        "epoch": 2,
        "seq": 1,
        "parts": [
            {
                "news": {"slot": column(0, 1), "num_tokens": column(40, 60), "tokens": column(*range(100))},
                "admit": {"slot": column(0, 1)},
            }
        ],
    }
)
STEP = pb.SessionRequest(
    step={
        "epoch": 2,
        "seq": 2,
        "parts": [
            {
                "facts": {
                    "slot": column(0, 1),
                    "computed": column(40, -1),
                    "appended": column(1, 0),
                    "tokens": column(9),
                    "commit": column(32, -1),
                    "end": column(0, 1),
                    "fence": column(0, 1, size=8),
                },
                "cache": {"evicted": column(3), "failed_steps": column(1, size=8), "loads_over": column(30)},
                "news": {
                    "slot": column(1, 2),
                    "num_tokens": column(20, 30),
                    "num_hashes": column(1, 1),
                    "hashes": b"h" * 64,
                    "request_id": ["x", "y"],
                    "domain": ["", "d"],
                    "skip_reading": column(0, 1),
                    "max_tokens": column(100, 0),
                },
                "run": {"slot": column(0), "extra": column(-1), "cap": column(5), "victims": column(0)},
                "admit": {
                    "slot": column(1, 2),
                    "external": column(0, 1),
                    "expected_hit": column(-1, 0),
                    "watermark": column(1, 2),
                    "flags": column(1, 4),
                    "max_running": 3,
                    "on_refusal": "ON_REFUSAL_SKIP",
                },
                "peek": {"slot": column(0, 2), "with_blocks": True},
                "budget": {"tokens": 100, "input": 120, "overhead": 1},
                "with_tables": True,
            }
        ],
    }
)
STEP_ON_STATES = pb.SessionRequest(
    step={
        "epoch": 2,
        "seq": 2,
        "executed_through": 1,
        "parts": [
            {
                "facts": {"slot": column(0, 1), "appended": column(1, 0), "tokens": column(9), "end": column(0, 1)},
                "news": {
                    "slot": column(1, 2),
                    "num_tokens": column(30, 70),
                    "tokens": column(*range(30), *range(70)),
                },
                "run": {
                    "slot": column(0),
                    "extra": column(1),
                    "lookahead": column(1),
                    "flags": column(1),
                    "victims": column(0),
                },
                "admit": {
                    "slot": column(1, 2),
                    "external": column(0, 16),
                    "flags": column(1, 3),
                    "lookahead": column(1, 1),
                    "on_refusal": "ON_REFUSAL_SKIP",
                },
                "peek": {"slot": column(0, 2), "with_blocks": True},
            }
        ],
    }
)
SESSIONS = {"open": (SPEC, OPEN), "step": (SPEC, STEP), "step on states": (STATES, STEP_ON_STATES)}


@pytest.fixture(scope="module")
def service():
    limits = Config(listen="127.0.0.1:0", max_blocks=5000, max_total_blocks=20000, max_message_bytes=1 << 20)
    with running(limits) as service:
        yield service


def forget_replicas(service) -> None:
    def forget() -> None:
        for entry in service.app.registry:
            service.app.registry.remove(entry.host.name)

    service.in_loop(forget)


def prepare(service, spec=SPEC) -> str:
    """A replica "r" as the valid requests expect it; its digest."""
    forget_replicas(service)
    service.register(spec=spec)
    header = pb.MutationHeader(replica="r", more=True)
    allocate = service.allocation.AllocateSlots
    allocate(pb.AllocateSlotsRequest(header=header, request_id="a", content={"token_ids": PROMPT}))
    waiting = {"token_ids": list(range(1000, 1900))}
    allocate(pb.AllocateSlotsRequest(header={"replica": "r"}, request_id="b", content=waiting))
    service.allocation.CommitBlocks(pb.CommitBlocksRequest(header={"replica": "r"}))
    return service.digest()


def call(service, method: str, raw: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends."""
    path = f"/kvplane.v1.{SERVICES.get(method, 'Allocation')}/{method}"
    try:
        if method == "Subscribe":
            stream = service.channel.unary_stream(path)(raw, timeout=0.05)
            next(stream)
            stream.cancel()
        else:
            service.channel.unary_unary(path)(raw)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(("method", "spec", "requests"), CASES, ids=NAMES)
def test_a_valid_call_is_answered(service, method, spec, requests):
    for request in requests:
        prepare(service, spec)
        assert call(service, method, request.SerializeToString()) is grpc.StatusCode.OK, request


@pytest.mark.parametrize(("method", "spec", "requests"), CASES, ids=NAMES)
def test_a_mutated_call_is_answered_or_refused_and_a_refusal_changes_nothing(service, method, spec, requests):
    digest = prepare(service, spec)
    outcomes = set()

    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(requests).flatmap(mutated))
    def check(raw):
        nonlocal digest
        code = call(service, method, raw)
        outcomes.add(code)
        assert code not in BUGS
        if code is grpc.StatusCode.OK and method not in ("DescribeReplica", "ListReplicas", "FindCacheHit", "Snapshot"):
            if method in ("RegisterReplica", "DeregisterReplica") or service.digest() != digest:
                digest = prepare(service, spec)
        else:
            assert service.digest() == digest

    check()
    assert len(outcomes) > 1, "the mutations are too tame"


@pytest.mark.parametrize(("spec", "message"), SESSIONS.values(), ids=SESSIONS)
def test_a_mutated_session_is_answered_or_refused_and_a_refusal_changes_nothing(service, spec, message):
    outcomes = set()

    @settings(max_examples=EXAMPLES)
    @given(mutated(message))
    def check(raw):
        stream, digest = ready_stream(service, spec, behind_a_step=message is not OPEN)
        stream.send_raw(raw)
        stream.finish()
        kind, code = last_answer(stream)
        outcomes.add(kind or code)
        assert code not in BUGS
        assert service.digest() == digest or kind in ("opened", "result", "closed")

    check()
    assert len(outcomes) > 2, "the mutations are too tame"


def ready_stream(service, spec: ReplicaSpec, behind_a_step: bool) -> tuple[Stream, str]:
    """A stream on a new replica, not opened yet or where a second step is valid; and the replica's digest."""
    forget_replicas(service)
    service.register(spec=spec)
    stream = Stream(service.channel)
    if behind_a_step:
        for message in (OPEN, STEP_ONE):
            stream.send_raw(message.SerializeToString())
            assert stream.receive().WhichOneof("kind") in ("opened", "result")
    return stream, service.digest()


def last_answer(stream: Stream) -> tuple[str, grpc.StatusCode]:
    """The last answer of the service, and the status of the stream."""
    kind = ""
    try:
        while True:
            kind = stream.receive().WhichOneof("kind") or ""
    except StopIteration:
        return kind, grpc.StatusCode.OK
    except grpc.RpcError as error:
        return kind, error.code()


@pytest.mark.parametrize(("spec", "step"), [SESSIONS["step"], SESSIONS["step on states"]], ids=["step", "on states"])
def test_the_valid_session_is_answered(service, spec, step):
    stream, _ = ready_stream(service, spec, behind_a_step=True)
    stream.send_raw(step.SerializeToString())
    stream.finish()
    assert last_answer(stream) == ("result", grpc.StatusCode.OK)
