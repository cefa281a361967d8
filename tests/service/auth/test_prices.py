"""What calls count of their owner's bytes per second: the work inside them, before it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvplane
from kvplane.base.errors import InvalidArgument, QuotaExceeded
from kvplane.base.step import Step
from kvplane.session.rows import AdmitRow, NewsRow, PeekRow, part_of
from kvplane.v1 import admin_pb2, front_ends_pb2, routing_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.quotas import Quotas
from kvplane_service.explain import service as explain_service
from kvplane_service.rpc import prices
from kvplane_service.rpc.prices import (
    BLOCK_BYTES,
    BYTE_NS,
    CALL_BYTES,
    DECISION_BYTES,
    HASH_BYTES,
    TOKEN_BYTES,
    price_of,
    reserve,
)
from kvplane_service.unary.hashing import ContentHasher
from tests.service.guarded import Caller, Guard
from tests.service.rig import SPEC, refusal, running, until

RATE = 10_000_000
SECOND = 1_000_000_000
TOKENS = list(range(100)) * 9  # a byte each on the wire


class Clock:
    """Stands still."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Counted:
    """An owner whose calls are counted while no time passes."""

    def __init__(self, folder: Path, caller: Caller, clock: Clock, quotas: list[Quotas]) -> None:
        self.folder, self.caller, self.clock, self.quotas = folder, caller, clock, quotas

    def cost(self, call: Callable[[], object]) -> int:
        """Bytes that a call counts."""
        self.clock.now_ns += 100 * SECOND
        self.caller.describe("acme/r")  # fills the allowance
        before = self.left()
        call()
        return before - self.left()

    def left(self) -> int:
        return round(self.quotas[-1]._usage["acme"].bytes.left)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    made: list[Quotas] = []
    begin = Quotas.__init__

    def noted(self: Quotas, clock: Callable[[], int]) -> None:
        begin(self, clock)
        made.append(self)

    monkeypatch.setattr(Quotas, "__init__", noted)
    clock = Clock()
    guard = Guard(tmp_path, {"acme": {"limits": {"bytes_per_second": RATE}, "scopes": ["read", "allocate", "admin"]}})
    with running(guard.config(), clock) as service:
        caller = Caller(service, "token-acme")
        caller.register("acme/r")
        yield Counted(tmp_path, caller, clock, made)


def allocate(counted: Counted, name: str, **fields: Any) -> pb.AllocateSlotsResponse:
    header = pb.MutationHeader(replica="acme/r")
    return counted.caller.allocation.AllocateSlots(pb.AllocateSlotsRequest(header=header, request_id=name, **fields))


def look_up(counted: Counted, **fields: Any) -> pb.FindCacheHitResponse:
    return counted.caller.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="acme/r", **fields))


def test_tokens_count_four_bytes_and_hashes_their_size():
    content = {"token_ids": [1] * 1000}
    for request, items in (
        (pb.FindCacheHitRequest(content=content), 1000 * TOKEN_BYTES),
        (admin_pb2.ExplainRequest(content=content), 1000 * TOKEN_BYTES),
        (pb.AllocateSlotsRequest(content=content, appended=content), 2000 * TOKEN_BYTES),
        (pb.CommitBlocksRequest(appended=content), 1000 * TOKEN_BYTES),
        (pb.FindCacheHitRequest(content={"hashes": [b""] * 500}), 500 * HASH_BYTES),
        (pb.EvictBlocksRequest(block_ids=[1] * 500), 500 * HASH_BYTES),
        (routing_pb2.ScoreRequest(prompt={"token_ids": [1] * 1000}), 1000 * TOKEN_BYTES),
        (front_ends_pb2.GetPodScoresRequest(prompt="x" * 1000), 1003),
        (pb.DescribeReplicaRequest(replica="r"), 3),
        (pb.RegisterReplicaRequest(replica="r" * 5000), 5003),
    ):
        assert price_of(request, request.ByteSize()) == CALL_BYTES + items, request
        if "token_ids" in str(request):
            assert reserve(request.ByteSize()) >= price_of(request, request.ByteSize())


def test_every_message_with_tokens_or_hashes_counts_them():
    """A field of a request that has them, under whatever name, is in the price."""
    for service in (pb.DESCRIPTOR.services_by_name["Allocation"], admin_pb2.DESCRIPTOR.services_by_name["Admin"],
                    routing_pb2.DESCRIPTOR.services_by_name["Routing"]):  # fmt: skip
        for method in service.methods:
            if method.client_streaming:
                continue
            for field in method.input_type.fields:
                inner = list(field.message_type.fields_by_name) if field.message_type else []
                if {"token_ids", "hashes"} & set(inner):
                    assert field.name in prices._COUNTED, f"{method.full_name}: {field.name}"


def test_tokens_of_a_byte_count_as_in_a_session(counted):
    content = {"token_ids": TOKENS}
    answer = []
    cost = counted.cost(lambda: answer.append(look_up(counted, content=content)))
    assert cost == CALL_BYTES + TOKEN_BYTES * len(TOKENS) + answer[0].ByteSize()


def test_what_tokens_can_count_is_reserved_before_they_are_hashed(counted, monkeypatch):
    """Other calls of the owner are refused meanwhile, and what was too much is given back."""
    left = []
    hash_all = ContentHasher.hash

    async def noted(self: ContentHasher, *arguments: Any, **more: Any) -> Any:
        left.append(counted.left())
        return await hash_all(self, *arguments, **more)

    monkeypatch.setattr(ContentHasher, "hash", noted)
    tokens = [2_000_000] * 900  # four bytes each
    cost = counted.cost(lambda: look_up(counted, content={"token_ids": tokens}))
    assert 0 < left[-1] - counted.left() < 200, "only the answer counts later"
    assert cost < CALL_BYTES + TOKEN_BYTES * len(tokens) + 200
    assert reserve(4 * len(tokens)) > 3 * TOKEN_BYTES * len(tokens)


def test_an_unparsed_request_keeps_others_of_its_owner_out(counted):
    """Its tokens may have a byte each: a message of a quarter of the allowance may use all of it."""
    raw = bytes([0xFF]) * (RATE // 4 + 1000)  # no request
    call = counted.caller.channel.unary_unary("/kvplane.v1.Allocation/FindCacheHit")
    counted.clock.now_ns += 100 * SECOND
    with pytest.raises(grpc.RpcError) as caught:
        call(raw)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with refusal(QuotaExceeded, "bytes_per_second"):
        counted.caller.describe("acme/r")


def test_look_ups_and_admissions_of_a_known_request_count_its_hashes(counted):
    """Their messages have some ten bytes."""
    allocate(counted, "running", content={"token_ids": TOKENS[:400]})
    allocate(counted, "waiting", content={"token_ids": list(range(1000, 1900))})
    hashes = counted.caller.app.registry.get("acme/r").host.replica.requests.hashes
    running_ones, waiting_ones = len(hashes(0)), len(hashes(1))
    assert (running_ones, waiting_ones) == (25, 56)
    rest = 2 * CALL_BYTES
    for name, num_hashes in (("running", running_ones), ("waiting", waiting_ones)):
        cost = counted.cost(lambda name=name: look_up(counted, request_id=name))
        assert HASH_BYTES * num_hashes <= cost - CALL_BYTES < HASH_BYTES * num_hashes + 200
    assert counted.cost(lambda: allocate(counted, "running")) < rest
    assert counted.cost(lambda: allocate(counted, "waiting")) >= CALL_BYTES + HASH_BYTES * waiting_ones


def test_a_step_counts_the_look_ups_that_its_few_bytes_ask_for(counted):
    host = counted.caller.app.registry.get("acme/r").host
    with (
        kvplane.connect(counted.caller.address, token="token-acme") as client,
        client.session("acme/r") as session,
    ):
        session.apply(part_of(NewsRow(0, tokens=TOKENS)))
        for part in (part_of(*[PeekRow(0)] * 1000), part_of(*[PeekRow(0)] * 1000, AdmitRow(0))):
            price = host.steps.effort(Step(1, 1, [part])) // BYTE_NS
            cost = counted.cost(lambda part=part: session.apply(part))
            assert price <= cost < price + 200  # of a heartbeat


def test_calls_that_read_a_whole_pool_or_log_count_it(counted):
    header = pb.MutationHeader(replica="acme/r")
    blocks = BLOCK_BYTES * SPEC.num_blocks
    reset = pb.ResetPrefixCacheRequest(header=header)
    assert counted.cost(lambda: counted.caller.allocation.ResetPrefixCache(reset)) >= CALL_BYTES + blocks
    evict = pb.EvictBlocksRequest(header=header, block_ids=[5])
    steps = counted.caller.app.registry.get("acme/r").host.steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(steps), "effort", lambda self, asked: 77_000 * BYTE_NS if asked.parts[0].cache.evicted == [5] else 0
        )
        assert counted.cost(lambda: counted.caller.allocation.EvictBlocks(evict)) >= CALL_BYTES + 77_000
    snapshot = admin_pb2.SnapshotRequest(replica="acme/r")
    answer: list[admin_pb2.SnapshotResponse] = []
    cost = counted.cost(lambda: answer.append(counted.caller.admin.Snapshot(snapshot)))
    assert cost >= CALL_BYTES + blocks + answer[0].ByteSize()
    for at in range(10):
        allocate(counted, f"x{at}", content={"token_ids": TOKENS[:20]})
    decisions = len(counted.caller.app.registry.get("acme/r").host.decisions)
    explain = admin_pb2.ExplainRequest(replica="acme/r", content={"token_ids": TOKENS[:20]})
    assert decisions > 10
    assert counted.cost(lambda: counted.caller.admin.Explain(explain)) >= CALL_BYTES + 2 * DECISION_BYTES * decisions


def test_a_prompt_that_is_explained_counts_each_hashing_with_the_keys_of_others(counted, monkeypatch):
    """A prompt is hashed again with the adapter or the salt of each other request that it may differ by."""
    for at in range(6):
        allocate(counted, f"x{at}", content={"token_ids": TOKENS[:20], "extra_keys": {"salt": f"salt-{at}"}})
    explain = admin_pb2.ExplainRequest(replica="acme/r", content={"token_ids": TOKENS[:800]})
    costs, log = list[int](), counted.caller.app.registry.get("acme/r").host.decisions
    until(lambda: not log._num_waiting)  # its size counts too
    for number in (1, 3, 5):
        monkeypatch.setattr(explain_service, "MAX_HASHED_AGAIN", number * 800)
        costs.append(counted.cost(lambda: counted.caller.admin.Explain(explain)))
    once = TOKEN_BYTES * 800
    assert [cost - costs[0] for cost in costs] == pytest.approx([0, 2 * once, 4 * once], abs=200)


def test_small_calls_are_limited_too(counted):
    """A call of a few bytes takes about half a millisecond."""
    counted.clock.now_ns += 100 * SECOND
    answered, most = 0, RATE // CALL_BYTES + 2
    with refusal(QuotaExceeded, "bytes_per_second"):
        while answered < most:
            counted.caller.describe("acme/r")
            answered += 1
    assert answered > most // 3, "answers count too"


def test_a_refused_call_keeps_what_its_tokens_cost(counted):
    def refused() -> None:
        with refusal(InvalidArgument, "content.token_ids"):
            look_up(counted, content={"token_ids": [1] * 40_000})

    assert counted.cost(refused) == CALL_BYTES + TOKEN_BYTES * 40_000
