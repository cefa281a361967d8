"""What a compiled core leaves packed of events is what Python publishes of the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvplane.base.step import PartResult, Step, StepResult
from kvplane_service.core.replica import Replica
from kvplane_service.core.twin import TwinReplica
from kvplane_service.replicas.events import Batch, PublicationHold
from tests.core import page_engine, test_tier_contents
from tests.core.test_page_contents import CACHED_MIXES, run
from tests.service.test_packing import finish

native = pytest.importorskip(
    "kvplane_service.core.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)


class PackedTwins(TwinReplica):
    """Twins whose second core is also compared in what is published of its events."""

    def __init__(self, spec) -> None:
        super().__init__(Replica(spec), native.NativeReplica.of)
        self.published = self.read = self.of_tiers = 0
        self._forget()

    def _forget(self) -> None:
        self._of_first, self._of_second = PublicationHold(), PublicationHold()

    def enter_epoch(self, *arguments, **named) -> int:
        self._forget()
        return super().enter_epoch(*arguments, **named)

    def _compare(self, result: StepResult, other: StepResult) -> None:
        super()._compare(result, other)
        step = self._steps[-1]
        assert isinstance(self._second, native.NativeReplica)
        made = [[getattr(part, name) for part in result.parts] for name in ("hashed_facts", "hashed_news")]
        assert made == [[getattr(part, name) for part in other.parts] for name in ("hashed_facts", "hashed_news")]
        self._publish(step, result.parts, other.parts)

    def _publish(self, step: Step, first: Sequence[PartResult], second: Sequence[PartResult]) -> None:
        at = step.seq, step.executed_through
        shown = self._of_first.step(*at, [part.events for part in first])
        shares = self._of_second.step_packed(*at, [part.events for part in second])
        if shares is None:
            self.read += 1
            others = self._of_second.step(*at, [part.events for part in second])
            assert finish(Batch(0, 0, others).pack()) == finish(Batch(0, 0, shown).pack())
            return
        for part, of_second in zip(first, second, strict=True):
            if part.tier_events:
                shown += part.tier_events
                assert isinstance(of_second.tier_events, native.views.NativeTierEvents)
                shares += of_second.tier_events.shares()
                self.of_tiers += 1
        if shares:
            self.published += 1
            raw = shares[0][0].pack(bytes(9), shares)
            assert raw == bytes(9) + finish(Batch(0, 0, shown).pack())[9:]
        else:
            assert not shown


MIXES_OF_TWINS = [mix for mix in CACHED_MIXES if "tiers" not in mix]


@contextmanager
def packed_twins() -> Iterator[list[PackedTwins]]:
    """Let the replicas of page engines be such twins."""
    replicas = list[PackedTwins]()

    def make(spec):
        replicas.append(PackedTwins(spec))
        return replicas[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page_engine, "new_replica", make)
        yield replicas


@pytest.fixture
def made():
    """The replicas of page engines."""
    with packed_twins() as replicas:
        yield replicas


@pytest.mark.parametrize("mix", MIXES_OF_TWINS)
def test_events_are_published_alike(made, mix):
    for seed in range(2):
        run(mix, seed)
    assert sum(one.published for one in made) > 0


@pytest.mark.parametrize("mix", ["window and full", "states and full"])
def test_events_of_tiers_are_published_alike(made, mix):
    for seed in range(4):
        test_tier_contents.run(mix, seed)
    assert sum(one.of_tiers for one in made) > 50


def test_events_that_concern_held_ones_are_played(made):
    """The marks of such events make the service read them."""
    for seed in range(4):
        run("window and full", seed)
    assert sum(one.read for one in made) > 0
