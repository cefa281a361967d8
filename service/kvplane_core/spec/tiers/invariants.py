"""The invariants of a replica's tiers: each slot is in exactly one state, and the jobs have what they use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import MAX_VERSION, Tiers


def faults(tiers: Tiers, keyed: set[int]) -> Iterator[str]:
    """Yield what contradicts itself. `keyed`: those blocks of loads that have a key."""
    for tier in tiers.each:
        written = [write for write in tiers.jobs.writes() if write.tier == tier.number]
        yield from _faults_of_slots(tier, [write.slot for write in written])
        yield from _faults_of_keys(tier, tiers.last_job)
        yield from _faults_of_retained(tier)
        most = tiers.ids.start if not tier.number else tiers.each[tier.number - 1].num_slots
        if any(not 0 <= place < most for place in tier.wanted.version):
            yield f"tier {tier.number}: wants {len(tier.wanted)} places, below {most}"
        if not tier.wanted.is_early and (len(tier.wanted) or tier.wanted.recent):
            yield f"tier {tier.number}: wants something early with the policy {tier.wanted.policy.value}"
        if any(slot in tier.key or not 0 <= slot < tier.num_slots for slot in tier.stale):
            yield f"tier {tier.number}: a slot has a key, and holds what no key names"
        if sorted(tier.writing) != sorted({write.key for write in written}):
            yield f"tier {tier.number}: {len(tier.writing)} keys are being written, by {len(written)} jobs"
        rows = [row.source for load in tiers.jobs.loads.values() for row in load.rows]
        if tier.pins != Counter(source.slot for source in rows if source.tier == tier.number):
            yield f"tier {tier.number}: the pins are not those of the loads in flight"
    if tiers.depth != len(tiers.each):
        yield f"look-ups search {tiers.depth} of {len(tiers.each)} tiers"
    for slot, job in tiers.loading.items():
        load = tiers.jobs.loads.get(job)
        if load is None or load.request != slot:
            yield f"slot {slot} waits for load {job}, which is not in flight"
    if keyed:
        yield f"loads in flight fill blocks {sorted(keyed)[:9]}, which have keys"
    jobs = [*tiers.jobs.loads, *tiers.jobs.saves, *tiers.jobs.moves]
    if len(set(jobs)) != len(jobs) or any(job > tiers.last_job for job in jobs):
        yield f"two jobs have one number, or one above the last, {tiers.last_job}"


def _faults_of_slots(tier: Tier, written: list[int]) -> Iterator[str]:
    only_pinned = [slot for slot in tier.pins if slot not in tier.key]
    seen, count = bytearray(tier.num_used), 0
    for slot in chain(tier.free, tier.key, written, only_pinned):
        if not 0 <= slot < tier.num_used or seen[slot]:
            yield f"tier {tier.number}: slot {slot} has two states, or was never used"
            return
        seen[slot] = True
        count += 1
    if count != tier.num_used and not tier.is_of_peers:
        yield f"tier {tier.number}: {tier.num_used} slots were used, {count} have a state"


def _faults_of_keys(tier: Tier, last_job: int) -> Iterator[str]:
    last = MAX_VERSION if tier.is_of_peers else last_job
    count, held = 0, [0] * len(tier.uses)
    for key, slot in tier.in_order():
        held[key[1]] += 1
        if tier.key.get(slot) != key or not 0 < tier.version.get(slot, 0) <= last:
            yield f"tier {tier.number}: slot {slot} has another key than the one that leads to it, or no version"
        count += 1
    if count != len(tier.key) or count != len(tier.version):
        yield f"tier {tier.number}: {count} keys lead to {len(tier.key)} slots"
    if held != [use.held for use in tier.uses]:
        yield f"tier {tier.number}: the groups have {held} blocks, counted {[use.held for use in tier.uses]}"


def _faults_of_retained(tier: Tier) -> Iterator[str]:
    """Exactly the keys that are retained here, and are no shadows, are in the lists of their priorities."""
    slots = list(tier.retained)
    if sorted(slots) != sorted(tier.kept.values()) or len(slots) != tier.num_retained:
        yield f"tier {tier.number}: {len(tier.kept)} keys are retained, in {len(slots)} slots of {tier.num_retained}"
    expected = {slot: tier.priority_of(key) for key, slot in chain(tier.recent.items(), tier.kept.items())}
    if {slot: priority for slot, priority in expected.items() if priority is not None} != tier.retained.priority:
        yield f"tier {tier.number}: slots {slots[:9]} are retained, expected {list(expected.items())[:9]}"
    used = tier.used_by_owners()
    if any(count > tier.most_retained for count in used):
        yield f"tier {tier.number}: owners retain {used} keys, each at most {tier.most_retained}"
