"""The state of the compiled core as entries of the exported state, and back."""

from __future__ import annotations

import array as arrays
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from kvplane.base.groups import EvictionPolicy, ReplicaSpec
from kvplane.base.hashing import HashTail, RequestHasher
from kvplane.base.step import Step
from kvplane_service.core import state_entries as state
from kvplane_service.core.columns import SLICE_BLOCKS
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.keys import Key
from kvplane_service.core.native import _native, tiers
from kvplane_service.core.replica import Replica
from kvplane_service.core.requests import Requests
from kvplane_service.core.resume import ImagePool, Resumption
from kvplane_service.core.retained import DEVICE, kept_key
from kvplane_service.core.setup import smallest

if TYPE_CHECKING:
    from kvplane_service.core.native import NativeReplica

Words: TypeAlias = "arrays.array[int]"
_U32, _U64, _S64 = "I", "Q", "q"
_BLOCK_BYTES = 4
FLAGS = ("live", "running", "held", "skip_reading", "by_service")
SAME_VALUES = ("generation", "epoch", "step", "executed_through", "num_evictable", "reserved")
BOUNDS = ("fast_path_until", "alloc_bound", "window_bound", "register_bound")
COUNTERS = (
    "steps", "admitted", "ended", "preempted", "refused", "queried_tokens", "hit_tokens", "granted_tokens",
    "withdrawn_keys", "unaligned_chunks", "starved_chunks",
)  # fmt: skip


def dump_of(core: object, num_blocks: int) -> dict[str, Any]:
    """Return the whole state of a core. It is read in slices, so that other threads get the interpreter in between."""
    dump = _native.dump(core)
    dump["tiers"] = tiers.with_keys(core, dump["tiers"])
    slices = [_native.dump_blocks(core, first, SLICE_BLOCKS) for first in range(0, num_blocks, SLICE_BLOCKS)]
    for name, value in slices[0].items():
        values = [one[name] for one in slices]
        dump[name] = b"".join(values) if isinstance(value, bytes) else list(chain.from_iterable(values))
    free, count = [b""], min(SLICE_BLOCKS, num_blocks)
    while len(free) * count <= num_blocks + count:  # the list of a core that changes meanwhile might not end
        last = int.from_bytes(free[-1][-_BLOCK_BYTES:], sys.byteorder)
        free.append(_native.dump_free(core, last, count))
        if len(free[-1]) < count * _BLOCK_BYTES:
            break
    return dump | {"free": b"".join(free)}


def entries_of(core: NativeReplica, dump: dict[str, Any], with_statistics: bool) -> list[tuple[str, object]]:
    """Return the entries of the exported state of a core, in their order."""
    spec, domains = core.spec, dump["domains"]
    num_groups, key = len(spec.groups), tiers.unpacker(domains, spec)
    values = {name: dump[name] for name in SAME_VALUES} | {"_counter": dump["counter"], "busy": set(dump["busy"])}
    registered = [(block, key(one)) for block, one in dump["registered"]]
    before: list[tuple[str, object]] = [
        ("spec", state.spec_digest(spec)),
        ("replica", [dump["seq"], core._keeps_keys, arrays.array(_U64, core._shown)]),
        ("pool", values),
        ("pool.references", _column(_U32, dump["references"]).tolist()),
        ("pool.key_tokens", _column(_U32, dump["key_tokens"])),
        ("pool.key_step", _column(_U64, dump["key_step"])),
        ("pool.stamp", _column(_U64, dump["stamp"])),
        *([("tiers", tiers.entry_of(dump["tiers"], key))] if spec.tiers else []),
        *([("split", list(dump["split"]))] if dump["split"] else []),
        *([("retained", _retained(dump["retained"], domains, key))] if dump["retained"][0] else []),
        ("free", _column(_U32, dump["free"])),
    ]
    if spec.eviction is not EvictionPolicy.LRU:
        superseded = {block: bool(one) for block, one in dump["superseded"]}
        own: list[Any] = [superseded] if spec.eviction is EvictionPolicy.TURN_TAIL else []
        if spec.eviction is EvictionPolicy.HAZARD:
            own = [*_learnt(dump["hazard"]), dict(dump["hints"])]
        before.append(("eviction", [spec.eviction.value, dump["num_first"], dict(dump["hit_end"]), *own]))
    keys: list[tuple[str, object]] = [("keys", run) for run in _key_runs(dump, domains, num_groups)]
    more = {block: [(key(one), number) for one, number in further] for block, further in dump["more_keys"]}
    after: list[tuple[str, object]] = [
        ("more_keys", more),
        ("shared", sorted((key(one), blocks) for one, blocks in dump["shared"])),
        ("requests", _requests(dump, domains)),
        ("tracker", _tracker(dump, key)),
        *[("manager", _manager(one, key)) for one in dump["managers"]],
    ]
    tails = _native.hash_tails(core.core)
    for slot, (joined, size) in enumerate(dump["content"]):
        if dump["live"][slot]:
            digests = [joined[at : at + size] for at in range(0, len(joined), size)] if joined else []
            hasher = _hasher(core, slot, digests, tails[slot]) if dump["by_service"][slot] else None
            after.append(("content", [slot, digests, state.hasher_state(hasher) if hasher else None]))
    if not with_statistics:
        return before + keys + after
    return (
        before
        + keys
        + after
        + [
            ("counters", [dump[name] for name in COUNTERS]),
            ("residency", [dump["lifetime"], dump["idle_before_evict"], dump["reuse_gap"]]),
            (
                "pool_counters",
                {"_age_base": dump["age_base"], "evicted_keys": dump["evicted_keys"], "registered": registered},
            ),
            ("group_counters", [(one[5], one[6]) for one in dump["managers"]]),
            *[(f"pool._{name}", _column(_S64, dump[name]).tolist()) for name in ("born", "used", "last_use")],
            *([("tier_counters", tiers.counters_of(dump["tiers"]))] if spec.tiers else []),
        ]
    )


def _hasher(core: NativeReplica, slot: int, digests: list[bytes], tail: bytes | None) -> RequestHasher | None:
    if tail is None:
        return core.hashers.get(slot)
    scheme = core._scheme
    return RequestHasher(scheme, tail=HashTail(len(digests), digests[-1] if digests else scheme.none_hash, tail))


def _retained(dump: tuple[Any, ...], domains: list[str], key: Callable[[tuple[int, bytes]], Key]) -> list[Any]:
    """Return what is retained, as `RetainedBlocks.state` has it."""
    each, lists = dump
    by_priority: dict[int, list[int]] = {}
    for priority, block in lists:
        by_priority.setdefault(priority, []).append(block)
    return [
        [
            [owner, domains[domain], *others, [kept_key(key(one), place) for one, place in keys]]
            for owner, domain, *others, keys in each
        ],
        [list(one) for one in by_priority.items()],
    ]


def _learnt(dump: tuple[Any, ...]) -> list[Any]:
    """Return the owners of blocks, the prompts and the state of the learner, as `HazardList.state` has them."""
    owner, prompts, (names, following, *tables), (now, *rows), ghosts, duel = dump
    *columns, num_recent, victims, owners = ghosts
    keys, *others = map(_words, columns)
    hazards = [dict(names), following, *map(_words, tables)]
    ghost = [keys, others, num_recent, [_words(victims), _words(owners)]]
    learner = [hazards, [now, *map(_words, rows)], ghost, list(duel)]
    return [_words(owner), {slot: list(one) for slot, one in prompts}, learner]


def _packed_learnt(owner: Words, prompts: dict[int, list[int]], learner: list[Any]) -> tuple[Any, ...]:
    (names, following, *tables), (now, *rows), (keys, columns, num_recent, victims), duel = learner
    return (
        owner.tobytes(),
        [(slot, tuple(one)) for slot, one in prompts.items()],
        (list(names.items()), following, *(one.tobytes() for one in tables)),
        (now, *(one.tobytes() for one in rows)),
        (*(one.tobytes() for one in (keys, *columns)), num_recent, *(one.tobytes() for one in victims)),
        tuple(duel),
    )


def _words(raw: bytes) -> Words:
    return arrays.array(_U64, raw)


def loaded_copy(core: NativeReplica) -> Replica:
    """Return a `Replica` with the state of a core, in seconds for a million blocks."""
    replica, entries = Replica(core.spec), dict[str, list[Any]]()
    dump = dump_of(core.core, core.spec.num_blocks)
    for name, value in entries_of(core, dump, with_statistics=True):
        entries.setdefault(name, []).append(value)
    state.load_entries(replica, entries)
    replica.coordinator.pool.stamped = dict.fromkeys(dump["stamped"])
    return replica


def check_image(core: NativeReplica, step: Step, shown: Sequence[int]) -> None:
    """Raise InvalidArgument for an image that a `Replica` with the core's state would refuse, unless for the keys of
    other blocks. Takes time and memory for the requests alone.
    """
    dump, requests = _native.dump(core.core), Requests()
    entries: dict[str, list[Any]] = {"requests": [_requests(dump, dump["domains"])]}
    entries["content"] = [
        [slot, [joined[at : at + size] for at in range(0, len(joined), size)] if joined else [], None]
        for slot, (joined, size) in enumerate(dump["content"])
    ]
    state.load_requests(requests, entries, core._scheme)
    spec, reserved = core.spec, dump["reserved"]
    pool = ImagePool(spec.num_blocks, core.epoch, reserved, set(dump["busy"]), bool(dump["is_unused"]))
    Resumption(Coordinator(smallest(spec), requests), shown, pool).check_requests(step)


def _column(code: str, raw: bytes) -> arrays.array[int]:
    column = arrays.array(code)
    column.frombytes(raw)
    return column


def _key_runs(dump: dict[str, Any], domains: list[str], num_groups: int) -> Iterator[list[object]]:
    """Yield the entries of keys, as `state_entries.key_run` makes them."""
    numbers, names = {0: 0}, list[tuple[str, int]]()
    column, digests, sizes, at = _column(_U32, dump["key_pair"]), dump["digests"], iter(dump["digest_sizes"]), 0
    for start in range(0, len(column), SLICE_BLOCKS):
        run, found = column[start : start + SLICE_BLOCKS].tolist(), list[bytes]()
        for pair in run:
            if pair not in numbers:
                names.append((domains[(pair - 1) // num_groups], (pair - 1) % num_groups))
                numbers[pair] = len(names)
        for size in islice(sizes, len(run) - run.count(0)):
            found.append(digests[at : at + size])
            at += size
        yield [start, names[:], [numbers[pair] for pair in run], found]


def _requests(dump: dict[str, Any], domains: list[str]) -> dict[str, Any]:
    live = [bool(one) for one in dump["live"]]
    columns: dict[str, Any] = {name: dump[name] for name in state.REQUEST_COLUMNS if name not in (*FLAGS, "domain")}
    columns |= {name: [bool(one) for one in dump["held_slots" if name == "held" else name]] for name in FLAGS}
    columns["domain"] = [domains[one] if is_live else "" for one, is_live in zip(dump["domain"], live, strict=True)]
    for name, column in columns.items():
        none = type(column[0])() if column else None
        columns[name] = [one if is_live else none for one, is_live in zip(column, live, strict=True)]
    columns["serial"] = dump["serial"]
    ends = zip(columns["running"], dump["ends_at"], dump["computed"], strict=True)
    columns["ends_at"] = [max(end, computed) if runs else 0 for runs, end, computed in ends]
    return columns | {
        "asked": dict(dump["asked"]),
        "unserved": dict(dump["unserved"]),
        "num_running": dump["num_running"],
        "loading": set(dump["loading"]),
        "not_zeroed": set(dump["not_zeroed"]),
    }


def _tracker(dump: dict[str, Any], key: Callable[[tuple[int, bytes]], Key]) -> dict[str, object]:
    return {
        "grants": {seq: list(columns) for seq, columns in dump["grants"]},
        "tentative": {
            seq: [(*stay, [(block, key(one)) for block, one in keys]) for stay, keys in book]
            for seq, book in dump["tentative"]
        },
        "adoptions": {
            seq: [(block, *stay) for block, stays in book for stay in stays] for seq, book in dump["adoptions"]
        },
        "waiting": dump["waiting"],
        "held": dict(dump["held"]),
        "under_load": set(dump["under_load"]),
        "filling": dict(dump["filling"]),
    }


def _manager(packed: tuple[Any, ...], key: Callable[[tuple[int, bytes]], Key]) -> dict[str, object]:
    table, num_cached, partial_hit, copies, stores_empty, _, _, states = packed
    found = {
        "table": table,
        "num_cached": num_cached,
        "partial_hit": dict(partial_hit),
        "copies": copies,
        "stores_empty_ranges": stores_empty,
    }
    if states is not None:
        last_state, num_retired, has_allocated, stopped_at, last_checkpoints, registered = states
        found |= {
            "last_state": last_state,
            "num_retired": num_retired,
            "has_allocated": list(map(bool, has_allocated)),
            "_stopped_at": {slot: dict(ends) for slot, ends in stopped_at},
            "last_checkpoints": {slot: tuple(one) for slot, one in last_checkpoints},
            "_registered_this_step": set(map(key, registered)),
        }
    return found


def state_of(entries: dict[str, list[Any]], spec: ReplicaSpec) -> dict[str, Any]:
    """Return the state of the compiled core that has these entries."""
    domains, num_groups = dict[str, int](), len(spec.groups)

    def pack(key: tuple[str, int, bytes]) -> tuple[int, bytes]:
        domain, group, digest = key
        return domains.setdefault(domain, len(domains)) * num_groups + group + 1, digest

    (pool,), (counters,), (statistics,) = entries["pool"], entries["counters"], entries["pool_counters"]
    (requests,), (tracker,) = entries["requests"], entries["tracker"]
    pairs, of_keys = arrays.array(_U32), list[bytes]()
    for _, names, numbers, of_run in entries["keys"]:
        packed_names = [0, *(pack((*name, b""))[0] for name in names)]
        pairs.extend([packed_names[number] for number in numbers])
        of_keys += of_run
    contents: list[Any] = [(b"", 0)] * len(requests["live"])
    for slot, digests, _ in entries.get("content", ()):
        contents[slot] = (b"".join(digests), len(digests[0]) if digests else 0)
    residency = entries["residency"][0]
    policy, num_first, hit_end, *own = entries.get("eviction", [("", 0, {})])[0]
    packed = {name: pool[name] for name in SAME_VALUES} | {
        "seq": entries["replica"][0][0],
        "counter": pool["_counter"],
        "busy": sorted(pool["busy"]),
        "age_base": statistics["_age_base"],
        "references": arrays.array(_U32, entries["pool.references"][0]),
        "key_step": entries["pool.key_step"][0],
        "stamp": entries["pool.stamp"][0],
        **{name: arrays.array(_S64, entries[f"pool._{name}"][0]) for name in ("born", "used", "last_use")},
        "evicted_keys": statistics["evicted_keys"],
        "lifetime": residency[0],
        "idle_before_evict": residency[1],
        "reuse_gap": residency[2],
        "registered": [(block, pack(key)) for block, key in statistics["registered"]],
        "key_pair": pairs,
        "key_tokens": entries["pool.key_tokens"][0],
        "digests": b"".join(of_keys),
        "digest_sizes": bytes(map(len, of_keys)),
        "more_keys": [
            (block, [(pack(one), number) for one, number in further])
            for block, further in entries["more_keys"][0].items()
        ],
        "shared": [(pack(key), list(blocks)) for key, blocks in entries["shared"][0]],
        "free": entries["free"][0],
        "stamped": [],
        "split": tuple(entries["split"][0]) if "split" in entries else None,
        "num_first": num_first,
        "hit_end": list(hit_end.items()),
        "superseded": list(own[0].items()) if policy == EvictionPolicy.TURN_TAIL.value else [],
        "hints": list(own[-1].items()) if policy == EvictionPolicy.HAZARD.value else [],
        "hazard": _packed_learnt(*own[:3]) if policy == EvictionPolicy.HAZARD.value else None,
        "content": contents,
        "loading": sorted(requests["loading"]),
        "not_zeroed": sorted(requests["not_zeroed"]),
        "num_running": requests["num_running"],
        "domain": [domains.setdefault(one, len(domains)) for one in requests["domain"]],
        **_packed_tracker(tracker, pack),
        "managers": [
            _packed_manager(one, counts, pack)
            for one, counts in zip(entries["manager"], entries["group_counters"][0], strict=True)
        ],
        "asked": [(slot, tuple(one)) for slot, one in requests["asked"].items()],
        "unserved": list(requests["unserved"].items()),
        **dict(zip(COUNTERS, counters, strict=True)),
    }
    packed |= {name: requests[name] for name in state.REQUEST_COLUMNS if name not in (*FLAGS, "domain")}
    packed |= {"held_slots" if name == "held" else name: requests[name] for name in FLAGS}
    packed |= {name: [0] * len(requests["live"]) for name in BOUNDS}
    packed["retained"] = _packed_retained(entries, domains, pack)
    return packed | {"tiers": tiers.packed_of(entries, num_groups, pack), "domains": list(domains)}


def _packed_retained(
    entries: dict[str, list[Any]], domains: dict[str, int], pack: Callable[[Key], tuple[int, bytes]]
) -> tuple[list[Any], list[tuple[int, int]]]:
    each, lists = entries.get("retained", [([], [])])[0]
    retentions = [
        (
            owner,
            domains.setdefault(domain, len(domains)),
            *others,
            [(pack((domain, group, digest)), *(place or [DEVICE])) for group, digest, *place in keys],
        )
        for owner, domain, *others, keys in each
    ]
    return retentions, [(priority, block) for priority, blocks in lists for block in blocks]


def _packed_tracker(tracker: dict[str, Any], pack: Callable[[Key], tuple[int, bytes]]) -> dict[str, Any]:
    adoptions = []
    for seq, book in tracker["adoptions"].items():
        of_block: dict[int, list[tuple[int, int]]] = {}
        for block, slot, serial in book:
            of_block.setdefault(block, []).append((slot, serial))
        adoptions.append((seq, list(of_block.items())))
    return {
        "grants": [(seq, tuple(columns)) for seq, columns in tracker["grants"].items()],
        "tentative": [
            (seq, [((slot, serial), [(block, pack(key)) for block, key in keys_of]) for slot, serial, keys_of in book])
            for seq, book in tracker["tentative"].items()
        ],
        "adoptions": adoptions,
        "waiting": [tuple(one) for one in tracker["waiting"]],
        "held": list(tracker["held"].items()),
        "filling": list(tracker["filling"].items()),
        "under_load": sorted(tracker["under_load"]),
    }


def _packed_manager(
    one: dict[str, Any], counts: tuple[int, int], pack: Callable[[Key], tuple[int, bytes]]
) -> tuple[Any, ...]:
    partial_hit = [(slot, tuple(hit)) for slot, hit in one["partial_hit"].items()]
    states = None
    if "last_state" in one:
        states = (
            one["last_state"],
            one["num_retired"],
            one["has_allocated"],
            [(slot, list(ends.items())) for slot, ends in one["_stopped_at"].items()],
            [(slot, list(place)) for slot, place in one["last_checkpoints"].items()],
            list(map(pack, one["_registered_this_step"])),
        )
    return one["table"], one["num_cached"], partial_hit, one["copies"], one["stores_empty_ranges"], *counts, states
