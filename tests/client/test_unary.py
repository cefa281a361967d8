"""The blocking client against a whole service."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest

from kvplane.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    OpIdReused,
    OtherWriter,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec, KVSharingLayer, Layer, MambaSpec, SlidingWindowSpec
from kvplane.base.requests import Allocate, Appended, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.step import EventKind, ExtraKeys
from kvplane.blocking.client import Client, connect
from kvplane.rpc.channel import open_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.rows import AdmitRow, NewsRow, part_of
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from tests.client.mini_engine import HYBRID, spec_of

PROMPT = Content(token_ids=range(40))


@pytest.fixture
def client(world):
    return world.client


@pytest.fixture
def extra_replica(client):
    """The name of a replica that the test registers."""
    yield "extra/1"
    client.deregister_replica("extra/1")


# ---- replicas


def test_register_replica_is_idempotent(client, name):
    first = client.register_replica(name, HYBRID)
    assert client.register_replica(name, HYBRID) == first
    with pytest.raises(AlreadyExists, match="num_blocks"):
        client.register_replica(name, spec_of(*HYBRID.groups, num_blocks=41))


def test_register_a_model_of_the_catalogue(client, extra_replica):
    source = ModelSource(model="llama-3.1-70b", tensor_parallel=4, num_blocks=100, max_model_len=512)
    answer = client.register_replica(extra_replica, source, num_ranks=4)
    assert answer.spec.num_blocks == 100
    assert answer.bytes_per_block > 0
    assert client.describe_replica(extra_replica).num_ranks == 4


def test_an_unknown_model_is_refused(client):
    with pytest.raises(NotFound) as caught:
        client.register_replica("extra/1", ModelSource(model="llama-9", num_blocks=100))
    assert caught.value.field == "model.model"


def test_register_a_model_by_its_layers(client, extra_replica):
    full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16, window=128)
    state = MambaSpec(block_size=16, shapes=((8, 16),), dtypes=(DType.FLOAT32,), mode=MambaMode.ALIGN)
    layers = (
        Layer("full", full),
        Layer("window", window),
        Layer("state", state),
        KVSharingLayer("shared", shares_with="full"),
    )
    answer = client.register_replica(extra_replica, LayerSource(layers=layers, num_blocks=100, max_model_len=512))
    kinds = {group.kind for group in answer.spec.groups}
    assert len(kinds) == len(answer.spec.groups) == 3
    assert [list(group.layer_names) for group in answer.spec.groups]


def test_a_packed_layer_is_planned_by_its_format(client, extra_replica):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16, tokens_per_state=4)
    answer = client.register_replica(extra_replica, LayerSource(layers=(Layer("a", spec),), num_blocks=3000))
    assert answer.bytes_per_block == spec.page_bytes == 16 // 4 * 8 * 128 * 2 * 2


def test_describe_replica(client, name):
    client.allocate_slots(name, Allocate("r", PROMPT))
    description = client.describe_replica(name)
    assert (description.replica, description.state) == (name, pb.REPLICA_STATE_IDLE)
    assert description.running_requests == 1
    assert description.counters.admitted == 1
    assert [group.kind for group in description.spec.groups] == [
        pb_kind(GroupKind.FULL_ATTENTION),
        pb_kind(GroupKind.SLIDING_WINDOW),
    ]


def pb_kind(kind):
    return {GroupKind.FULL_ATTENTION: 1, GroupKind.SLIDING_WINDOW: 3}[kind]


def test_list_replicas_returns_all_pages(client, name):
    names = [f"many/{index}" for index in range(5)]
    for one in names:
        client.register_replica(one, spec_of(num_blocks=4))
    try:
        assert [one.replica for one in client.list_replicas(page_size=2)] == [*names, name]
    finally:
        for one in names:
            client.deregister_replica(one)


def test_deregister_replica_checks_the_epoch(client, extra_replica):
    client.register_replica(extra_replica, HYBRID)
    with pytest.raises(StaleEpoch):
        client.deregister_replica(extra_replica, epoch=99)
    client.deregister_replica(extra_replica)
    with pytest.raises(NotFound) as caught:
        client.describe_replica(extra_replica)
    assert caught.value.remedy
    client.register_replica(extra_replica, HYBRID)


# ---- requests


def test_a_request_from_lookup_to_hit(client, name):
    assert client.find_cache_hit(name, PROMPT).hit_tokens == 0
    first = client.allocate_slots(name, Allocate("a", PROMPT))
    assert (first.status, first.granted_tokens) == (pb.ALLOCATION_STATUS_GRANTED, 40)
    assert [len(group.block_ids) for group in first.block_table] == [3, 3]
    appended = client.commit_blocks(name, Commit("a", appended=Appended(token_ids=[7])))
    assert appended.num_hashes == 2
    assert client.allocate_slots(name, Allocate("a")).granted_tokens == 1
    client.free(name, "a")
    hit = client.find_cache_hit(name, PROMPT, with_blocks=True)
    assert hit.hit_tokens == 32
    assert [len(group.block_ids) for group in hit.blocks] == [2, 2]
    assert client.allocate_slots(name, Allocate("b", PROMPT)).hit_tokens == 32
    assert client.find_cache_hit(name, "b").num_tokens == 40


def test_content_sends_all_fields(client, name):
    content = Content(token_ids=range(40), extra_keys=ExtraKeys(salt="s"), domain="d", max_tokens=64)
    client.allocate_slots(name, Allocate("a", content))
    client.free(name, "a")
    client.commit_blocks(name, Commit())
    assert client.find_cache_hit(name, content).hit_tokens == 32
    assert client.find_cache_hit(name, PROMPT).hit_tokens == 0
    hashes = [bytes([index]) * 32 for index in range(2)]
    answer = client.allocate_slots(name, Allocate("b", Content(num_tokens=40, hashes=hashes)))
    assert (answer.num_hashes, answer.last_hash) == (2, hashes[-1])


def test_allocate_slots_respects_its_limits(client, name):
    wish = Allocate("a", PROMPT, max_new_tokens=16, lookahead_tokens=20)
    answer = client.allocate_slots(name, wish)
    assert answer.granted_tokens == 16
    assert len(answer.block_table[0].block_ids) == 3


def test_running_out_of_blocks_is_an_answer_and_victims_are_preempted(client, name):
    client.allocate_slots(name, Allocate("big", Content(token_ids=range(16 * 18))))
    refused = client.allocate_slots(name, Allocate("late", Content(token_ids=range(1000, 1200))))
    assert refused.status == pb.ALLOCATION_STATUS_REFUSED
    client.free(name, "big", Ending.PREEMPTED)
    assert client.allocate_slots(name, Allocate("late")).status == pb.ALLOCATION_STATUS_GRANTED


def test_a_held_request_can_be_released(client, name):
    free = client.describe_replica(name).free_blocks
    client.allocate_slots(name, Allocate("a", PROMPT))
    held = client.free(name, "a", Ending.HELD)
    assert held.result.free_blocks < free
    assert client.free(name, "a", Ending.RELEASED).result.free_blocks == free


def test_evict_blocks_and_reset_prefix_cache(client, name):
    blocks = client.allocate_slots(name, Allocate("a", PROMPT)).block_table[0].block_ids
    client.evict_blocks(name, [blocks[0]])
    assert client.find_cache_hit(name, PROMPT).hit_tokens == 0
    assert not client.reset_prefix_cache(name).done
    client.free(name, "a")
    assert client.reset_prefix_cache(name).done
    assert client.snapshot(name).distinct_keys == 0


def test_snapshot_checks_and_returns_the_state(client, name):
    client.allocate_slots(name, Allocate("a", PROMPT))
    whole, summary = client.snapshot(name), client.snapshot(name, summary=True)
    assert whole.digest == summary.digest
    assert [request.request_id for request in whole.requests] == ["a"]
    assert not summary.requests


def test_a_repeated_op_id_gets_the_stored_answer(client, name):
    first = client.allocate_slots(name, Allocate("a", PROMPT), At(op_id="one"))
    assert client.allocate_slots(name, Allocate("a", PROMPT), At(op_id="one")) == first
    with pytest.raises(OpIdReused):
        client.allocate_slots(name, Allocate("a", max_new_tokens=1), At(op_id="one"))


def test_calls_form_one_step_or_several(client, name):
    first = client.allocate_slots(name, Allocate("a", PROMPT), At(more=True))
    second = client.allocate_slots(name, Allocate("b", PROMPT))
    third = client.commit_blocks(name, Commit(), At(executed_through=1))
    assert (first.result.seq, second.result.seq, third.result.seq) == (1, 1, 2)


def test_an_open_session_refuses_unary_mutations(client, name):
    with client.session(name, client="test") as session:
        with pytest.raises(OtherWriter):
            client.allocate_slots(name, Allocate("a", PROMPT))
        assert session.apply(part_of(NewsRow(0, range(20)), AdmitRow(0))).seq == 1
        assert client.find_cache_hit(name, PROMPT).hit_tokens == 0
    with pytest.raises(StaleEpoch):
        client.allocate_slots(name, Allocate("a", PROMPT), At(epoch=1))


@pytest.mark.parametrize(
    "call",
    [
        lambda client, name: client.allocate_slots(name, Allocate("a", Content(token_ids=[2**32]))),
        lambda client, name: client.allocate_slots(name, Allocate("a", Content(token_ids=[-1]))),
        lambda client, name: client.evict_blocks(name, [10**6]),
        lambda client, name: client.evict_blocks(name, [2**40]),
        lambda client, name: client.find_cache_hit(name, Content()),
        lambda client, name: client.allocate_slots(name, Allocate("", PROMPT)),
        lambda client, name: client.allocate_slots(name, Allocate("a", PROMPT, max_new_tokens=-1)),
        lambda client, name: next(client.list_replicas(page_size=2000)),
        lambda client, name: client.register_replica("no spaces", HYBRID),
    ],
)
def test_invalid_arguments_are_refused_and_change_nothing(client, name, world, call):
    before = world.digest()
    with pytest.raises(InvalidArgument) as caught:
        call(client, name)
    assert caught.value.field
    assert world.digest() == before


def test_a_message_that_is_too_large_is_refused(world, name):
    with connect(world.service.address, max_message_bytes=1000) as small:
        with pytest.raises(LimitExceeded):
            small.find_cache_hit(name, Content(token_ids=range(70_000, 72_000)))
        with small.session(name) as session:
            with pytest.raises(LimitExceeded, match="the maximum is 1000"):
                session.apply(part_of(NewsRow(0, range(900)), AdmitRow(0)))
            assert session.apply(part_of(NewsRow(0, range(90)), AdmitRow(0))).seq == 1


# ---- events


def test_subscribe_from_the_beginning_and_from_now_on(client, name):
    events = client.subscribe(name, after_seq=0)
    client.allocate_slots(name, Allocate("a", PROMPT))
    client.commit_blocks(name, Commit())
    batch = next(events)
    assert [event.kind for event in batch.events] == [EventKind.STORED, EventKind.STORED]
    events.close()
    resumed = client.subscribe(name, after_seq=batch.seq)
    client.free(name, "a")
    client.reset_prefix_cache(name)
    client.commit_blocks(name, Commit())
    assert next(resumed).seq == batch.seq + 1
    resumed.close()


def test_subscribe_refuses_an_unknown_replica_and_a_future_position(client, name):
    with pytest.raises(NotFound):
        next(client.subscribe("unknown"))
    with pytest.raises(InvalidArgument):
        next(client.subscribe(name, after_seq=10**6))


# ---- when the service cannot be reached


def recording(attempts, pauses):
    return RetryPolicy(attempts, first_delay_s=0.001, sleep=pauses.append, jitter=lambda: 0.0)


def test_repeatable_calls_are_retried(tmp_path):
    pauses: list[float] = []
    with connect(f"unix:{tmp_path}/nothing", retry=recording(3, pauses)) as client:
        with pytest.raises(Unavailable):
            client.describe_replica("x")
        assert len(pauses) == 3
        with pytest.raises(Unavailable):
            client.deregister_replica("x")
        with pytest.raises(Unavailable):
            next(client.subscribe("x"))
        assert len(pauses) == 6


def test_a_retried_mutation_is_applied_once(world, name):
    class Lost(grpc.RpcError):
        """The answer was on its way back when the connection broke."""

        def code(self):
            return grpc.StatusCode.UNAVAILABLE

        def details(self):
            return "connection reset"

        def trailing_metadata(self):
            return ()

    class Losing:
        """A channel that loses the first answer."""

        def __init__(self, channel):
            self._channel = channel
            self.answers = []

        def __getattr__(self, attribute):
            return getattr(self._channel, attribute)

        def unary_unary(self, *args, **facts):
            method = self._channel.unary_unary(*args, **facts)

            def call(request, timeout, metadata):
                self.answers.append(method(request, timeout=timeout))
                if len(self.answers) == 1:
                    raise Lost
                return self.answers[-1]

            return call

    losing: Any = Losing(open_channel(world.service.address))
    with closing(Client(losing, retry=recording(1, []))) as client:
        answer = client.allocate_slots(name, Allocate("a", PROMPT))
    assert losing.answers == [answer, answer]
    assert (answer.status, answer.result.seq) == (pb.ALLOCATION_STATUS_GRANTED, 1)


def test_a_service_that_does_not_answer_exceeds_the_deadline(deaf):
    with connect(deaf, timeout_s=0.2) as client, pytest.raises(DeadlineExceeded):
        client.describe_replica("x")


@pytest.fixture
def deaf():
    """The address of a gRPC server with one worker, which is busy."""
    busy = threading.Event()

    class Deaf(grpc.GenericRpcHandler):
        def service(self, handler_call_details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: busy.wait(10) or b"")

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Deaf(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    busy.set()
    server.stop(None)


def test_a_closed_client_refuses_calls(world, name):
    client = connect(world.service.address)
    session = client.session(name, retry=RetryPolicy(attempts=1))
    client.close()
    for call in (lambda: client.describe_replica(name), lambda: next(client.subscribe(name))):
        with pytest.raises(FailedPrecondition, match="closed"):
            call()
    with pytest.raises(FailedPrecondition, match="closed"):
        session.apply(part_of())
    session.close()


def test_explain_a_prompt_and_a_request(world, name):
    with closing(Client(open_channel(world.service.address))) as client:
        client.allocate_slots(name, Allocate("explained", PROMPT))
        by_name = client.explain(name, "explained")
        assert admin_pb2.MissCause.Name(by_name.cause) == "MISS_CAUSE_NEVER_CACHED"
        assert client.explain(name, PROMPT).num_tokens == by_name.num_tokens
