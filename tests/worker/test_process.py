"""The worker process: start, registration, shutdown, and refusals."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.base.errors import (
    InvalidArgument,
    NoPlan,
    NotFound,
    OutOfMemory,
    PermissionDenied,
    Unavailable,
    WorkerExists,
    WrongPlan,
)
from kvplane.base.groups import TierKind, TierSpec
from kvplane.blocking.client import connect
from kvplane.v1 import plan_pb2
from kvplane.v1.allocation_pb2 import ListReplicasRequest
from kvplane_kernels import select
from kvplane_kernels.proof import Proof
from kvplane_service.config import Config
from kvplane_worker import process as process_module
from kvplane_worker.attach import attach, describe
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import run_dir_of
from kvplane_worker.process import Stop, WorkerProcess
from tests.plan.layers import full, named
from tests.service.rig import SPEC, running, until
from tests.worker.rig import BLOCKS, World, refusal, world
from tests.worker.test_ranks import PROMPT

READY = plan_pb2.WORKER_STATE_READY
SERVING = health_pb2.HealthCheckResponse.SERVING


def test_worker_is_registered_and_describes_itself(here: World):
    child, address = here.worker()
    (shown,) = here.shown()
    assert (shown.rank, shown.address, shown.pid, shown.device, shown.state) == (0, address, child.pid, "cpu", READY)
    described = describe(address)
    assert described.worker == shown
    assert (described.replica, described.size_bytes, described.backend) == ("r", BLOCKS * 512, "torch")
    assert list(described.staging_rows) == [128, 128]
    assert described.free_bytes > 0
    assert shown.incarnation
    assert shown.plan_digest
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="kvplane.v1.Worker"))
    assert answer.status == SERVING


def test_worker_serves_health_by_check_only(here: World):
    """Health.Watch would hold a thread of the worker, and a client that does not read would delay its exit."""
    _, address = here.worker()
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            next(health.Watch(health_pb2.HealthCheckRequest(), timeout=20))
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as raised:
            health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=20)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == SERVING


def test_a_starting_worker_first_removes_the_socket_of_a_killed_one(here: World):
    """A socket is what the probe of a pod looks for, and tests of backends may take minutes."""
    child, address = here.worker()
    child.kill()
    place = run_dir_of(address)
    assert (place / "worker.sock").is_socket()
    options = replace(here.options(), backend="none")
    assert isinstance(refusal(WorkerProcess, options), InvalidArgument)
    assert {path.name for path in place.iterdir()} == {"lock", "worker.json"}
    here.worker()  # at once: it removes the registration of the killed one


def test_terminated_worker_removes_its_files_and_registration(here: World):
    child, address = here.worker()
    assert len(here.shared_files()) == 3
    child.terminate()
    assert child.wait() == 0
    assert here.shared_files() == set()
    assert here.shown() == []
    assert {path.name for path in run_dir_of(address).iterdir()} == {"lock"}
    assert isinstance(refusal(attach, address), NotFound)


def test_leaving_worker_waits_for_the_engine(here: World):
    child, address = here.worker()
    engine = here.engine()
    engine.do("attach", address)
    child.terminate()
    until(lambda: [worker.state for worker in here.shown()] == [plan_pb2.WORKER_STATE_LEAVING])
    assert engine.do("look", 0, 1, 1) == {0}
    engine.kill()
    assert child.wait() == 0


def test_second_signal_exits_and_the_engine_keeps_its_pages(here: World):
    child, address = here.worker()
    engine = here.engine()
    engine.do("attach", address)
    engine.do("fill", 0, 1, 1, 7)
    child.terminate()
    until(lambda: [worker.state for worker in here.shown()] == [plan_pb2.WORKER_STATE_LEAVING])
    child.terminate()
    assert child.wait() == 0
    assert engine.do("look", 0, 1, 1) == {7}


@pytest.mark.parametrize("alive", [True, False])
def test_pages_are_freed_only_after_the_engine_exited(here: World, monkeypatch, alive):
    freed: list[bool] = []
    close = Holdings.close

    def noted(holdings: Holdings, lent: bool = False) -> None:
        freed.append(not lent)
        close(holdings, lent)

    monkeypatch.setattr(Holdings, "close", noted)
    process = WorkerProcess(here.options())
    engine = here.engine()
    engine.do("attach", process.start())
    if not alive:
        engine.kill()
    process.leave()
    process.leave()
    process.serve()
    process.close()
    assert freed == [not alive]


def test_signal_during_the_start_check_stops_the_worker(here: World, monkeypatch):
    stop = Stop()

    def tried(*_: object, **given: threading.Event) -> Proof:
        stop.request()
        assert given["stop"].is_set()
        return Proof("it was stopped", 0, 0.0)

    monkeypatch.setattr(process_module, "prove_in_subprocess", tried)
    monkeypatch.setattr(select, "BACKENDS", {"slow": "torch_ops:TorchOps", **select.BACKENDS})
    error = refusal(WorkerProcess, here.options(), stop)
    assert (type(error), error.message) == (Unavailable, "a stop was requested while backends were tested")
    assert {path.name for path in (here.folder / "r-0").iterdir()} == {"lock"}


def test_second_worker_of_a_rank_is_refused_in_any_directory(here: World):
    child, address = here.worker()
    before = describe(address)
    same, other = here.refused_worker(), here.refused_worker(folder="elsewhere")
    for error in (same, other):
        assert isinstance(error, WorkerExists)
        assert error.metadata == {"pid": str(child.pid), "address": address}
    assert describe(address).worker == before.worker
    assert [worker.pid for worker in here.shown()] == [child.pid]
    assert len(list((here.folder / "elsewhere").iterdir())) == 1  # the lock file


def test_worker_without_plan_replica_or_rank_is_refused(here: World):
    here.service.register("explicit", SPEC)
    assert isinstance(here.refused_worker(replica="explicit"), NoPlan)
    assert isinstance(here.refused_worker(replica="unknown"), NotFound)
    wrong = here.refused_worker(rank=1)
    assert (type(wrong), wrong.field) == (InvalidArgument, "worker.rank")
    assert here.shared_files() == set()
    assert here.shown() == []


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", "cuda:-1", ""])
def test_missing_device_is_refused(here: World, device):
    error = refusal(WorkerProcess, replace(here.options(), device=device))
    assert (type(error), error.field) == (InvalidArgument, "device")
    assert not (here.folder / "r-0").exists()


def test_out_of_memory_names_the_number_of_blocks_that_fit(here: World):
    wide = full(num_kv_heads=64, head_size=1 << 15)
    here.register("large", layers=named(f=(16, wide)), num_blocks=1 << 12)
    error = here.refused_worker(replica="large")
    assert isinstance(error, OutOfMemory)
    asked, free, fits = (int(error.metadata[name]) for name in ("asked", "free", "num_blocks"))
    per_block = 16 * wide.page_bytes
    assert asked >= (1 << 12) * per_block > free
    assert fits * per_block < free < (fits + 2) * (per_block + 8) + per_block
    assert f"at most {fits} blocks" in str(error)
    assert here.shared_files() == set()
    assert here.shown("large") == []


def test_run_dir_that_other_users_can_enter_is_refused(here: World):
    path = here.folder / "r-0"
    path.mkdir(mode=0o755)
    error = here.refused_worker()
    assert (type(error), error.field) == (PermissionDenied, "run_dir")
    assert list(path.iterdir()) == []


def test_token_and_shared_memory_are_private(here: World):
    _, address = here.worker()
    run_dir = run_dir_of(address)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert (run_dir / "token").stat().st_mode & 0o777 == 0o600
    for name in here.shared_files():
        assert os.stat(f"/dev/shm/{name}").st_mode & 0o777 == 0o600


def test_worker_registers_again_when_its_replica_was_registered_again(tmp_path):
    """The worker registers again, and the epoch of the next engine life is above the owner epoch of its pages."""
    with world(tmp_path, worker_lease_ms=1500) as here:
        here.register()
        child, address = here.worker()
        engine = here.engine()
        engine.do("attach", address)
        engine.do("open", here.service.address, "r")
        epoch, _ = engine.do("open", here.service.address, "r")
        with connect(here.service.address) as client:
            client.deregister_replica("r")
        here.register()
        until(lambda: [worker.owner_epoch for worker in here.shown()] == [epoch])
        assert here.service.open("r").opened.epoch == epoch + 1
        assert child.process.is_alive()


def test_worker_outlives_the_service(tmp_path):
    """The service is killed without a store.
    A new one on its address gets the worker's registration and owner epoch.
    """
    with running(Config(listen="127.0.0.1:0", worker_lease_ms=1500)) as service:
        here = World(service, tmp_path)
        here.register()
        _, address = here.worker()
        engine = here.engine()
        incarnation, _ = engine.do("attach", address)
        for _ in range(3):
            epoch, _ = engine.do("open", service.address, "r")
        engine.do("fill", 0, 0, 3, 8)
    try:
        with running(Config(listen=service.address, worker_lease_ms=1500)) as here.service:
            assert list(here.service.allocation.ListReplicas(ListReplicasRequest()).replicas) == []
            here.register()
            until(lambda: [one.incarnation for one in here.shown()] == [incarnation])
            assert here.service.open("r").opened.epoch == epoch + 1
            assert engine.do("look", 0, 0, 3) == {8}
    finally:
        here.end()


def test_cache_outlives_service_and_engine(tmp_path):
    """Stored keys whose stamps the worker's memory still shows are hit by the first request of the next engine life."""
    settings: dict[str, Any] = {
        "worker_lease_ms": 1500,
        "store": f"sqlite:{tmp_path / 'entries.db'}",
        "store_flush_ms": 5,
    }
    with running(Config(listen="127.0.0.1:0", **settings)) as service:
        here = World(service, tmp_path)
        here.register()
        _, address = here.worker()
        first = here.engine()
        first.do("attach", address)
        first.do("open", service.address, "r")
        first.do("serve", 0, PROMPT)
        _, kept = first.do("open", service.address, "r")
        assert kept
    first.kill()
    try:
        with running(Config(listen=service.address, **settings)) as here.service:
            until(lambda: len(here.shown()) == 1)
            second = here.engine()
            second.do("attach", address)
            assert second.do("open", service.address, "r")[1] == kept
            assert second.do("serve", 0, PROMPT)[0] == 96
    finally:
        here.end()


@pytest.mark.parametrize(
    "tiers", [(), (TierSpec(TierKind.HOST, 11),), (TierSpec(TierKind.DISK, 10),)], ids=["none", "larger", "a disk"]
)
def test_worker_exits_when_the_tiers_change(tmp_path, tiers):
    """Its stamp table has other slots: no engine could open a session with it, or a disk would be what memory is."""
    with world(tmp_path, worker_lease_ms=1500) as here:
        here.register(namespace=b"n", tiers=(TierSpec(TierKind.HOST, 10),))
        child, _ = here.worker()
        with connect(here.service.address) as client:
            client.deregister_replica("r")
        here.register(namespace=b"n", tiers=tiers)
        assert isinstance(child.receive(), WrongPlan)
        child.wait()
        here.worker()


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_worker_that_leaves_erases_its_disk_if_its_replica_was_deregistered(tmp_path, is_registered):
    with world(tmp_path) as here:
        here.register(namespace=b"n", tiers=(TierSpec(TierKind.DISK, 10),))
        child, _ = here.worker()
        (file,) = (tmp_path / "disk").glob("*.slots")
        if not is_registered:
            with connect(here.service.address) as client:
                client.deregister_replica("r")
        child.terminate()
        child.wait()
        left = {one.name for one in (tmp_path / "disk").iterdir()}
        assert left == ({file.name, f"{file.name}.index"} if is_registered else set())


def test_worker_exits_when_the_plan_changes(tmp_path):
    with world(tmp_path, worker_lease_ms=1500) as here:
        here.register()
        child, _ = here.worker()
        with connect(here.service.address) as client:
            client.deregister_replica("r")
        here.register(num_blocks=BLOCKS + 1)
        assert isinstance(child.receive(), WrongPlan)
        child.wait()
        here.worker()
