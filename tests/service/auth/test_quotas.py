"""Limits of an owner: on how often and how much at once it calls, on its replicas and blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvplane.base.errors import InvalidArgument, QuotaExceeded
from kvplane.base.groups import ReplicaSpec
from kvplane.rpc.status import DETAILS_KEY
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.auth.owners import ANYONE, Owner, OwnerLimits
from kvplane_service.auth.quotas import READS_AT_ONCE, Quotas
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.replicas.host import new_replica
from kvplane_service.rpc import allocation
from kvplane_service.rpc.sources import Planned, plan_source
from kvplane_service.store.ownership import expire_all
from tests.service.guarded import Caller, Guard
from tests.service.rig import SPEC, Service, error_of, refusal, running, until
from tests.twins import weakened

SECOND = 1_000_000_000


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def owner(**limits: int) -> Owner:
    return Owner(name="acme", limits=OwnerLimits(**limits))


def test_rate_limit_allows_one_second_of_burst():
    clock = Clock()
    quotas, acme = Quotas(clock), owner(requests_per_second=3)
    for _ in range(3):
        quotas.enter(acme)
    with pytest.raises(QuotaExceeded) as caught:
        quotas.enter(acme)
    clock.now_ns += int(caught.value.metadata["retry_ms"]) * 1_000_000
    quotas.enter(acme)
    with pytest.raises(QuotaExceeded):
        quotas.enter(acme)
    clock.now_ns += 100 * SECOND
    for _ in range(3):
        quotas.enter(acme)
    with pytest.raises(QuotaExceeded):
        quotas.enter(acme)


def test_calls_at_once_are_counted_until_they_end():
    quotas, acme = Quotas(Clock()), owner(concurrent_calls=2)
    quotas.enter(acme)
    quotas.enter(acme)
    with pytest.raises(QuotaExceeded):
        quotas.enter(acme)
    quotas.leave(acme)
    quotas.enter(acme)


def test_one_owner_s_calls_take_nothing_from_another():
    quotas = Quotas(Clock())
    quotas.enter(owner(requests_per_second=1, concurrent_calls=1))
    quotas.enter(Owner(name="rival", limits=OwnerLimits(requests_per_second=1, concurrent_calls=1)))


@pytest.fixture
def limited(tmp_path):
    """A caller with the limits, and the clock of its service."""
    clock = Clock()
    limits = {"requests_per_second": 50, "concurrent_calls": 2, "replicas": 2, "blocks": 90}
    guard = Guard(tmp_path, {"acme": {"limits": limits}, "rival": {}})
    with running(guard.config(), clock) as service:
        yield Caller(service, "token-acme"), clock, Caller(service, "token-rival")


def test_rate_limit_errors_state_the_retry_delay(limited):
    caller, clock, rival = limited
    status = caller.channel.unary_unary("/kvplane.v1.Admin/Status")
    for _ in range(50):
        status(b"")
    with pytest.raises(grpc.RpcError) as raised:
        status(b"")
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata: dict[str, Any] = dict(cast(Any, raised.value).trailing_metadata())
    rich = status_pb2.Status.FromString(metadata[DETAILS_KEY])
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(retry) for detail in rich.details)
    assert any(detail.Unpack(quota) for detail in rich.details)
    assert 0 < retry.retry_delay.ToMilliseconds() <= 21
    assert quota.violations[0].subject == "owner:acme"
    rival.admin.Status(admin_pb2.StatusRequest())
    clock.now_ns += retry.retry_delay.ToMilliseconds() * 1_000_000
    status(b"")


def test_an_open_session_counts_as_a_concurrent_call(limited):
    caller, _, _ = limited
    caller.register("acme/r")
    caller.register("acme/s")
    sessions = [caller.open("acme/r"), caller.open("acme/s")]
    with refusal(QuotaExceeded, "concurrent_calls"):
        caller.describe("acme/r")
    sessions[0].close()
    assert sessions[0].end() is None
    until(lambda: not refused(caller))
    sessions[1].close()


def refused(caller: Caller) -> bool:
    """The end of a call is seen by its client before it is counted."""
    try:
        caller.describe("acme/r")
    except grpc.RpcError:
        return True
    return False


def test_replicas_and_blocks_are_counted_per_owner(limited):
    caller, _, rival = limited
    caller.register("acme/r")
    caller.register("acme/r")
    spec = type(SPEC)()
    spec.CopyFrom(SPEC)
    spec.num_blocks = 50
    with refusal(QuotaExceeded, "blocks"):
        caller.register("acme/s", spec)
    caller.register("acme/s")
    with refusal(QuotaExceeded, "replicas") as caught:
        caller.register("acme/t")
    assert "retry_ms" not in caught[0].metadata, "waiting does not help"
    rival.register("rival/r", spec)


def test_an_owner_gets_the_blocks_of_its_limit_whatever_others_register(tmp_path):
    """Where the limits of all owners sum to those of the service, each limit is a guarantee too."""
    limits = {"replicas": 2, "blocks": 2 * SPEC.num_blocks}
    guard = Guard(tmp_path, {name: {"limits": limits} for name in ("acme", "rival")})
    with running(guard.config(max_replicas=4, max_total_blocks=4 * SPEC.num_blocks)) as service:
        acme, rival = Caller(service, "token-acme"), Caller(service, "token-rival")
        for at in range(2):
            rival.register(f"rival/{at}")
        with refusal(QuotaExceeded, "replicas"):
            rival.register("rival/2")
        for at in range(2):
            acme.register(f"acme/{at}")


def test_an_expired_replica_comes_back_within_the_limits_only(tmp_path):
    guard = Guard(tmp_path, {"acme": {"limits": {"replicas": 1}}})
    with running(guard.config(store=f"sqlite:{tmp_path / 'keys.sqlite'}")) as service:
        acme, app = Caller(service, "token-acme"), service.app
        acme.register("acme/a")
        until(lambda: app.keeper.is_recorded("acme/a"))
        expired = expire_all(app.registry, app.ownership, 0)
        asyncio.run_coroutine_threadsafe(expired, service.loop).result(20)
        assert len(app.registry) == 0
        acme.register("acme/b")
        with refusal(QuotaExceeded, "replicas"):
            acme.register("acme/a")
        assert len(app.registry) == 1
        acme.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="acme/b"))
        acme.register("acme/a")
        assert acme.state("acme/a") == "RECOVERING"


def built_by_concurrent_registrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Twelve registrations of six names at once, of which the limits allow two; returns the pools that are built."""
    built: list[int] = []

    def counted(spec: ReplicaSpec) -> ReplicaCore:
        built.append(spec.num_blocks)
        return new_replica(spec)

    def planned_when_all_have_come(request: pb.RegisterReplicaRequest) -> Planned:
        until(lambda: len(come) >= len(names))
        return plan_source(request)

    names = [f"acme/{at % 6}" for at in range(12)]  # each is sent twice, as a client that retries does
    come: list[str] = []
    monkeypatch.setattr(allocation, "new_replica", counted)
    monkeypatch.setattr(allocation, "plan_source", planned_when_all_have_come)
    monkeypatch.setattr(VisibleReplicas, "check_name", lambda _, name: come.append(name))
    with running(Guard(tmp_path, {"acme": {"limits": {"replicas": 2, "blocks": 90}}}).config()) as service:
        acme = Caller(service, "token-acme")

        def register(name: str) -> bool:
            try:
                acme.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica=name, spec=SPEC))
            except grpc.RpcError as error:
                refused = error_of(error)
            else:
                return True
            assert isinstance(refused, QuotaExceeded)
            return False

        with ThreadPoolExecutor(len(names)) as callers:
            assert sum(callers.map(register, names)) == 4
        assert len(acme.allocation.ListReplicas(pb.ListReplicasRequest()).replicas) == 2
    return built


def test_concurrent_registrations_build_no_pool_beyond_a_limit(tmp_path, monkeypatch):
    assert built_by_concurrent_registrations(tmp_path, monkeypatch) == [SPEC.num_blocks] * 2


def test_a_limit_that_is_checked_after_building_is_caught(tmp_path, monkeypatch):
    with weakened("limit checked after building"):
        assert len(built_by_concurrent_registrations(tmp_path, monkeypatch)) > 2


def test_bytes_are_counted_as_they_come_and_one_request_may_use_more_than_is_left():
    clock = Clock()
    quotas, acme, rival = Quotas(clock), owner(bytes_per_second=1000), Owner(name="rival")
    quotas.enter(acme)
    quotas.enter(rival)
    quotas.pay(acme, 999)
    quotas.pay(acme, 4001)
    for num_bytes in (0, 1):
        with pytest.raises(QuotaExceeded) as caught:
            quotas.pay(acme, num_bytes)
    assert (caught.value.field, caught.value.metadata["retry_ms"]) == ("bytes_per_second", "4002")
    quotas.pay(rival, 5000)
    assert quotas.owe(acme, 1000) == 4002, "messages of a session wait, in order"
    assert quotas.owe(acme, 1) == 5002
    clock.now_ns += 5 * SECOND + 2_000_000
    quotas.pay(acme, 10)
    clock.now_ns += 1000 * SECOND
    quotas.pay(acme, 1000)
    assert quotas.owe(acme, 0) == 2, "an allowance holds one second"


def test_an_owner_without_a_limit_of_bytes_is_not_delayed():
    quotas, acme = Quotas(Clock()), owner()
    free = acme.model_copy(update={"limits": OwnerLimits(bytes_per_second=None)})
    quotas.enter(free)
    assert [quotas.owe(free, 1 << 40) for _ in range(3)] == [0, 0, 0]
    assert OwnerLimits().bytes_per_second == 16 << 20
    assert ANYONE.limits.bytes_per_second is None


def test_the_bytes_of_an_owner_limit_its_calls_and_delay_its_sessions(tmp_path, monkeypatch):
    waits: list[int] = []
    owe = Quotas.owe

    def noted(self: Quotas, of: Owner, num_bytes: int) -> int:
        waits.append(owe(self, of, num_bytes))
        return waits[-1]

    monkeypatch.setattr(Quotas, "owe", noted)
    clock = Clock()
    guard = Guard(tmp_path, {"acme": {"limits": {"bytes_per_second": 100_000}}, "rival": {}})
    with running(guard.config(), clock) as service:
        acme, rival = Caller(service, "token-acme"), Caller(service, "token-rival")
        acme.register("acme/r")
        rival.register("rival/r")
        clock.now_ns += 3600 * SECOND  # planning counts the CPU time that it took, which is not of this clock
        stream = acme.open("acme/r")
        long = pb.RequestContent(token_ids=[1_000_000] * 40_000)
        with refusal(InvalidArgument, "content.token_ids"):  # its bytes are counted
            acme.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="acme/r", content=long))
        with refusal(QuotaExceeded, "bytes_per_second") as caught:
            acme.describe("acme/r")
        rival.describe("rival/r")
        assert stream.step().WhichOneof("kind") == "result"
        assert 0 < waits[-1] <= int(caught[0].metadata["retry_ms"])
        assert not any(waits[:-1]), "registrations and the session had no wait"
        clock.now_ns += SECOND
        acme.describe("acme/r")
        stream.close()


def test_a_pool_is_priced_when_it_is_built_and_not_when_it_is_found(tmp_path):
    clock = Clock()
    guard = Guard(tmp_path, {"acme": {"limits": {"bytes_per_second": 100_000}}, "rival": {}})
    spec = type(SPEC)()
    spec.CopyFrom(SPEC)
    spec.num_blocks = 50_000
    with running(guard.config(), clock) as service:
        acme, rival = Caller(service, "token-acme"), Caller(service, "token-rival")
        acme.register("acme/r", spec)
        with refusal(QuotaExceeded, "bytes_per_second") as caught:
            acme.allocation.DeregisterReplica(pb.DeregisterReplicaRequest(replica="acme/r"))
        assert 3000 < int(caught[0].metadata["retry_ms"]) < 4000
        rival.register("rival/r", spec)
        clock.now_ns += 4 * SECOND
        acme.register("acme/r", spec)
        acme.describe("acme/r")


def test_requests_of_an_owner_are_read_in_turns(tmp_path):
    """Each may have the size of the largest message, and is buffered while it is read."""
    released = threading.Event()

    def late() -> Iterator[bytes]:
        yield from [b""] if released.wait(60) else []

    with running(Guard(tmp_path, {"acme": {}, "rival": {}}).config()) as service:
        acme, rival = Caller(service, "token-acme"), Caller(service, "token-rival")
        rival.register("rival/r")
        status: Any = acme.channel.stream_unary("/kvplane.v1.Admin/Status")
        token = (("authorization", "Bearer token-acme"),)
        begun = [status.future(late(), timeout=90, metadata=token) for _ in range(READS_AT_ONCE)]
        until(lambda: num_calls(service) == READS_AT_ONCE)
        waiting = status.future(iter([b""]), timeout=90, metadata=token)
        until(lambda: num_calls(service) == READS_AT_ONCE + 1)
        rival.describe("rival/r")
        assert not waiting.done()
        begun[0].cancel()
        waiting.result(30)
        released.set()
        for call in begun[1:]:
            call.result(30)


def num_calls(service: Service) -> int:
    """Calls of the owner acme that are served or wait."""
    gate = service.app._gate
    assert gate is not None
    return gate._quotas._usage["acme"].num_calls if "acme" in gate._quotas._usage else 0
