"""Replicas of another owner over the wire: they cannot be used, listed, explained, followed or probed."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from kvplane.base.errors import AlreadyExists, NotFound, PermissionDenied, StaleEpoch
from kvplane.rpc.status import DETAILS_KEY
from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2, plan_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.scopes import METHODS
from tests.service.guarded import OWNERS, Caller, Guard, guarded
from tests.service.rig import NONCES, SPEC, Stream, column, error_of, refusal, running

PROMPT = list(range(100, 140))
FILES = (admin_pb2, allocation_pb2, events_pb2, plan_pb2)
CREATES = "kvplane.v1.Allocation/RegisterReplica"
NAMES_NONE = {
    "kvplane.v1.Allocation/ListReplicas", "kvplane.v1.Admin/Status", "kvplane.v1.Admin/Drain",
    "kvplane.v1.Workers/WatchPeers",
}  # fmt: skip
BY_NAME = sorted(name for name in set(METHODS) - NAMES_NONE - {CREATES} if name.startswith("kvplane."))


@pytest.fixture
def world(tmp_path):
    """`acme` has a replica "r" with a running request; `rival` may call everything, of its own."""
    owners = {**OWNERS, "rival": {**OWNERS["rival"], "scopes": ["allocate", "read", "events", "worker", "admin"]}}
    with guarded(tmp_path) as world:
        world.guard.write_owners(owners)
        world.acme.register("r")
        world.acme.allocation.AllocateSlots(
            pb.AllocateSlotsRequest(header={"replica": "r"}, request_id="a", content={"token_ids": PROMPT})
        )
        yield world


def digest(world, name: str = "r") -> str:
    return world.operator.digest(name)


def request_of(method: str, replica: str) -> bytes:
    """A request that names a replica, and little else."""
    service, _, name = method.rpartition("/")
    services = {one.full_name: one for file in FILES for one in file.DESCRIPTOR.services_by_name.values()}
    request: Message = GetMessageClass(services[service].methods_by_name[name].input_type)()
    if name == "Session":
        request = pb.SessionRequest(open={"replica": replica, "nonce": 1})
    elif "header" in request.DESCRIPTOR.fields_by_name:
        request = type(request)(header={"replica": replica})
    else:
        request = type(request)(replica=replica)
    return request.SerializeToString()


def refused_with(caller: Caller, method: str, replica: str) -> status_pb2.Status:
    """Every word of a refusal."""
    method_of: Any = caller.channel.stream_stream(f"/{method}")
    call = method_of(iter([request_of(method, replica)]), timeout=10)
    with pytest.raises(grpc.RpcError):
        next(call)
    details = next(value for key, value in call.trailing_metadata() if key == DETAILS_KEY)
    return status_pb2.Status.FromString(details)


@pytest.mark.parametrize("method", BY_NAME)
def test_a_replica_of_another_owner_is_answered_like_an_unknown_one(world, method):
    before = digest(world)
    theirs, unknown = (refused_with(world.rival, method, name) for name in ("r", "n"))
    assert theirs.code == grpc.StatusCode.NOT_FOUND.value[0]
    nothing = unknown.SerializeToString().replace(b"'n'", b"'r'")
    assert theirs.SerializeToString() == nothing
    assert digest(world) == before


def test_lists_and_counts_include_only_own_replicas(world):
    world.rival.register("rival/x")
    callers = (world.acme, world.rival, world.operator)
    lists = [caller.allocation.ListReplicas(pb.ListReplicasRequest()).replicas for caller in callers]
    assert [[one.replica for one in listed] for listed in lists] == [["r"], ["rival/x"], ["r", "rival/x"]]
    assert [caller.admin.Status(admin_pb2.StatusRequest()).replicas for caller in callers] == [1, 1, 2]


def test_pages_do_not_count_hidden_replicas(world):
    for name in ("rival/a", "rival/z"):
        world.rival.register(name)
    page = world.rival.allocation.ListReplicas(pb.ListReplicasRequest(page_size=1))
    assert [one.replica for one in page.replicas] == ["rival/a"]
    page = world.rival.allocation.ListReplicas(pb.ListReplicasRequest(page_size=1, page_token=page.next_page_token))
    assert [one.replica for one in page.replicas] == ["rival/z"]
    assert page.next_page_token == ""


def test_registering_a_name_of_another_owner_reveals_nothing(world):
    texts = []
    for name in ("r", "s"):
        with refusal(PermissionDenied, "replica") as caught:
            world.rival.register(name)
        texts.append(str(caught[0]).replace(repr(name), "NAME"))
    assert texts[0] == texts[1]


def test_reassigned_names_do_not_expose_old_replicas(world):
    world.guard.write_owners({**OWNERS, "acme": {}, "rival": {"replicas": ["r"]}})
    with refusal(NotFound):
        world.rival.describe("r")
    with refusal(AlreadyExists) as caught:
        world.rival.register("r")
    assert caught[0].message == "a replica r already exists", "nothing of what it is"
    with refusal(NotFound):
        world.acme.describe("r")
    assert world.operator.describe("r").state == pb.REPLICA_STATE_IDLE


def test_the_same_tokens_hit_nothing_of_another_owner(world):
    """What one owner publishes, the other neither reads nor can detect."""
    world.acme.allocation.Free(pb.FreeRequest(header={"replica": "r"}, request_id="a"))
    world.rival.register("rival/x")
    look = pb.FindCacheHitRequest(replica="rival/x", content={"token_ids": PROMPT})
    assert (
        world.acme.allocation.FindCacheHit(
            pb.FindCacheHitRequest(replica="r", content={"token_ids": PROMPT})
        ).hit_tokens
        == 32
    )
    assert world.rival.allocation.FindCacheHit(look).hit_tokens == 0


def test_events_of_an_owner_are_not_sent_to_other_owners(world):
    """The rival registers pages under the very hashes of the victim's next prompt, in its own replica and domain."""
    secret = list(range(500, 540))
    world.rival.register("rival/x")
    world.rival.allocation.AllocateSlots(
        pb.AllocateSlotsRequest(header={"replica": "rival/x"}, request_id="p", content={"token_ids": secret})
    )
    world.rival.allocation.Free(pb.FreeRequest(header={"replica": "rival/x"}, request_id="p"))
    for domain in ("gold", "acme-1", "strange"):
        content = {"token_ids": secret, "domain": domain}
        with refusal(PermissionDenied, "content.domain"):
            world.rival.allocation.AllocateSlots(
                pb.AllocateSlotsRequest(header={"replica": "rival/x"}, request_id="q", content=content)
            )
    found = world.acme.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", content={"token_ids": secret}))
    assert found.hit_tokens == 0


@pytest.mark.parametrize("domain", ["", "gold", "acme-7"])
def test_own_domains_are_usable_and_isolated(world, domain):
    def allocate(name: str, where: str) -> int:
        content = {"token_ids": PROMPT, "domain": where}
        request = pb.AllocateSlotsRequest(header={"replica": "r"}, request_id=name, content=content)
        return world.acme.allocation.AllocateSlots(request).hit_tokens

    allocate("b", domain)
    world.acme.allocation.CommitBlocks(pb.CommitBlocksRequest(header={"replica": "r"}))
    assert allocate("c", domain) == 32
    other = "acme-other"
    assert allocate("d", other) == 0


def test_domains_of_other_owners_are_denied_in_every_call(world):
    content = {"token_ids": PROMPT, "domain": "platinum"}
    before = digest(world)
    with refusal(PermissionDenied, "content.domain"):
        world.acme.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", content=content))
    with refusal(PermissionDenied, "content.domain"):
        world.acme.admin.Explain(admin_pb2.ExplainRequest(replica="r", content=content))
    with refusal(PermissionDenied, "content.domain"):
        world.acme.allocation.AllocateSlots(
            pb.AllocateSlotsRequest(header={"replica": "r"}, request_id="b", content=content)
        )
    assert digest(world) == before


def test_a_step_with_a_domain_of_another_owner_is_denied(world):
    stream = world.acme.open("r")
    before = digest(world)
    rows = {"slot": column(0, 1), "num_tokens": column(1, 1), "tokens": column(5, 6)}
    for domains in (["", "platinum"], ["platinum", ""]):
        error = stream.refused({"news": {**rows, "domain": domains}, "admit": {"slot": column(0, 1)}})
        assert (error.reason, error.field) == ("PERMISSION_DENIED", "parts[0].news.domain")
    assert digest(world) == before
    stream.step({"news": {**rows, "domain": ["", "gold"]}, "admit": {"slot": column(0, 1)}})
    stream.close()


def test_the_empty_domain_can_be_denied(tmp_path):
    guard = Guard(tmp_path, {"acme": {"domains": ["gold"]}})
    with running(guard.config()) as service:
        acme = Caller(service, "token-acme")
        acme.register("acme/r")
        stream = acme.open("acme/r")
        news = {"slot": column(0), "num_tokens": column(1), "tokens": column(5)}
        assert stream.refused({"news": news}).reason == "PERMISSION_DENIED"
        stream.step({"news": {**news, "domain": ["gold"]}})
        stream.close()


def test_a_nonce_of_another_owner_neither_opens_nor_ends_a_session(world):
    victim = world.acme.open("r")
    nonce = next(NONCES) - 1  # the victim's
    thief = Stream(world.rival.channel)
    thief.send(open={"replica": "r", "nonce": nonce, "epoch": victim.opened.epoch, "life_nonce": victim.nonce})
    assert isinstance(thief.end(), NotFound)
    thief = Stream(world.rival.channel)
    thief.send(step={"epoch": victim.opened.epoch, "seq": 1, "parts": [{}]})
    assert thief.end() is not None
    assert victim.step().WhichOneof("kind") == "result"
    assert victim.close().WhichOneof("kind") == "closed"


def test_the_owner_itself_cannot_use_a_nonce_twice(world):
    victim = world.acme.open("r")
    again = Stream(world.acme.channel)
    again.send(open={"replica": "r", "nonce": next(NONCES) - 1})
    assert again.end() is not None
    assert victim.step().WhichOneof("kind") == "result"


def test_a_forged_epoch_is_refused_and_another_s_cannot_be_raised(world):
    epoch = world.acme.describe("r").epoch
    worker = {"rank": 0, "worker_id": 1, "address": "unix:/x", "pid": 1, "device": "cpu", "owner_epoch": 1 << 23}
    register = world.rival.channel.unary_unary("/kvplane.v1.Workers/RegisterWorker")
    with refusal(NotFound):
        register(plan_pb2.RegisterWorkerRequest(replica="r", worker=worker).SerializeToString())
    with pytest.raises(grpc.RpcError) as raised:
        world.acme.allocation.Free(pb.FreeRequest(header={"replica": "r", "epoch": epoch + 1}, request_id="a"))
    assert error_of(raised.value).reason == "STALE_EPOCH"
    victim = world.acme.open("r")
    assert victim.opened.epoch == epoch + 1, "the rival raised nothing"
    victim.send(step={"epoch": epoch + 2, "seq": 1, "parts": [{}]})
    assert isinstance(victim.end(), StaleEpoch)


def test_a_subscriber_of_one_s_own_replica_sees_nothing_of_others(world):
    world.rival.register("rival/x")
    followed = world.rival.events.Subscribe(events_pb2.SubscribeRequest(replica="rival/x", after_seq=0))
    world.acme.allocation.Free(pb.FreeRequest(header={"replica": "r"}, request_id="a"))
    content = {"token_ids": [7] * 20}
    header = {"replica": "rival/x"}
    world.rival.allocation.AllocateSlots(pb.AllocateSlotsRequest(header=header, request_id="b", content=content))
    world.rival.allocation.CommitBlocks(pb.CommitBlocksRequest(header=header))
    batch = next(iter(followed))
    hashes = [digest for event in batch.events for digest in event.hashes]
    assert len(set(hashes)) == 1, "the one full block of its own"
    followed.cancel()


def test_room_errors_do_not_reveal_usage_of_others(tmp_path):
    with guarded(tmp_path, max_total_blocks=60) as world:
        world.acme.register("r")
        with pytest.raises(grpc.RpcError) as raised:
            world.rival.register("rival/x", SPEC)
    error = error_of(raised.value)
    assert error.reason == "LIMIT_EXCEEDED"
    assert "41" in str(error), "what was asked for"
    assert "82" not in str(error), "what there is together"


def test_ownership_survives_a_restart(tmp_path):
    store = f"sqlite:{tmp_path / 'store'}"
    with guarded(tmp_path, store=store) as world:
        world.acme.register("acme/r")
    with guarded(tmp_path, store=store) as world:
        assert world.acme.describe("acme/r").replica == "acme/r"
        moved = {"acme": {"replicas": ["x"]}, "rival": {"replicas": ["acme/*"]}}
        world.guard.write_owners({**OWNERS, **moved})
        with refusal(NotFound):
            world.rival.describe("acme/r")
        assert world.operator.describe("acme/r").replica == "acme/r"


def test_a_replica_registered_without_owners_belongs_to_the_owner_of_its_name(tmp_path):
    store = f"sqlite:{tmp_path / 'store'}"
    guard = Guard(tmp_path)
    with running(guard.config(store=store, auth_owners="", auth_tokens="")) as service:
        service.register("acme/r")
    with guarded(tmp_path, store=store) as world:
        assert world.acme.describe("acme/r").replica == "acme/r"
        with refusal(NotFound):
            world.rival.describe("acme/r")
