"""Applies whole steps to a core replica, numbered as by a synchronous engine."""

from __future__ import annotations

import random

from kvplane.base.step import Part, PartResult, Step, StepResult
from kvplane.blocking.session import Session
from kvplane_core.spec.replica import Replica
from tests.client.mini_engine import HYBRID, MiniEngine
from tests.client.proxy import CuttingProxy


class Stepper:
    """Applies parts, each call a step."""

    def __init__(self, replica: Replica, epoch: int = 1) -> None:
        self._replica = replica
        self._epoch = epoch
        self._seq = 0

    def __call__(self, *parts: Part) -> StepResult:
        self._seq += 1
        return self._replica.apply(Step(self._epoch, self._seq, list(parts), executed_through=self._seq - 1))


def check_over_cuts(session: Session, proxy: CuttingProxy) -> None:
    """Check that an engine gets the answers of a core in process while every tenth step's connection is cut."""
    reference = Replica(HYBRID)
    for epoch in range(1, session.epoch + 1):
        reference.begin_epoch(epoch)
    step, rng = Stepper(reference, session.epoch), random.Random(3)

    def ask(part: Part) -> PartResult:
        session.submit(part)
        if rng.random() < 0.1:
            proxy.cut()
        return session.receive().parts[0]

    def expect(part: Part) -> PartResult:
        answer = step(part).parts[0]
        answer.events = []
        return answer

    expected = MiniEngine(expect, seed=3).run()
    assert MiniEngine(ask, seed=3).run() == expected
