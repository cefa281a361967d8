"""Applies whole steps to a core replica, numbered as by a synchronous engine."""

from __future__ import annotations

from kvplane.base.step import Part, Step, StepResult
from kvplane_service.core.replica import Replica


class Stepper:
    """Applies parts, each call a step."""

    def __init__(self, replica: Replica, epoch: int = 1) -> None:
        self._replica = replica
        self._epoch = epoch
        self._seq = 0

    def __call__(self, *parts: Part) -> StepResult:
        self._seq += 1
        return self._replica.apply(Step(self._epoch, self._seq, list(parts), executed_through=self._seq - 1))
