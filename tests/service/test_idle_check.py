"""Idle replicas are checked in slices: a broken state is counted and logged, and calls are served as before."""

from __future__ import annotations

import asyncio
import gc
import logging
import urllib.request
import weakref

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.base.errors import NotFound
from kvplane.base.step import Admit, End, Facts, News, Part, Step
from kvplane_core.face.interface import BrokenInvariant
from kvplane_service.config import Config
from kvplane_service.replicas.idle_check import MAX_CHARS, PAUSE_S, Outcome, check_in_background, log_broken
from tests.core.specification import specification_of
from tests.service.hosts import HostWorld, spec_of
from tests.service.rig import needs_slices, running, until

IDLE_MS = 1000
MANY_BLOCKS = 60_000  # a check takes several slices
REQUEST = Part(news=News(slot=[0], num_tokens=[40], tokens=[1] * 40), admit=Admit(slot=[0]))
END = Part(facts=Facts(slot=[0], end=[End.FREE]))


class StopTheTask(BaseException):
    """Ends a background task."""


class Background:
    """The background task of the service on the clock of a host: `act` runs at each of its pauses."""

    def __init__(self, act=lambda: None, num_blocks=MANY_BLOCKS):
        self.world = HostWorld(spec=spec_of(num_blocks=num_blocks))
        self.host = self.world.host
        self.check = self.host.idle_check
        self.act = act
        self.reports = []
        self.pauses = []

    async def _sleep(self, pause_s):
        self.world.now_ns += int(pause_s * 1e9)
        self.pauses.append(pause_s)
        self.act()
        if self.world.now_ns >= self._until_ns:
            raise StopTheTask

    def run(self, seconds):
        """Let time pass; returns the checks by outcome."""
        self._until_ns = self.world.now_ns + int(seconds * 1e9)

        def report(name, error):
            self.reports.append((name, error))

        checks = check_in_background(lambda: [self.check], IDLE_MS, lambda: self.world.now_ns, self._sleep, report)
        with pytest.raises(StopTheTask):
            asyncio.run(checks)
        return {outcome.value: count for outcome, count in self.check.counts.items() if count}


def metrics_of(service):
    with urllib.request.urlopen(f"http://{service.app.metrics_address}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvplane_idle_checks_total"))
    return {name.split('outcome="')[1].split('"')[0]: float(value) for name, value in values.items()}


def health_of(service):
    stub = health_pb2_grpc.HealthStub(service.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service="state")).status


def corrupt(service):
    """As a leak does: a reference without a holder."""
    core = service.app.registry.get("r").host.replica
    broken = specification_of(core)
    broken.coordinator.pool.references[40] += 1
    core.adopt(broken)


def test_a_broken_replica_is_counted_logged_and_served(caplog):
    config = Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", idle_check_ms=40, lease_ms=2000)
    with running(config) as service, caplog.at_level(logging.ERROR):
        service.register()
        session = service.open()
        session.step()
        until(lambda: metrics_of(service)["passed"] == 1)
        until(lambda: health_of(service) == health_pb2.HealthCheckResponse.SERVING)
        assert metrics_of(service)["broken"] == 0
        service.in_loop(lambda: corrupt(service))
        session.step()
        until(lambda: metrics_of(service)["broken"] == 1)
        line = "the state of replica r is broken: references: block 40: 1 references, 0 holders"
        until(lambda: line in caplog.text)
        until(lambda: health_of(service) == health_pb2.HealthCheckResponse.NOT_SERVING)
        assert session.step().WhichOneof("kind") == "result"
        assert not service.app.failed.done()
        until(lambda: metrics_of(service)["broken"] == 2)
        assert caplog.text.count(line) >= 1


def test_a_deregistered_replica_ends_the_finding():
    config = Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", idle_check_ms=40, lease_ms=400)
    with running(config) as service:
        service.register()
        service.in_loop(lambda: corrupt(service))
        until(lambda: health_of(service) == health_pb2.HealthCheckResponse.NOT_SERVING)
        service.in_loop(lambda: service.app.registry.remove("r"))
        service.register()
        until(lambda: health_of(service) == health_pb2.HealthCheckResponse.SERVING)
        until(lambda: metrics_of(service) == {"passed": 1, "dropped": 0, "broken": 0})


def test_no_replica_is_checked_when_it_is_off():
    with running(Config(listen="127.0.0.1:0", idle_check_ms=0)) as service:
        names = service.in_loop(lambda: {task.get_name() for task in asyncio.all_tasks()})
    assert "leases" in names
    assert "idle checks" not in names


@needs_slices
def test_an_idle_replica_is_checked_once():
    background = Background()
    assert background.run(60) == {"passed": 1}
    engine = background.world.open()
    engine.step()
    assert background.run(60) == {"passed": 2}
    assert background.pauses.count(PAUSE_S) > 20, "in slices"


def test_a_busy_replica_is_not_checked():
    background = Background()
    engine = background.world.open()
    background.act = engine.step
    assert background.run(60) == {}


def test_a_replica_deregistered_before_its_check_is_freed():
    """Each replica is looked up when its turn comes, so the iterator keeps only the one that is checked."""
    with running(Config(listen="127.0.0.1:0", idle_check_ms=0)) as service:
        for name in ("first", "gone", "last"):
            service.register(name)

        def names_checked() -> list[str]:
            registry, checks = service.app.registry, service.app._idle_checks()
            names = [next(checks).name]
            gone = weakref.ref(registry.get("gone").host.replica)
            registry.remove("gone")
            gc.collect()
            assert gone() is None
            return [*names, *(check.name for check in checks)]

        assert service.in_loop(names_checked) == ["first", "last"]


def test_a_change_drops_the_check():
    """Each slice belongs to the state of its beginning: half of it with the request, and half without, would not."""
    background = Background()
    engine = background.world.open()
    engine.step(REQUEST)

    def change():
        if background.pauses.count(PAUSE_S) == 4:
            background.act = lambda: None
            engine.step(END)

    background.act = change
    assert background.run(60) == {"dropped": 1, "passed": 1}
    assert not background.reports


@pytest.mark.parametrize("pause", range(1, 30, 4))
def test_a_change_at_any_slice_is_no_finding(pause):
    background = Background()
    engine = background.world.open()
    engine.step(REQUEST)

    def change():
        if background.pauses.count(PAUSE_S) == pause:
            background.act = lambda: None
            engine.step(END, Part(news=News(slot=[1], num_tokens=[90], tokens=[2] * 90), admit=Admit(slot=[1])))

    background.act = change
    assert set(background.run(60)) <= {"dropped", "passed"}
    assert background.check.counts[Outcome.PASSED] >= 1


def test_a_removed_replica_drops_the_check():
    background = Background()

    def remove():
        if PAUSE_S in background.pauses:
            background.act = lambda: None
            background.host.retire(NotFound("gone"))

    background.act = remove
    background.run(3)
    assert background.check.counts[Outcome.DROPPED] == 1


def test_a_finding_is_reported_once_per_idle_period():
    background = Background()
    broken = specification_of(background.host.replica)
    broken.coordinator.pool.references[7] += 1
    background.host.replica.adopt(broken)
    assert background.run(60) == {"broken": 1}
    ((name, error),) = background.reports
    assert (name, error.invariant, str(error)) == ("r", "references", "block 7: 1 references, 0 holders")
    assert background.check.broken is error
    background.world.open().step()
    assert background.run(60) == {"broken": 2}


def test_a_state_that_cannot_be_read_is_a_finding(monkeypatch):
    monkeypatch.setenv("KVPLANE_CORE", "python")  # whose state this test can damage
    background = Background()
    del specification_of(background.host.replica).coordinator.pool.references[9:]
    assert background.run(60) == {"broken": 1}
    ((_, error),) = background.reports
    assert error.invariant == "readable"
    assert str(error) == "the state cannot be read: IndexError: list index out of range"


def test_a_compiled_core_is_checked_in_slices(monkeypatch):
    pytest.importorskip("kvplane_core.face.native", exc_type=ImportError)
    monkeypatch.setenv("KVPLANE_CORE", "native")
    background = Background()
    assert background.run(60) == {"passed": 1}
    assert background.pauses.count(PAUSE_S) > 20, "in slices"


def test_the_check_of_a_compiled_core_reads_nothing_after_a_change():
    """What a change has freed is never read, even by a caller that does not notice the change."""
    native = pytest.importorskip("kvplane_core.face.native", exc_type=ImportError)
    core = native.NativeReplica(spec_of(num_blocks=MANY_BLOCKS))
    slices = core.check_in_slices()
    next(slices)
    core.apply(Step(0, 1, [REQUEST]))
    with pytest.raises(AssertionError, match="the state changed during a walk over it"):
        next(slices)


def test_a_replica_whose_core_works_is_not_due():
    world = HostWorld()
    check = world.host.idle_check
    assert not check.is_due(0, 10)
    assert not check.is_due(9, 10)
    world.host.steps.in_core = True
    assert not check.is_due(10, 10)
    world.host.steps.in_core = False
    assert check.is_due(10, 10)


def test_the_length_of_a_log_line_is_bounded(caplog):
    with caplog.at_level(logging.ERROR):
        log_broken("r", BrokenInvariant("tables", "y" * 9000))
    assert "y" * MAX_CHARS in caplog.text
    assert "y" * (MAX_CHARS + 1) not in caplog.text
