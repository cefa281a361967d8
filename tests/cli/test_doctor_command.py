"""`kvplane doctor`: each of its faults is staged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import pytest

from kvplane.base.groups import TierKind
from kvplane.base.hashing import native
from kvplane.base.sources import ModelSource
from kvplane.base.step import Budget
from kvplane.base.worker import TierUse, WorkerInfo, WorkerState
from kvplane.blocking.client import connect
from kvplane.blocking.workers import WorkersClient
from kvplane.rpc.channel import open_channel
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire import encode_spec
from kvplane_core.face import loader
from kvplane_core.spec.step_applier import PATIENT_ROWS
from kvplane_service.config import Config
from kvplane_service.replicas.idle_check import Outcome
from kvplane_service.runtime.executors import Executor
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.offloaded import Offloaded
from kvplane_tools.cli.query import checks
from tests.core.builders import full, replica_spec
from tests.core.specification import specification_of
from tests.service.rig import WAIT_S, Service, column, running
from tests.store.test_writer import Away

CHECKS = [
    "health", "reflection", "versions", "clocks", "replicas", "workers", "epochs", "store", "state",
    "loads", "tiers", "chunks", "prompts", "drafts", "cores", "hashes",
]  # fmt: skip


@contextmanager
def nothing(service: Service) -> Iterator[None]:
    yield


@contextmanager
def draining(service: Service) -> Iterator[None]:
    service.in_loop(service.app._server.health.draining)
    yield


@contextmanager
def other_version(service: Service) -> Iterator[None]:
    service.app.about.version = "0.0.1"
    yield


@contextmanager
def other_clock(service: Service) -> Iterator[None]:
    wall_ns = service.app.about.wall_ns
    service.app.about.wall_ns = lambda: wall_ns() - 90_000_000_000
    yield


@contextmanager
def silent_engine(service: Service) -> Iterator[None]:
    service.register()
    stream = service.open()
    stream.vanish()
    while service.state() != "LAPSED":
        pass
    yield


@contextmanager
def silent_worker(service: Service) -> Iterator[None]:
    """One of two ranks has a worker; the other rank's worker is silent."""
    with workers(service, WorkerInfo(0, 11, "unix:/run/here", 77, "cpu", WorkerState.READY)):
        yield


@contextmanager
def foreign_epoch(service: Service) -> Iterator[None]:
    infos = [WorkerInfo(rank, 11 + rank, "unix:/run/here", 77, "cpu", WorkerState.READY, 5, 9) for rank in (0, 1)]
    with workers(service, *infos):
        yield


@contextmanager
def failing_disk(service: Service) -> Iterator[None]:
    disk = TierUse(TierKind.DISK, refused_blocks=2, suspended=True)
    states = [WorkerInfo(rank, 11 + rank, "unix:/run/here", 77, "cpu", tiers=(disk,) * rank) for rank in (0, 1)]
    with workers(service, *states):
        yield


@contextmanager
def workers(service: Service, *infos: WorkerInfo) -> Iterator[None]:
    with connect(service.address) as client:
        source = ModelSource(model="llama-3.1-8b", num_blocks=100, max_model_len=1024, tensor_parallel=2)
        client.register_replica("two", source, num_ranks=2)
        registrar = WorkersClient(service.channel)
        for info in infos:
            registrar.register_worker("two", info)
        yield


@contextmanager
def store_away(service: Service) -> Iterator[None]:
    """The store was available when the service started, and is unavailable now."""
    writer = service.app.keeper._writer
    assert writer is not None
    store = Away()
    store.error = StoreUnavailable("connection refused")
    writer.store = Offloaded(lambda: store, Executor("the store"))
    asyncio.run_coroutine_threadsafe(writer.store.open(), service.loop).result(WAIT_S)
    service.register()
    stream = service.open()
    while service.describe().store.state != pb.STORE_STATE_DEGRADED:
        stream.step()
    yield


@contextmanager
def broken_state(service: Service) -> Iterator[None]:
    """An idle replica has a reference without a holder."""
    service.register()
    host = service.in_loop(lambda: service.app.registry.get("r").host)

    async def check() -> None:
        changed = specification_of(host.replica)
        changed.coordinator.pool.references[7] += 1
        host.replica.adopt(changed)
        assert await host.idle_check.run(asyncio.sleep) is Outcome.BROKEN
        service.app._server.health.state(False)

    asyncio.run_coroutine_threadsafe(check(), service.loop).result(WAIT_S)
    yield


@contextmanager
def load_of_a_dead_engine(service: Service) -> Iterator[None]:
    """The previous engine life listed loads that may still write to these blocks."""
    service.register()
    stream = service.open(busy_blocks=column(7, 9))
    yield
    stream.close()


@contextmanager
def small_budget(service: Service) -> Iterator[None]:
    """Blocks of 80 tokens, and steps of 64."""
    with connect(service.address) as client:
        client.register_replica("hybrid", ModelSource(model="jamba-v0.1", num_blocks=200, max_model_len=512))
        with client.session("hybrid") as session:
            session.apply(part_of(NewsRow(0, range(100)), AdmitRow(0), budget=Budget(tokens=64)))
    yield


@contextmanager
def decodes_in_front(service: Service) -> Iterator[None]:
    """Blocks of 80 tokens, steps of 80, and a row that decodes in each of them."""
    with connect(service.address) as client:
        client.register_replica("hybrid", ModelSource(model="jamba-v0.1", num_blocks=200, max_model_len=512))
        with client.session("hybrid") as session:
            session.apply(part_of(NewsRow(0, [1]), NewsRow(1, range(200)), AdmitRow(0)))
            for token in range(PATIENT_ROWS + 2):
                budget = Budget(tokens=80)
                session.apply(part_of(FactRow(0, tokens=[token]), RunRow(0), AdmitRow(1), budget=budget))
    yield


@contextmanager
def rejecting_engine(service: Service) -> Iterator[None]:
    """An engine whose prompt has to be computed again."""
    with connect(service.address) as client:
        client.register_replica("hybrid", ModelSource(model="jamba-v0.1", num_blocks=200, max_model_len=512))
        with client.session("hybrid") as session:
            session.apply(part_of(NewsRow(0, range(200)), AdmitRow(0)))
            session.apply(part_of(FactRow(0, computed=20)))
    yield


@contextmanager
def wrong_choice_of_hashes(service: Service) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, "yes")
        yield


@contextmanager
def no_compiled_core(service: Service) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(loader.VARIABLE, raising=False)
        patch.setattr(loader, "problem", lambda: "the compiled core is not installed")
        yield


FAULTS: dict[str, Callable[[Service], AbstractContextManager[None]]] = {
    "health": draining,
    "reflection": nothing,  # the service is started without it
    "versions": other_version,
    "clocks": other_clock,
    "replicas": silent_engine,
    "workers": silent_worker,
    "epochs": foreign_epoch,
    "store": store_away,
    "state": broken_state,
    "loads": load_of_a_dead_engine,
    "tiers": failing_disk,
    "chunks": small_budget,
    "prompts": decodes_in_front,
    "drafts": rejecting_engine,
    "cores": no_compiled_core,
    "hashes": wrong_choice_of_hashes,
}


def examine(kvplane, service: Service) -> tuple[int, list[dict[str, Any]]]:
    code, out, _ = kvplane("doctor", "--service", service.address, "-o", "json")
    return code, json.loads(out)


def test_doctor_finds_no_fault_in_a_healthy_service(kvplane):
    with running() as service:
        service.register()
        code, findings = examine(kvplane, service)
    assert code == 0
    assert [finding["check"] for finding in findings] == CHECKS
    assert all(finding["is_well"] for finding in findings)


def test_doctor_finds_a_server_without_health_service():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open_channel(f"127.0.0.1:{port}") as channel:
        found = checks._health(channel)
    server.stop(None).wait()
    assert (found.is_well, found.seen) == (False, "unimplemented")


def test_doctor_checks_have_a_staged_fault_each():
    assert list(FAULTS) == CHECKS


@pytest.mark.parametrize("check", FAULTS)
def test_doctor_finds_exactly_the_staged_fault(kvplane, tmp_path, check):
    store = f"sqlite:{tmp_path / 'index'}" if check == "store" else "none"
    config = Config(listen="127.0.0.1:0", reflection="false" if check == "reflection" else "auto", store=store)
    with running(config) as service, FAULTS[check](service):
        code, findings = examine(kvplane, service)
        text = kvplane("doctor", "--service", service.address)[1]
    assert code == 1
    assert [finding["check"] for finding in findings if not finding["is_well"]] == [check]
    (fault,) = [finding for finding in findings if not finding["is_well"]]
    assert f"{check}: {fault['remedy']}" in text
    assert check == "clocks" or fault["seen"] in text  # the skew differs between two runs


def test_describe_counts_the_blocks_under_old_loads(kvplane):
    with running() as service, load_of_a_dead_engine(service):
        code, out, _ = kvplane("describe", "r", "--service", service.address)
    assert code == 0
    assert "2 of 40 blocks held by 0 running requests" in out
    assert "2 of them under loads of earlier epochs" in out


def test_describe_and_doctor_say_why_a_replica_has_no_compiled_core(kvplane, monkeypatch):
    monkeypatch.setenv(loader.VARIABLE, "python")
    with running() as service:
        spec = encode_spec(replica_spec(full(page_bytes=64)))
        service.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica="r", spec=spec))
        for command in (["describe", "r"], ["doctor"]):
            code, out, _ = kvplane(*command, "--service", service.address)
            assert "python (KVPLANE_CORE=python)" in out
            assert code == 0, "it was selected"


def test_doctor_names_a_service_that_falls_back_before_it_has_a_replica(kvplane):
    with running() as service, no_compiled_core(service):
        code, out, _ = kvplane("doctor", "--service", service.address)
    assert code == 1
    assert "no replica; new ones: python (the compiled core is not installed)" in out
    assert "install g++ and install kvplane again" in out
