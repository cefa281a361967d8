"""The entries of the exported state of a replica (see `state`): made of a `Replica`, and loaded into one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any, Protocol

from kvplane.base.groups import EvictionPolicy, ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.stamps import Stamp
from kvplane_core.face.columns import SLICE_BLOCKS
from kvplane_core.face.contents import Content
from kvplane_core.face.counters import Counters, GroupUse, Residency, TierCounters
from kvplane_core.face.keys import Key
from kvplane_core.face.packed_values import pack_value
from kvplane_core.face.state import MAGIC, hasher_of, hasher_state, spec_digest
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.eviction import TurnTailList, WindowTailList
from kvplane_core.spec.hazard import check
from kvplane_core.spec.in_flight import Grants, InFlightTracker, Stay
from kvplane_core.spec.policies import HazardList, are_hints
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.requests import COLUMNS, Requests
from kvplane_core.spec.split import SplitPool
from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import Filled, Load, Location, Move, Save, Tiers


class Core(Protocol):
    """What an image has of a `Replica`."""

    spec: ReplicaSpec
    coordinator: Coordinator
    requests: Requests
    tracker: InFlightTracker
    counters: Counters
    seq: int
    _keeps_keys: bool
    _shown: Sequence[int]


POOL_COLUMNS = ("references", "key_tokens", "key_step", "stamp")
POOL_STATISTICS_COLUMNS = ("_born", "_used", "_last_use")
POOL_VALUES = ("generation", "epoch", "_counter", "step", "executed_through", "num_evictable", "reserved", "busy")
POOL_DERIVED = ("num_evictable",)
POOL_STATISTICS = ("_age_base", "evicted_keys", "registered")
REQUEST_VALUES = ("asked", "unserved", "num_running", "loading", "not_zeroed")


def encode(replica: Core, with_statistics: bool, hashed: bool) -> Iterator[bytes]:
    """Return the image of a replica, see `Replica.image`."""
    entries = entries_of(replica, with_statistics)
    pieces = [pack_value(name) + pack_value(value) for name, value in (map(_hashed, entries) if hashed else entries)]
    return iter([MAGIC, *pieces])


def _hashed(entry: tuple[str, Any]) -> tuple[str, object]:
    name, value = entry
    if name == "content":
        return name, [*value[:2], None]
    return name, value | {"by_service": [False] * len(value["by_service"])} if name == "requests" else value


# -- export ------------------------------------------------------------------------------------------------------------


def entries_of(replica: Core, with_statistics: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the entries of the state. The replica must not change before they are read."""
    pool, requests, tiers = replica.coordinator.pool, replica.requests, replica.coordinator.tiers
    assert not with_statistics or not pool.events, "export between two steps"
    yield "spec", spec_digest(replica.spec)
    yield "replica", [replica.seq, replica._keeps_keys, array("Q", replica._shown)]
    yield "pool", {name: getattr(pool, name) for name in POOL_VALUES}
    yield from ((f"pool.{name}", getattr(pool, name)) for name in POOL_COLUMNS)
    if tiers.each:  # replicas without tiers keep their earlier bytes
        yield "tiers", state_of(tiers)
    if isinstance(pool, SplitPool):
        yield "split", pool.free.state()
    if pool.retained.each:
        yield "retained", pool.retained.state()
    if pool.stamped:
        yield "stamped", list(pool.stamped)
    yield "free", array("I", pool.free)
    if policy := policy_state(replica):
        yield "eviction", policy
    yield from (("keys", run) for run in _key_runs(pool))
    yield "more_keys", {block: list(further.items()) for block, further in pool.more_keys.items()}
    yield "shared", sorted((key, blocks) for key, blocks in pool.index.items() if len(blocks) > 1)
    yield "requests", _request_columns(requests) | {name: getattr(requests, name) for name in REQUEST_VALUES}
    yield "tracker", _tracker_state(replica.tracker)
    for manager in replica.coordinator.managers:
        yield "manager", {name: getattr(manager, name) for name in manager.STATE}
    for slot in requests.slots():
        content = requests.content[slot]
        yield "content", [slot, content.digests, hasher_state(content.hasher) if content.hasher else None]
    yield from _statistics(replica) if with_statistics else ()


def _statistics(replica: Core) -> list[tuple[str, object]]:
    pool, tiers = replica.coordinator.pool, replica.coordinator.tiers
    return [
        ("counters", list(astuple(replica.counters))),
        ("residency", list(astuple(pool.residency))),
        ("pool_counters", {name: getattr(pool, name) for name in POOL_STATISTICS}),
        ("group_counters", [(manager.allocated, manager.adopted) for manager in replica.coordinator.managers]),
        *[(f"pool.{name}", getattr(pool, name)) for name in POOL_STATISTICS_COLUMNS],
        *([("tier_counters", counters_of(tiers))] if tiers.each else []),
    ]


def policy_state(replica: Core) -> list[Any]:
    """Return what the eviction policy has in addition to the order of the free blocks; nothing for LRU."""
    free = replica.coordinator.pool.free
    if not isinstance(free, WindowTailList):
        return []
    own: list[Any] = [free.superseded] if isinstance(free, TurnTailList) else []
    own = [*free.state(), replica.requests.hints] if isinstance(free, HazardList) else own
    return [replica.spec.eviction.value, sum(1 for _ in free.first()), replica.requests.hit_end, *own]


def _request_columns(requests: Requests) -> dict[str, list[Any]]:
    """Return the columns of all slots. Of a free slot only the serial is part of the state: its next request sets the
    rest.
    """
    live = requests.live
    columns: dict[str, list[Any]] = {}
    for name, none in COLUMNS.items():
        columns[name] = [one if is_live else none for one, is_live in zip(getattr(requests, name), live, strict=True)]
    columns["serial"] = requests.serial
    columns["ends_at"] = [requests.launch_end(slot) if runs else 0 for slot, runs in enumerate(requests.running)]
    return columns


def _key_runs(pool: BlockPool) -> Iterator[list[object]]:
    """Yield the primary keys of consecutive blocks, see `state`."""
    pairs: dict[tuple[str, int], int] = {}
    for start in range(0, pool.num_blocks, SLICE_BLOCKS):
        keys = [pool.key[block] for block in range(start, min(start + SLICE_BLOCKS, pool.num_blocks))]
        numbers = [0 if key is None else pairs.setdefault(key[:2], len(pairs)) + 1 for key in keys]
        yield [start, list(pairs), numbers, [key[2] for key in keys if key is not None]]


def _tracker_state(tracker: InFlightTracker) -> dict[str, object]:
    return {
        "grants": {seq: [one.slot, one.serial, one.num_tokens] for seq, one in tracker.grants.items()},
        "tentative": {seq: [(*stay, keys) for stay, keys in book.items()] for seq, book in tracker.tentative.items()},
        "adoptions": {
            seq: [(block, *stay) for block, stays in book.items() for stay in stays]
            for seq, book in tracker.adoptions.items()
        },
        "waiting": list(tracker.waiting),
        **{name: getattr(tracker, name) for name in ("held", "under_load", "filling")},
    }


# -- load --------------------------------------------------------------------------------------------------------------


def load_entries(replica: Core, entries: dict[str, list[Any]]) -> None:
    """Load entries, by name, into an empty replica.

    Raises LookupError, ValueError or TypeError if one is missing or damaged.
    """
    ((replica.seq, replica._keeps_keys, replica._shown),) = entries["replica"]
    (counters,) = entries["counters"]
    for name, value in zip([field.name for field in fields(Counters)], counters, strict=True):
        setattr(replica.counters, name, value)
    _load_pool(replica.coordinator.pool, entries)
    _load_requests(replica.requests, entries, HashScheme.of(replica.spec))
    check(are_hints(replica.spec, list(replica.requests.hints.values())), "hints")
    _load_tracker(replica.tracker, entries["tracker"][0])
    tiers = replica.coordinator.tiers
    if tiers.each or "tiers" in entries:
        load_tiers(tiers, entries["tiers"][0], entries["tier_counters"][0])
    for manager, state in zip(replica.coordinator.managers, entries["manager"], strict=True):
        for name in manager.STATE:
            setattr(manager, name, state[name])
    for manager, (allocated, adopted) in zip(replica.coordinator.managers, entries["group_counters"][0], strict=True):
        manager.allocated, manager.adopted = allocated, adopted


def _load_pool(pool: BlockPool, entries: dict[str, list[Any]]) -> None:
    for entry, names in (("pool", POOL_VALUES), ("pool_counters", POOL_STATISTICS)):
        for name in names:
            if name not in POOL_DERIVED:
                setattr(pool, name, entries[entry][0][name])
    for name in (*POOL_COLUMNS, *POOL_STATISTICS_COLUMNS):
        (column,) = entries[f"pool.{name}"]
        if len(column) != pool.num_blocks or type(column) is not type(getattr(pool, name)):
            raise ValueError(f"pool.{name} has {len(column)} entries")
        setattr(pool, name, column)
    pool.residency = Residency(*entries["residency"][0])
    pool._stamp_base = Stamp(pool.generation, pool.epoch, 0).pack()
    pool.stamped = dict.fromkeys(*entries.get("stamped", [()]))
    if isinstance(pool.free, WindowTailList):
        _, num_first, _, *others = entries["eviction"][0]
        pool.free.rebuild(entries["free"][0], num_first)
        if isinstance(pool.free, TurnTailList):
            (pool.free.superseded,) = others
        elif isinstance(pool.free, HazardList):
            pool.free.load(others[:-1])
    elif isinstance(pool, SplitPool):
        pool.free.load(entries["free"][0].tolist(), *entries["split"][0])
    else:
        pool.free.rebuild(entries["free"][0])
    pool.more_keys = {block: dict(further) for block, further in entries["more_keys"][0].items()}
    pool.key = _keys_of(entries["keys"], pool.num_blocks)
    for block, key in enumerate(pool.key):
        for one in () if key is None else (key, *pool.more_keys.get(block, ())):
            pool.index.setdefault(one, []).append(block)
    for (domain, group, digest), blocks in entries["shared"][0]:
        key = domain, group, digest
        if sorted(pool.index[key]) != sorted(blocks):
            raise ValueError("blocks of a shared key")
        pool.index[key][:] = blocks
    for retained in entries.get("retained", ()):
        pool.retained.load(retained)


def _keys_of(runs: Iterable[list[Any]], num_blocks: int) -> list[Key | None]:
    """Return the primary key of each block, from the entries of keys."""
    keys: list[Key | None] = []
    for start, pairs, numbers, digests in runs:
        if start != len(keys):
            raise ValueError("runs of keys")
        rest = iter(digests)
        keys += [(*pairs[number - 1], next(rest)) if number else None for number in numbers]
    if len(keys) != num_blocks:
        raise ValueError(f"{len(keys)} entries of keys")
    return keys


def _load_requests(requests: Requests, entries: dict[str, list[Any]], scheme: HashScheme) -> None:
    """Set the state of the requests from the entries `requests`, `content` and `eviction`."""
    (state,) = entries["requests"]
    for name in (*COLUMNS, *REQUEST_VALUES):
        setattr(requests, name, state[name])
    if "eviction" in entries:
        policy, _, requests.hit_end, *others = entries["eviction"][0]
        requests.hints = others[-1] if policy == EvictionPolicy.HAZARD.value else {}
    requests.content = [Content([]) for _ in requests.live]
    for slot, digests, hasher in entries.get("content", ()):
        requests.content[slot] = Content(digests, hasher_of(hasher, scheme) if hasher else None)


def _load_tracker(tracker: InFlightTracker, state: dict[str, Any]) -> None:
    tracker.grants = {seq: Grants(*columns) for seq, columns in state["grants"].items()}
    tracker.tentative = {
        seq: {Stay(slot, serial): keys for slot, serial, keys in book} for seq, book in state["tentative"].items()
    }
    tracker.adoptions = {}
    for seq, book in state["adoptions"].items():
        of_block = tracker.adoptions.setdefault(seq, {})
        for block, slot, serial in book:
            of_block.setdefault(block, []).append(Stay(slot, serial))
    tracker.waiting.clear()
    tracker.waiting.extend(state["waiting"])
    tracker.held, tracker.under_load, tracker.filling = state["held"], state["under_load"], state["filling"]


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
