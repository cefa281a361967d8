"""Restarts of the service under the reference engine: running requests keep their pages, and tokens are equal."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument, KvplaneError, Unavailable
from kvplane.base.session import Opened, OpenRequest, SessionTransport
from kvplane.base.step import Step, StepResult
from kvplane_core.face import loader
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.stamps import Contents
from tests.core.builders import full, replica_spec
from tests.engine.backends import Place
from tests.engine.stress import MIXES, Mix, Report, Side
from tests.engine.world import World
from tests.service.inprocess import InProcessTransport

EVERY = 4  # steps between restarts of the service
BY_NAME = {mix.name: mix for mix in MIXES}


class Restarting(World):
    """A world whose service can be restarted, with the entries of a store or without."""

    lives = 0

    def restart(self, with_entries: bool) -> None:
        old = self.host
        entry = self.registry.get(self.name)
        self.registry, self.lives = Registry(Config(), lambda: 0), self.lives + 1
        host = self.registry.register(self.name, entry.registration).host
        entries = [old.replica.entries()] if with_entries else []
        host.recover(Recovering(old.epoch, Contents(), loading=False, entries=entries))

    def transport(self) -> SessionTransport:
        return CutByRestarts(self)


class CutByRestarts(InProcessTransport):
    def __init__(self, world: Restarting) -> None:
        super().__init__(lambda name: world.registry.get(name).host)
        self._world = world
        self._opened_in = -1

    def open(self, request: OpenRequest) -> Opened:
        opened = super().open(request)
        self._opened_in = self._world.lives
        return opened

    def send(self, step: Step) -> None:
        if self._opened_in == self._world.lives:
            super().send(step)

    def receive(self) -> StepResult | KvplaneError:
        if self._opened_in != self._world.lives:
            raise Unavailable("the service has stopped")
        return super().receive()


def serve(mix: Mix, num_requests: int, seed: int) -> tuple[Report, Restarting, int]:
    """Serve requests with a restart every few steps. Returns how many requests were resumed."""
    ops = mix.backend(Place())
    world, report, resumed = Restarting(mix.pool, mix.config, ops=ops, lose_every=mix.lose_every), Report(), 0
    side = Side(world, seed, mix, report)
    side.start(num_requests)
    steps = 0
    while side.has_work:
        side.step()
        steps += 1
        world.check()
        resumed += world.host.replica.num_running if world.lives and steps % EVERY == 1 else 0
        if steps % EVERY == 0:
            world.restart(steps % (2 * EVERY) == 0)
    side.close()
    return report, world, resumed


@pytest.mark.parametrize("name", ["tight", "late reports", "dense states", "hits inside blocks"])
def test_resumed_requests_keep_their_pages(name):
    report, world, resumed = serve(BY_NAME[name], 5, 11)
    assert (report.differing, report.off) == (0, 0)
    assert world.session.resume_refused is None
    assert world.lives >= 5
    assert resumed >= world.lives // 2


def test_requests_are_preempted_after_a_failed_launch():
    report, world, _ = serve(BY_NAME["lost launches"], 4, 5)
    assert (report.differing, report.off) == (0, 0)
    assert world.session.resume_refused is None


def test_requests_are_preempted_when_the_image_is_refused(monkeypatch):
    kind = type(loader.new_replica(replica_spec(full())))
    apply = kind.apply

    def refuse(self: ReplicaCore, step: Step) -> StepResult:
        if any(part.resume is not None for part in step.parts):
            raise InvalidArgument("not today", field="parts[0].resume.blocks")
        return apply(self, step)

    monkeypatch.setattr(kind, "apply", refuse)
    report, world, resumed = serve(BY_NAME["tight"], 3, 11)
    assert (report.differing, report.off, resumed) == (0, 0, 0)
    assert "not today" in str(world.session.resume_refused)
    assert world.engine.counts.preempted > 0
