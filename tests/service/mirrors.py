"""Random engines that decide in this process, and the messages of their mirrors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import MirrorTerms, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.wire.mirror import Mirrored, answer_digest
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.open_step import OpenStep
from kvplane_core.spec.replica import Replica
from tests.core.builders import SAFE, replica_spec
from tests.core.test_open_step import Engine
from tests.core.test_step_law import MIXES

EPOCH, LIFE = 7, 4242


def spec_of(mix: str, commit=SAFE):
    groups, changes = MIXES[mix]
    return replica_spec(*groups, num_blocks=20, commit=commit, **changes)


def renumbered(spec: ReplicaSpec) -> ReplicaSpec:
    """The spec with other numbers for its look-up classes: it decides equally."""
    groups = zip(spec.groups, spec.lookup_classes, strict=True)
    return replace(spec, groups=tuple(replace(group, lookup_class=3 * number + 2) for group, number in groups))


class DecidingEngine(Engine):
    """Applies random rows to its own replica and keeps each step with its answer for a mirror."""

    def __init__(self, spec, seed, epoch: int = EPOCH) -> None:
        super().__init__(spec, seed)
        for replica in (self.replica, self.follower):
            replica.begin_epoch(epoch)
        self.epoch = epoch
        self.sent: list[tuple[Step, StepResult]] = []

    def run_step(self) -> None:
        with pytest.MonkeyPatch.context() as patched:
            before = OpenStep.close

            def close(step: OpenStep) -> StepResult:
                result = before(step)
                self.sent.append((step.recorded(), result))
                return result

            patched.setattr(OpenStep, "close", close)
            super().run_step()

    def message(self, at: int = -1) -> list[Mirrored]:
        step, result = self.sent[at]
        return [Mirrored(step, answer_digest(result))]

    def image(self) -> bytes:
        return export_state(self.replica)


def open_request(nonce: int, epoch: int = EPOCH, life: int = LIFE, incarnation: int = 9, **terms) -> OpenRequest:
    mirror = MirrorTerms(**{"commit": SAFE, **terms})
    return OpenRequest("r", nonce, epoch, incarnation=incarnation, life_nonce=life, mirror=mirror)


def same_state(one: Replica, other: Replica) -> bool:
    """Whether later answers of both are equal."""
    return digest(one) == digest(other)
