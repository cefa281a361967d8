"""A rank's worker: it gets the plan, is registered while its lease is valid, and is the only one of its rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    KvplaneError,
    NoPlan,
    NotFound,
    WorkerExists,
)
from kvplane.base.sources import LayerSource
from kvplane.base.stamps import MAX_EPOCH
from kvplane.base.worker import WorkerInfo, WorkerState
from kvplane.blocking.client import connect
from kvplane.blocking.workers import WorkersClient
from kvplane.v1 import plan_pb2
from kvplane_plan.planner import to_rank_plan
from kvplane_service.config import Config
from kvplane_service.replicas.workers import WorkerRoster
from tests.plan.layers import full, named, plan, window
from tests.service.rig import SPEC, Service, running

LAYERS = named(f=(2, full()), w=(2, window()))
PLAN = to_rank_plan(plan(LAYERS))
INFO = WorkerInfo(0, 11, "unix:/run/here", 77, "cpu")
OTHER = replace(INFO, worker_id=12, address="unix:/run/there", pid=78)


class World:
    def __init__(self, plans=(PLAN,), num_ranks: int = 2) -> None:
        self.now_ns = 0
        self.roster = WorkerRoster(plans, num_ranks, 1000, lambda: self.now_ns)

    def pass_lease(self) -> None:
        self.now_ns += 1000 * 1_000_000 + 1


def test_a_worker_is_registered_until_its_lease_expires():
    world = World()
    assert world.roster.register(INFO).plan == PLAN
    for _ in range(5):
        world.now_ns += 1000 * 1_000_000
        world.roster.renew(replace(INFO, state=WorkerState.READY))
    assert world.roster.alive() == [replace(INFO, state=WorkerState.READY)]
    world.pass_lease()
    assert world.roster.alive() == []
    with pytest.raises(NotFound, match="register it again"):
        world.roster.renew(INFO)
    world.roster.register(INFO)


def test_a_rank_has_one_worker():
    world = World()
    world.roster.register(INFO)
    for call in (world.roster.register, world.roster.renew):
        with pytest.raises(WorkerExists) as caught:
            call(OTHER)
        assert caught.value.metadata == {"address": "unix:/run/here", "pid": "77"}
    assert world.roster.alive() == [INFO]
    world.roster.register(replace(OTHER, rank=1))
    world.pass_lease()
    world.roster.register(OTHER)
    with pytest.raises(WorkerExists):
        world.roster.renew(INFO)


def test_a_leaving_worker_frees_its_rank():
    world = World()
    world.roster.register(INFO)
    world.roster.leave(OTHER.worker_id)
    world.roster.leave(INFO.worker_id)
    world.roster.register(OTHER)


@pytest.mark.parametrize("rank", [-1, 2, 65536])
def test_an_unknown_rank_is_refused(rank):
    with pytest.raises(InvalidArgument, match=r"^worker\.rank"):
        World().roster.register(replace(INFO, rank=rank))


def test_stages_share_the_ranks():
    stages = (PLAN, to_rank_plan(plan(named(f=(1, full())))))
    roster = World(stages, 4).roster
    plans = [roster.register(replace(INFO, rank=rank, worker_id=rank + 1)).plan for rank in range(4)]
    assert plans == [stages[0], stages[0], stages[1], stages[1]]
    with pytest.raises(FailedPrecondition, match="multiple of its stages"):
        World(stages, 3).roster.register(INFO)


# ---- over the wire


@pytest.fixture
def service():
    with running(Config(listen="127.0.0.1:0", worker_lease_ms=60_000)) as service:
        with connect(service.address) as client:
            client.register_replica("r", LayerSource(layers=LAYERS, num_blocks=500, max_model_len=256), num_ranks=2)
        yield service


@pytest.fixture
def workers(service):
    with WorkersClient(service.channel) as client:
        yield client


def refused(call, *arguments) -> KvplaneError:
    with pytest.raises(KvplaneError) as caught:
        call(*arguments)
    return caught.value


def test_a_registered_worker_gets_its_plan_and_is_described(service: Service, workers: WorkersClient):
    assignment = workers.register_worker("r", INFO)
    assert assignment.plan == to_rank_plan(plan(LAYERS, num_blocks=500, max_model_len=256))
    assert (assignment.num_ranks, assignment.lease_ms) == (2, 60_000)
    ready = replace(INFO, state=WorkerState.READY, incarnation=2**64 - 1, plan_digest=assignment.plan.digest())
    assert workers.renew_worker("r", ready).lease_ms == 60_000
    (shown,) = service.describe().workers
    assert (shown.rank, shown.address, shown.pid, shown.device) == (0, "unix:/run/here", 77, "cpu")
    assert (shown.incarnation, shown.state) == (2**64 - 1, plan_pb2.WORKER_STATE_READY)
    workers.deregister_worker("r", INFO.worker_id)
    assert not service.describe().workers


def test_worker_refusals_have_their_names(service: Service, workers: WorkersClient):
    service.register("explicit", SPEC)
    assert isinstance(refused(workers.register_worker, "none", INFO), NotFound)
    assert isinstance(refused(workers.register_worker, "explicit", INFO), NoPlan)
    assert "by model or by layers" in str(refused(workers.register_worker, "explicit", INFO))
    assert isinstance(refused(workers.renew_worker, "r", INFO), NotFound)
    workers.register_worker("r", INFO)
    exists = refused(workers.register_worker, "r", OTHER)
    assert isinstance(exists, WorkerExists)
    assert exists.metadata == {"address": "unix:/run/here", "pid": "77"}
    for wrong in ({"worker_id": 0}, {"address": "x" * 513}, {"device": "x" * 65}, {"owner_epoch": MAX_EPOCH}):
        error = refused(workers.renew_worker, "r", replace(INFO, **wrong))
        assert isinstance(error, InvalidArgument)
        assert error.field == f"worker.{next(iter(wrong))}"
    (shown,) = service.describe().workers
    assert shown.worker_id == INFO.worker_id


PATHS = ["here", "/a//b", "//a", "/a/", "/a/./b", "/a/../b", "/a/..%2Fb", "/a?b", "/a#b", "/a\0b", "/a\nb", ""]


@pytest.mark.parametrize("path", PATHS)
def test_address_that_gRPC_and_the_service_could_read_differently_is_refused(path):  # noqa: N802
    with pytest.raises(InvalidArgument) as caught:
        replace(INFO, address=f"unix:{path}").validate()
    assert caught.value.field == "worker.address"


def test_registration_with_another_memory_layout_is_refused(service: Service):
    with connect(service.address) as client:
        source = LayerSource(layers=LAYERS, num_blocks=500, max_model_len=256)
        client.register_replica("r", source, num_ranks=2)
        with pytest.raises(AlreadyExists, match="another layout"):
            client.register_replica("r", replace(source, block_outermost=True), num_ranks=2)


def test_an_engine_life_is_numbered_above_the_owner_of_the_memory(service: Service, workers: WorkersClient):
    workers.register_worker("r", replace(INFO, owner_epoch=40))
    assert service.open("r").opened.epoch == 41
    workers.renew_worker("r", replace(INFO, owner_epoch=41))
    assert service.open("r").opened.epoch == 42
