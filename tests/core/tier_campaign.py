"""`python -m tests.core.tier_campaign --runs N --base S`: random engines with tiers on every mix.

Exit 1 when a run breaks a rule, or when no load was seen. `--twins` says within how many runs each planted fault is
found; exit 1 if one is not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplane.base.step import PartResult, RemoveReason, Step
from kvplane_core.face.interface import Hit
from kvplane_core.spec import retaining
from kvplane_core.spec.facts import FactApplier
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.preempted import leave_hit
from kvplane_core.spec.tiers import tiers
from kvplane_core.spec.tiers.behind import SaveBehind
from kvplane_core.spec.tiers.loads import Choice, TierLoads
from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import Move, Tiers
from kvplane_core.spec.tiers.wanted import Wanted
from kvplane_service.replicas.events import EventLog, PublicationHold
from tests.core.test_page_contents import MIXES
from tests.core.test_tier_contents import run
from tests.core.tier_engine import TierMemory

MOST_RUNS = 1500
Wrapped = Callable[..., Any]


def _another_parent(real: Wrapped) -> Wrapped:
    """The key of the block before."""

    def fill(self: TierLoads, slot: int, block: int, one: Any) -> Any:
        return real(self, slot, block, one._replace(position=max(0, one.position - 1)))

    return fill


def _one_less(real: Wrapped) -> Wrapped:
    def split(self: TierLoads, hit: Any, gained: int) -> Any:
        plan = real(self, hit, gained)
        return plan if len(plan.missing) < 2 else plan._replace(missing=plan.missing[1:])

    return split


def _every_domain(real: Wrapped) -> Wrapped:
    def find(self: Tiers, key: Any) -> int | None:
        return next((at for domain in ("", "other") if (at := real(self, (domain, *key[1:]))) is not None), None)

    return find


def _forgotten(real: Wrapped) -> Wrapped:
    def close(self: InFlightTracker) -> list[int]:
        real(self)
        return []

    return close


def _kept(real: Wrapped) -> Wrapped:
    """Its keys count as executed."""

    def prepare_return(self: InFlightTracker, slot: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InFlightTracker, "note_keys", lambda self, slot, seq: self._blocks.pool.registered.clear())
            real(self, slot)

    return prepare_return


def _left(real: Wrapped) -> Wrapped:
    """Whatever the reason for the preemption."""

    def preempt(self: InFlightTracker, slot: int, *given: int) -> list[int]:
        leave_hit(self._blocks, slot)
        self.note_keys(slot, self._blocks.pool.step)
        return real(self, slot, *given)

    return preempt


def _copies_left(real: Wrapped) -> Wrapped:
    """Of evicted content, in tiers."""

    def evict(self: FactApplier, block: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tiers, "revoke", lambda self, block, key: None)
            return bool(real(self, block))

    return evict


def _known_slots_alone(real: Wrapped) -> Wrapped:
    """Slots that hold what no key names keep their version."""

    def revoke(self: Tiers, block: int, key: Any) -> None:
        stale = [tier.stale.copy() for tier in self.each]
        for tier in self.each:
            tier.stale.clear()
        real(self, block, key)
        for tier, slots in zip(self.each, stale, strict=True):
            tier.stale = slots

    return revoke


def _lasting(real: Wrapped) -> Wrapped:
    """After a hit that was too slow, look-ups leave out the farthest tiers."""

    def nearer(self: TierLoads, slot: int, limit: int, device: Any, plan: Any) -> Any:
        found = real(self, slot, limit, device, plan)
        self._tiers.depth = max(1, plan.farthest)
        return found

    return nearer


# Name -> (class, method, change). One rule has tests alone (`test_tiers`): that a load of a dropped key fails.
TWINS: dict[str, tuple[Any, str, Callable[[Any], object]]] = {
    "what a preempted request leaves is not withdrawn": (InFlightTracker, "prepare_return", lambda real: _kept(real)),
    "a request leaves a hit that is not loaded": (InFlightTracker, "preempt", lambda real: _left(real)),
    "saved before its step is executed": (SaveBehind, "_is_executed", lambda real: lambda self, block: True),
    "version of a slot not compared": (TierMemory, "read", lambda real: lambda self, slot, version: (
        self.slots[slot][1] if slot in self.slots else None
    )),
    "stamp of a saved page not compared": (TierLoads, "_source_is_intact", lambda real: lambda self, write: True),
    "source of a move not compared": (TierLoads, "_source_is_intact", lambda real: lambda self, write: (
        isinstance(write, Move) or real(self, write)
    )),
    "an eviction leaves copies in tiers": (FactApplier, "_evict", _copies_left),
    "an eviction leaves slots that no key names": (Tiers, "revoke", _known_slots_alone),
    "a key that only a store knows stays in tiers": (Tiers, "_note_unknown", lambda real: lambda self, shown: (
        real(self, shown), self.unknown.clear()
    )),
    "a slot gets another version while it is written": (tiers, "replace", lambda real: lambda write, **to: write),
    "look-ups stay shallow after a hit that was too slow": (TierLoads, "_nearer", _lasting),
    "used once, and saved": (Wanted, "_was_seen", lambda real: lambda self, key: True),
    "run before the load is done": (InFlightTracker, "loads_from_tiers", lambda real: lambda self, slot: False),
    "load before launches": (BlockPool, "last_use", lambda real: lambda self, blocks: 0),
    "slot written under a load": (Tier, "pin", lambda real: lambda self, slot: None),
    "domain not in the key": (Tiers, "_find_in_tiers", _every_domain),
    "a row of the hit left out": (TierLoads, "_split", _one_less),
    "key of another boundary": (TierLoads, "_fill", _another_parent),
    "pages of a load handed out in the next life": (InFlightTracker, "close", _forgotten),
    "slot leaked by a failed write": (Tiers, "end_write", lambda real: lambda self, job, write, is_good: (
        real(self, job, write, is_good) if is_good else self.each[write.tier].writing.discard(write.key)
    )),
    "block released under a load": (Tiers, "order", lambda real: _early_release(real)),
    "loads fill any share of the pool": (Tiers, "num_loading", lambda real: property(lambda self: 0)),
    "an admission waits for a load that was given up": (TierLoads, "_is_awaited", lambda real: lambda self, job: True),
    "a load without rows": (TierLoads, "choose", lambda real: _empty_load(real)),
    "slots stay where they were when a retention ends": (Tier, "place_again", lambda real: lambda self, key: None),
    "a key that its last slot lost stays retained": (Tier, "note_lost", lambda real: lambda self, key: None),
    "a share of a tier without an end": (retaining, "_most", lambda real: lambda blocks, percent: (
        [real(blocks, percent)[0], *(tier.num_slots for tier in blocks.pool.retained.tiers)]
    )),
    "events of tiers behind those of the device": (EventLog, "publish_step", lambda real: _tiers_last),
    "an eviction of a tier that is no event": (Tier, "take_events", lambda real: lambda self: (
        [event for event in real(self) if event.reason is not RemoveReason.EVICTED]
    )),
}  # fmt: skip


# Where the search for these begins, so that it need not play hundreds of runs: at the first that found them once.
FIRST_RUN = {
    "events of tiers behind those of the device": 47,
    "an eviction leaves slots that no key names": 43,
    "a key that only a store knows stays in tiers": 305,
    "loads fill any share of the pool": 421,
    "pages of a load handed out in the next life": 114,
    "version of a slot not compared": 29,
    "load before launches": 28,
}


def _tiers_last(self: EventLog, hold: PublicationHold, step: Step, parts: Sequence[PartResult]) -> None:
    """Of a whole step, not of each part."""
    shown = hold.step(step.seq, step.executed_through, [part.events for part in parts])
    self.publish(step.epoch, [*shown, *(event for part in parts for event in part.tier_events)])


def _early_release(real: Wrapped) -> Wrapped:
    """The request's reference is the only one to a block that a load fills."""

    def order(self: Tiers, columns: Any, row: Any) -> None:
        real(self, columns, row)
        if columns[0] == "load_job" and self._pool.references[row[4]] > 1:
            self._pool.release([row[4]])

    return order


def _empty_load(real: Wrapped) -> Wrapped:
    """A hit whose look-up needed a block that the hit does not."""

    def choose(self: TierLoads, slot: int, limit: int, device: Hit) -> Choice:
        found = real(self, slot, limit, device)
        if found.plan is not None or not self._tiers.has_keys:
            return found
        hit = self._find(slot, limit)
        bare = self._split(hit, hit.num_tokens - device.num_tokens)
        return Choice(bare if hit.num_tokens > device.num_tokens and not bare.missing else None)

    return choose


def runs_until_found(twin: str, base: int = 0) -> int:
    """The number of runs until one breaks a rule with this fault planted; 0 = none did."""
    owner, name, change = TWINS[twin]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        first = FIRST_RUN.get(twin, 1)
        for number in range(first, first + MOST_RUNS):
            mix = list(MIXES)[number % len(MIXES)]
            try:
                run(mix, base + number // len(MIXES))
            except AssertionError:
                return number - first + 1
    return 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--base", type=int, default=1)
    parser.add_argument("--twins", action="store_true")
    chosen = parser.parse_args()
    if chosen.twins:
        missed = 0
        for twin in TWINS:
            count = runs_until_found(twin, chosen.base)
            start = f" from run {FIRST_RUN[twin]} on" if twin in FIRST_RUN else ""
            print(f"{twin}: {f'{count} runs' if count else f'not within {MOST_RUNS}'}{start}", flush=True)
            missed += not count
        sys.exit(bool(missed))
    counts, broken = Counter[str](), 0
    for number in range(chosen.runs):
        mix, seed = list(MIXES)[number % len(MIXES)], chosen.base + number // len(MIXES)
        try:
            engine = run(mix, seed)
        except AssertionError as error:
            broken += 1
            print(f"run({mix!r}, {seed}): {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        counts["hits"] += engine.hits
        counts["kept over deaths of a worker"] += engine.kept_slots
        for name in (counters := engine.replica.coordinator.tiers.counters).__slots__:
            counts[name] += getattr(counters, name)
    print(f"{chosen.runs} runs, {broken} broken: {dict(counts)}")
    sys.exit(bool(broken) or not counts["loaded"])


if __name__ == "__main__":
    main()
