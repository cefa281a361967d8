"""The metrics of tiers: what the core has ordered and knows, and what the workers report with their renewals.

A replica without tiers has no sample in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvplane.base.worker import TierUse
from kvplane_core.face.counters import GroupUse
from kvplane_core.face.interface import TierView
from kvplane_service.registry import Entry
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.telemetry.families import Family, Kind, Labelled, Values, counters, gauges


def _named(entry: Entry) -> Iterator[tuple[str, TierView]]:
    replica = entry.host.replica
    for tier, spec in zip(replica.tiers.each, replica.spec.tiers, strict=True):
        yield spec.kind.value, tier


def _info(entry: Entry) -> Values:
    tiers = entry.host.replica.spec.tiers
    return [((tier.kind.value, tier.save.value, str(tier.checkpoint_percent)), 1) for tier in tiers]


def _slots(entry: Entry) -> Values:
    for name, tier in _named(entry):
        held, shadows, retained, free = tier.num_held, tier.num_shadows, tier.num_retained, tier.num_free
        states = {"cached": held - shadows - retained, "shadow": shadows, "retained": retained, "free": free}
        states["in_use"] = tier.num_slots - held - free
        yield from (((name, state), count) for state, count in states.items())


def _by_group(kind: Kind, name: str, text: str, read: Callable[[GroupUse], int]) -> Family:
    def values(entry: Entry) -> Values:
        kinds = [group.kind.value for group in entry.host.replica.spec.groups]
        for tier_name, tier in _named(entry):
            sums: dict[str, int] = {}
            for group_kind, use in zip(kinds, tier.uses, strict=True):
                sums[group_kind] = sums.get(group_kind, 0) + read(use)
            yield from (((tier_name, group_kind), value) for group_kind, value in sums.items())

    return Family(kind, name, text, ("tier", "group_kind"), values)


def _hits(entry: Entry) -> Values:
    return [((name,), tier.hit_tokens) for name, tier in _named(entry)]


def _counts(name: str, text: str, *outcomes: str) -> Family:
    def values(host: ReplicaHost) -> Labelled:
        return ((outcome, getattr(host.replica.tiers.counters, outcome)) for outcome in outcomes)

    return counters(name, text, "outcome", values)


def _blocks_of(use: TierUse) -> Values:
    outcomes = ("saved", "loaded", "discarded", "refused", "failed")
    return [((outcome,), getattr(use, f"{outcome}_blocks")) for outcome in outcomes]


def _of_workers(kind: Kind, name: str, text: str, labels: tuple[str, ...], read: Callable[[TierUse], Values]) -> Family:
    def values(entry: Entry) -> Values:
        for worker in entry.workers.alive():
            for use in worker.tiers:
                yield from (((str(worker.rank), use.kind.value, *more), value) for more, value in read(use))

    return Family(kind, name, text, ("rank", "tier", *labels), values)


_FAMILIES = (
    Family(
        GaugeMetricFamily,
        "kvplane_tier_info",
        "Always 1; the labels are when the tier saves and its percentage for checkpoints, as in TierSpec.",
        ("tier", "save", "checkpoint_percent"),
        _info,
    ),
    Family(
        GaugeMetricFamily,
        "kvplane_tier_slots",
        "Slots of a tier: cached (with a key); shadow (with a key that the device has again, evicted first); retained "
        "(with a key of a retained prefix, evicted last); free; in_use (being written, or read without a key).",
        ("tier", "state"),
        _slots,
    ),
    _by_group(GaugeMetricFamily, "kvplane_tier_blocks", "Blocks that a tier has a copy of.", attrgetter("held")),
    _by_group(
        CounterMetricFamily,
        "kvplane_tier_stored_blocks",
        "Blocks that were saved into a tier, or moved to it.",
        attrgetter("stored"),
    ),
    _by_group(
        CounterMetricFamily,
        "kvplane_tier_loaded_blocks",
        "Blocks that were loaded from a tier.",
        attrgetter("loaded"),
    ),
    _by_group(
        CounterMetricFamily,
        "kvplane_tier_evicted_blocks",
        "Blocks whose slot was needed for another one.",
        attrgetter("evicted"),
    ),
    Family(
        CounterMetricFamily,
        "kvplane_tier_hit_tokens",
        "Tokens by which loads made hits longer than those of the device, by the farthest tier that the load read; "
        "kvplane_prefix_hit_tokens_total has them too.",
        ("tier",),
        _hits,
    ),
    _counts(
        "kvplane_tier_writes",
        "Blocks whose copy into a tier was ordered, by what became of it: saved from the device; moved from the tier "
        "before, or for a prefetch (prefetched has those alone); discarded (the source changed meanwhile); failed; "
        "no_slot (every slot was read or written).",
        *("saved", "moved", "prefetched", "discarded", "failed", "no_slot"),
    ),
    _counts(
        "kvplane_tier_loads",
        "Jobs that load what a hit lacks: loads were ordered; loads_failed did not end well, so requests compute.",
        *("loads", "loads_failed"),
    ),
    _counts(
        "kvplane_tier_loads_by_source",
        "Jobs that load, by what their hit is put together from: device_host, host_disk, device_host_disk; and those "
        "for which only windows (windows_alone) or only states (states_alone) were not on the device.",
        *("device_host", "host_disk", "device_host_disk", "windows_alone", "states_alone"),
    ),
    _counts(
        "kvplane_tier_declined_loads",
        "Admissions whose hit in the tiers was not loaded: too_slow (computing is faster); no_job (too many jobs; "
        "counts saves too); given_up (loads that no request waits for any more leave no room); waited (put off, once "
        "per step, until loads in flight end, which fill a quarter of the device).",
        *("too_slow", "no_job", "given_up", "waited"),
    ),
    gauges("kvplane_tier_jobs", "Copy jobs in flight.", "kind", lambda host: host.replica.tiers.open_jobs().items()),
    _of_workers(
        CounterMetricFamily,
        "kvplane_worker_tier_blocks",
        "Blocks that the copy engine of a worker saved into and loaded from a tier; discarded (a stamp had changed, "
        "the epoch had ended, or a peer had written its slot again); refused (the slot held something else, or was "
        "damaged); failed (errors of the disk, or a peer that is gone).",
        ("outcome",),
        _blocks_of,
    ),
    _of_workers(
        CounterMetricFamily,
        "kvplane_worker_tier_bytes",
        "Bytes of the blocks that were saved and loaded.",
        ("outcome",),
        lambda use: [(("saved",), use.saved_bytes), (("loaded",), use.loaded_bytes)],
    ),
    _of_workers(
        GaugeMetricFamily,
        "kvplane_worker_tier_suspended",
        "1 while a worker leaves a disk alone that failed several times in a row.",
        (),
        lambda use: [((), float(use.suspended))],
    ),
)


def collect(entries: Sequence[Entry]) -> Iterator[Metric]:
    """Yield the metric families of tiers, with the values of these replicas."""
    tiered = [entry for entry in entries if entry.host.replica.spec.tiers]
    return (family.collect(tiered) for family in _FAMILIES)
