"""The exported state of a replica's tiers (see `core.state`): made of `Tiers`, and loaded into it."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from kvplane_core.face.counters import GroupUse, TierCounters
from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import Filled, Load, Location, Move, Save, Tiers


def state_of(tiers: Tiers) -> list[object]:
    """Return the state of the tiers: numbers, the slots of each tier, and the jobs in flight by kind."""
    jobs = tiers.jobs
    loads = [(job, *load[:4], [(*row[:5], tuple(row.source)) for row in load.rows]) for job, load in jobs.loads.items()]
    return [
        [tiers.last_job, tiers.demand, tiers.demand_now, tiers.costs_ns, tiers.waits_in],
        [_state_of(tier) for tier in tiers.each],
        loads,
        [(job, *astuple(save)) for job, save in jobs.saves.items()],
        [(job, move.key, *move.source, move.tier, move.slot) for job, move in jobs.moves.items()],
        list(tiers.loading.items()),
        [sorted(tiers.unknown), *(sorted(tier.stale) for tier in tiers.each)],
    ]


def _state_of(tier: Tier) -> list[object]:
    rows = [(key, slot, tier.version[slot]) for key, slot in tier.in_order()]  # which are retained follows from the key
    shadows, recent = rows[: tier.num_shadows], rows[tier.num_shadows :]
    wanted = [tier.wanted.state()] if tier.wanted.is_early else []
    return [tier.num_slots, tier.num_used, tier.free, shadows, recent, *wanted]


def counters_of(tiers: Tiers) -> list[object]:
    """Return the statistics of the tiers, which decide nothing: of all, then of each one."""
    of_each = [[tier.hit_tokens, *[use for one in tier.uses for use in astuple(one)[1:]]] for tier in tiers.each]
    return [list(astuple(tiers.counters)), *of_each]


def load_tiers(tiers: Tiers, state: list[Any], counters: list[list[int]]) -> None:
    """Load the state into tiers that were not used. Raises ValueError if it is that of other tiers."""
    numbers, each, loads, saves, moves, loading, *rest = state
    tiers.last_job, tiers.demand, tiers.demand_now, tiers.costs_ns, tiers.waits_in = numbers
    if [tier.num_slots for tier in tiers.each] != [one[0] for one in each]:
        raise ValueError(f"tiers of {[one[0] for one in each]} slots")
    tiers.counters = TierCounters(*counters[0])
    of_tiers = zip(tiers.each, each, counters[1:], strict=True)
    for tier, (_, num_used, free, shadows, recent, *wanted), (hits, *uses) in of_tiers:
        tier.num_used, tier.free, tier.hit_tokens = num_used, list(free), hits
        if tier.wanted.is_early or wanted:
            tier.wanted.load(*wanted)
        tier.uses = [GroupUse(0, *row) for row in zip(uses[::3], uses[1::3], uses[2::3], strict=True)]
        for key, slot, version in (*shadows, *recent):
            tier.hold(key, slot, version)
        for key, _, _ in shadows:
            tier.make_shadow(key)
    for job, request, serial, num_tokens, after, rows in loads:
        filled = [
            Filled(block, stamp, key, tokens, parent, Location(*source))
            for block, stamp, key, tokens, parent, source in rows
        ]
        load = Load(request, serial, num_tokens, after, filled)
        tiers.jobs.loads[job] = load
        for row in load.rows:
            pins = tiers.each[row.source.tier].pins
            pins[row.source.slot] = pins.get(row.source.slot, 0) + 1
    for job, *row in saves:
        tiers.jobs.saves[job] = Save(*row)
    for job, key, number, slot, version, *target in moves:
        tiers.jobs.moves[job] = Move(key, Location(number, slot, version), *target)
    for write in tiers.jobs.writes():
        tiers.each[write.tier].writing.add(write.key)
    tiers.loading = dict(loading)
    unknown, *stale = rest[0] if rest else [()] * (1 + len(tiers.each))  # before core version 5 there was no such entry
    tiers.unknown = set(unknown)
    for tier, slots in zip(tiers.each, stale, strict=True):
        tier.stale = set(slots)
