"""The metrics of tiers: what the core has ordered and knows, and what the workers report with their renewals.

A replica without tiers has no sample in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvplane.base.worker import TierUse
from kvplane_core.face.counters import GroupUse
from kvplane_core.face.interface import ReplicaCore, TierView
from kvplane_service.registry import Entry

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_Values = Iterable[tuple[tuple[str, ...], float]]  # values of the labels after the replica's name, value

_COUNTS = (
    (
        "kvplane_tier_writes",
        "Blocks whose copy into a tier was ordered, by what became of it: saved from the device; moved from the tier "
        "before, or for a prefetch (prefetched has those alone); discarded (the source changed meanwhile); failed; "
        "no_slot (every slot was read or written).",
        ("saved", "moved", "prefetched", "discarded", "failed", "no_slot"),
    ),
    (
        "kvplane_tier_loads",
        "Jobs that load what a hit lacks: loads were ordered; loads_failed did not end well, so requests compute.",
        ("loads", "loads_failed"),
    ),
    (
        "kvplane_tier_loads_by_source",
        "Jobs that load, by what their hit is put together from: device_host, host_disk, device_host_disk; and those "
        "for which only windows (windows_alone) or only states (states_alone) were not on the device.",
        ("device_host", "host_disk", "device_host_disk", "windows_alone", "states_alone"),
    ),
    (
        "kvplane_tier_declined_loads",
        "Admissions whose hit in the tiers was not loaded: too_slow (computing is faster); no_job (too many jobs; "
        "counts saves too); given_up (loads that no request waits for any more leave no room); waited (put off, once "
        "per step, until loads in flight end, which fill a quarter of the device).",
        ("too_slow", "no_job", "given_up", "waited"),
    ),
)


def collect(entries: Sequence[Entry]) -> Iterator[Metric]:
    """Yield the metric families of tiers, with the values of these replicas."""
    tiered = [(entry.host.name, entry) for entry in entries if entry.host.replica.spec.tiers]
    replicas = [(name, entry.host.replica) for name, entry in tiered]
    settings = ("tier", "save", "checkpoint_percent")
    yield _family(GaugeMetricFamily, "kvplane_tier_info", _INFO, settings, replicas, _info)
    yield _family(GaugeMetricFamily, "kvplane_tier_slots", _SLOTS, ("tier", "state"), replicas, _slots)
    for kind, name, text, read in _BY_GROUP:
        yield _family(kind, name, text, ("tier", "group_kind"), replicas, lambda one, read=read: _by_group(one, read))  # type: ignore[misc]
    yield _family(CounterMetricFamily, "kvplane_tier_hit_tokens", _HITS, ("tier",), replicas, _hits)
    for name, text, outcomes in _COUNTS:
        yield _family(
            CounterMetricFamily,
            name,
            text,
            ("outcome",),
            replicas,
            lambda one, of=outcomes: _counts(one, of),  # type: ignore[misc]
        )
    yield _family(GaugeMetricFamily, "kvplane_tier_jobs", "Copy jobs in flight.", ("kind",), replicas, _jobs)
    for kind, name, text, labels, read_use in _OF_WORKERS:
        family = kind(name, text, labels=("replica", "rank", "tier", *labels))
        for replica, entry in tiered:
            for worker in entry.workers.alive():
                for use in worker.tiers:
                    for values, value in read_use(use):
                        family.add_metric((replica, str(worker.rank), use.kind.value, *values), value)
        yield family


def _family(
    kind: _Kind,
    name: str,
    text: str,
    labels: tuple[str, ...],
    replicas: Sequence[tuple[str, ReplicaCore]],
    read: Callable[[ReplicaCore], _Values],
) -> Metric:
    family = kind(name, text, labels=("replica", *labels))
    for replica, core in replicas:
        for values, value in read(core):
            family.add_metric((replica, *values), value)
    return family


def _named(replica: ReplicaCore) -> Iterator[tuple[str, TierView]]:
    for tier, spec in zip(replica.tiers.each, replica.spec.tiers, strict=True):
        yield spec.kind.value, tier


_INFO = "Always 1; the labels are when the tier saves and its percentage for checkpoints, as in TierSpec."


def _info(replica: ReplicaCore) -> _Values:
    return [((tier.kind.value, tier.save.value, str(tier.checkpoint_percent)), 1) for tier in replica.spec.tiers]


_SLOTS = (
    "Slots of a tier: cached (with a key); shadow (with a key that the device has again, evicted first); retained "
    "(with a key of a retained prefix, evicted last); free; in_use (being written, or read without a key)."
)


def _slots(replica: ReplicaCore) -> _Values:
    for name, tier in _named(replica):
        held, shadows, retained, free = tier.num_held, tier.num_shadows, tier.num_retained, tier.num_free
        states = {"cached": held - shadows - retained, "shadow": shadows, "retained": retained, "free": free}
        states["in_use"] = tier.num_slots - held - free
        yield from (((name, state), count) for state, count in states.items())


_BY_GROUP: tuple[tuple[_Kind, str, str, Callable[[GroupUse], int]], ...] = (
    (GaugeMetricFamily, "kvplane_tier_blocks", "Blocks that a tier has a copy of.", attrgetter("held")),
    (
        CounterMetricFamily,
        "kvplane_tier_stored_blocks",
        "Blocks that were saved into a tier, or moved to it.",
        attrgetter("stored"),
    ),
    (CounterMetricFamily, "kvplane_tier_loaded_blocks", "Blocks that were loaded from a tier.", attrgetter("loaded")),
    (
        CounterMetricFamily,
        "kvplane_tier_evicted_blocks",
        "Blocks whose slot was needed for another one.",
        attrgetter("evicted"),
    ),
)


def _by_group(replica: ReplicaCore, read: Callable[[GroupUse], int]) -> _Values:
    kinds = [group.kind.value for group in replica.spec.groups]
    for name, tier in _named(replica):
        sums: dict[str, int] = {}
        for kind, use in zip(kinds, tier.uses, strict=True):
            sums[kind] = sums.get(kind, 0) + read(use)
        yield from (((name, kind), value) for kind, value in sums.items())


_HITS = (
    "Tokens by which loads made hits longer than those of the device, by the farthest tier that the load read; "
    "kvplane_prefix_hit_tokens_total has them too."
)


def _hits(replica: ReplicaCore) -> _Values:
    return [((name,), tier.hit_tokens) for name, tier in _named(replica)]


def _counts(replica: ReplicaCore, outcomes: Sequence[str]) -> _Values:
    return [((outcome,), getattr(replica.tiers.counters, outcome)) for outcome in outcomes]


def _jobs(replica: ReplicaCore) -> _Values:
    return [((kind,), count) for kind, count in replica.tiers.open_jobs().items()]


def _blocks_of(use: TierUse) -> _Values:
    outcomes = ("saved", "loaded", "discarded", "refused", "failed")
    return [((outcome,), getattr(use, f"{outcome}_blocks")) for outcome in outcomes]


_OF_WORKERS: tuple[tuple[_Kind, str, str, tuple[str, ...], Callable[[TierUse], _Values]], ...] = (
    (
        CounterMetricFamily,
        "kvplane_worker_tier_blocks",
        "Blocks that the copy engine of a worker saved into and loaded from a tier; discarded (a stamp had changed, "
        "the epoch had ended, or a peer had written its slot again); refused (the slot held something else, or was "
        "damaged); failed (errors of the disk, or a peer that is gone).",
        ("outcome",),
        _blocks_of,
    ),
    (
        CounterMetricFamily,
        "kvplane_worker_tier_bytes",
        "Bytes of the blocks that were saved and loaded.",
        ("outcome",),
        lambda use: [(("saved",), use.saved_bytes), (("loaded",), use.loaded_bytes)],
    ),
    (
        GaugeMetricFamily,
        "kvplane_worker_tier_suspended",
        "1 while a worker leaves a disk alone that failed several times in a row.",
        (),
        lambda use: [((), float(use.suspended))],
    ),
)
