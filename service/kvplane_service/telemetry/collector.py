"""The metrics of a service as Prometheus metric families, read at each scrape.

Every value is a counter that the core or a `Tally` maintains, so a scrape iterates over no blocks. The values of labels
are bounded: registered replicas, kinds of groups, states and reasons; never a request, a hash or a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from kvplane.base.groups import GroupSpec
from kvplane.base.trace import parse_traceparent
from kvplane_core.face import loader
from kvplane_core.face.counters import GroupTotals
from kvplane_service.decisions.counters import REFUSALS, REMOVALS, STEP_BOUNDS_NS, Example, StepTimes
from kvplane_service.registry import Entry, Registry
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.telemetry import tiers
from kvplane_service.telemetry.families import Family, Labelled, counter, counters, gauge, gauges
from kvplane_service.telemetry.holds import BOUNDS_S, Holds

_NS = 1e-9
_MAX_STEPS_EXPONENT = 20  # histograms in steps have buckets up to 2^20 steps; longer spans count in the last bucket


def _blocks(host: ReplicaHost) -> Labelled:
    return host.replica.block_counts._asdict().items()


def _by_kind(host: ReplicaHost, value: Callable[[GroupSpec, GroupTotals], float]) -> Labelled:
    """Return, for each kind of group, the sum of a value over the groups of that kind."""
    sums: dict[str, float] = {}
    for group, totals in zip(host.replica.spec.groups, host.replica.group_totals(), strict=True):
        kind = group.kind.value
        sums[kind] = sums.get(kind, 0) + value(group, totals)
    return sums.items()


def _queried(host: ReplicaHost) -> Labelled:
    queried = host.replica.counters.queried_tokens
    return _by_kind(host, lambda group, _: queried if group.is_cached else 0)


def _of_core(name: str, help: str, count: str) -> Family:  # noqa: A002 - Prometheus' word
    return counter(name, help, lambda host: getattr(host.replica.counters, count))


_FAMILIES = (
    gauges(
        "kvplane_blocks",
        "Blocks by state: held by requests; busy (under loads of earlier epochs); cached and free; empty, free "
        "without a key; slack, with split pages: free without a key under superblocks in use, where no state fits.",
        "state",
        _blocks,
    ),
    gauges(
        "kvplane_keys",
        "Distinct keys of the prefix cache.",
        "group_kind",
        lambda host: _by_kind(host, lambda _, totals: totals.keys),
    ),
    gauges(
        "kvplane_core_info",
        "Always 1; the label is what applies the steps: python or native (compiled).",
        "core",
        lambda host: [(loader.core_of(host.replica), 1)],
    ),
    gauge("kvplane_running_requests", "Requests that hold blocks.", lambda host: host.replica.num_running),
    _of_core("kvplane_steps", "Steps applied.", "steps"),
    _of_core("kvplane_admitted_requests", "Admissions granted, including those after a preemption.", "admitted"),
    _of_core("kvplane_ended_requests", "Requests ended.", "ended"),
    _of_core("kvplane_granted_tokens", "Tokens granted.", "granted_tokens"),
    _of_core("kvplane_prefix_queried_tokens", "Tokens looked up by granted admissions.", "queried_tokens"),
    _of_core(
        "kvplane_unaligned_chunks",
        "Chunks that ended inside a state block, because no row of their step could hold a whole one.",
        "unaligned_chunks",
    ),
    _of_core(
        "kvplane_starved_chunks",
        "Rows that got no tokens after 64 such rows of the same request: earlier rows left less than one state block "
        "of each step's budget. The request waits while they continue; kvplane doctor has the remedy.",
        "starved_chunks",
    ),
    _of_core("kvplane_prefix_hit_tokens", "Tokens looked up by granted admissions that were hits.", "hit_tokens"),
    counters(
        "kvplane_group_queried_tokens",
        "Tokens looked up, counted once per group of the kind.",
        "group_kind",
        _queried,
    ),
    counters(
        "kvplane_group_hit_tokens",
        "Tokens of the blocks that hits adopted; windows and states adopt few.",
        "group_kind",
        lambda host: _by_kind(host, lambda group, totals: totals.adopted * group.block_size),
    ),
    counters(
        "kvplane_allocated_blocks",
        "Blocks allocated.",
        "group_kind",
        lambda host: _by_kind(host, lambda _, totals: totals.allocated),
    ),
    counters(
        "kvplane_removed_keys",
        "Keys removed from their block: " + ", ".join(REMOVALS.values()) + ".",
        "reason",
        lambda host: ((name, host.tally.removals[reason]) for reason, name in REMOVALS.items()),
    ),
    counters(
        "kvplane_preemptions",
        "Requests that lost their blocks before their end: out_of_blocks; taken_back (a failed step, or adopted keys "
        "that were withdrawn); went_back (rejected drafts or a failed load moved the request back behind states or "
        "windows that it held); engine (requested by the engine).",
        "reason",
        lambda host: ((reason.value, count) for reason, count in host.tally.preemptions.items()),
    ),
    counters(
        "kvplane_refusals",
        "Admissions not granted: " + ", ".join(REFUSALS.values()) + ".",
        "reason",
        lambda host: ((name, host.tally.refusals[status]) for status, name in REFUSALS.items()),
    ),
    gauge(
        "kvplane_waiting_requests",
        "Requests that wait for admission, as the engine reports it; absent if it does not.",
        lambda host: host.waiting_requests,
    ),
    gauge("kvplane_retained_prefixes", "Prefixes that are retained.", lambda host: host.replica.retained_counts[0]),
    gauge(
        "kvplane_retained_blocks",
        "Keys of blocks that retained prefixes name.",
        lambda host: host.replica.retained_counts[1],
    ),
    counters(
        "kvplane_retentions",
        "Prefixes that were to be retained or released: retained (or renewed), released, over_budget, "
        "over_host_budget, over_disk_budget, too_many, other_owner.",
        "outcome",
        lambda host: ((outcome.name.lower(), count) for outcome, count in host.tally.retentions.items()),
    ),
    counters(
        "kvplane_idle_checks",
        "Checks of the replica's state while it was idle: passed, dropped (the replica changed meanwhile), broken "
        "(an invariant is violated).",
        "outcome",
        lambda host: ((outcome.value, count) for outcome, count in host.idle_check.counts.items()),
    ),
    counter(
        "kvplane_canary_checks",
        "Hits that a canary of the engine has computed again and compared with their pages.",
        lambda host: host.tally.hits_checked,
    ),
    counter(
        "kvplane_canary_mismatches",
        "Blocks of these hits that had other content than their keys name; their keys were removed everywhere.",
        lambda host: host.tally.mismatches,
    ),
    counter("kvplane_lives", "Epochs started by sessions.", lambda host: host.tally.lives),
    counter("kvplane_lapses", "Expired leases of sessions.", lambda host: host.events.num_withdrawals),
    gauge(
        "kvplane_mirror_lag_steps",
        "Steps that a mirrored engine has applied and the service has not, as of the last message.",
        lambda host: host.mirror.lag_steps,
    ),
    gauge(
        "kvplane_mirror_lag_seconds",
        "Age of the last message of a mirrored engine when it was sent.",
        lambda host: host.mirror.lag_ms / 1000,
    ),
    counter(
        "kvplane_mirror_divergences",
        "Steps whose result differed from that of the mirrored engine.",
        lambda host: host.mirror.divergences,
    ),
    counter("kvplane_mirror_images", "Images of mirrored engines that were loaded.", lambda host: host.mirror.images),
    gauge(
        "kvplane_lease_left_seconds",
        "Time until the lease of the session expires; absent without a session.",
        lambda host: None if host.lease_left_ns is None else host.lease_left_ns * _NS,
    ),
    counter("kvplane_event_batches", "Batches of cache events published.", lambda host: host.events.last_seq),
    gauge("kvplane_event_subscribers", "Subscribers of the events.", lambda host: host.events.num_subscribers),
    gauge("kvplane_decisions", "Decisions in the log.", lambda host: len(host.decisions)),
    counter("kvplane_lost_decisions", "Decisions that the log has dropped.", lambda host: host.decisions.num_lost),
    gauges(
        "kvplane_log_bytes",
        "Bytes of a log of the replica: decisions or events.",
        "log",
        lambda host: [("decisions", host.decisions.num_bytes), ("events", host.events.num_bytes)],
    ),
    counters(
        "kvplane_lost_log_bytes",
        "Bytes of entries that a log has dropped.",
        "log",
        lambda host: [("decisions", host.decisions.lost_bytes), ("events", host.events.lost_bytes)],
    ),
    Family(
        GaugeMetricFamily,
        "kvplane_replica_info",
        "Always 1; the label is the owner that registered the replica, empty without auth_owners.",
        ("owner",),
        lambda entry: [((entry.registration.registered_by,), 1)],
    ),
)


def _no_store(_: Entry) -> StoreReport:
    return StoreReport(StoreState.OFF)


_HISTOGRAMS_IN_STEPS = (
    ("evicted_idle", "idle_before_evict", "Steps from the last use of a block to the eviction of its key."),
    ("block_lifetime", "lifetime", "Steps from an allocation of a block to its next allocation."),
    ("block_reuse", "reuse_gap", "Steps between two uses of a cached block."),
)


class ServiceCollector(Collector):
    """Collects all metrics of one service process. Call it on the event loop, so that the state does not change
    meanwhile.

    Args:
        registry: the replicas.
        report: returns the state of the store for a replica.
        holds: measured delays of the event loop.
    """

    def __init__(
        self,
        registry: Registry,
        report: Callable[[Entry], StoreReport] = _no_store,
        holds: Holds | None = None,
    ) -> None:
        self._registry = registry
        self._report = report
        self._holds = holds or Holds()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics (see prometheus_client.registry.Collector)."""
        yield from self._of_service()
        yield from self._of(list(self._registry))

    def parts(self) -> Iterator[list[Metric]]:
        """Yield the metrics in parts, so that the caller may run other tasks in between: first all families, with only
        the values of the service, then the values of one replica after the other. The values of one replica are
        consistent.
        """
        entries = list(self._registry)
        yield [*self._of_service(), *self._of([])]
        for entry in entries:
            yield list(self._of([entry]))

    def _of_service(self) -> Iterator[Metric]:
        yield _build_info()
        yield _states([entry.host for entry in self._registry])
        yield _held(self._holds)
        known, budget = self._registry, "Byte limit of the logs of all replicas together (log_bytes)."
        yield GaugeMetricFamily("kvplane_log_budget_bytes", budget, known.logs.max_bytes)
        room = "Largest number of replicas (max_replicas)."
        yield GaugeMetricFamily("kvplane_max_replicas", room, known.max_replicas)
        expired = "Replicas that nothing had used for replica_ttl_ms."
        yield CounterMetricFamily("kvplane_expired_replicas", expired, known.num_expired)
        services = GaugeMetricFamily(
            "kvplane_peer_service_followed",
            "1 while a service of peer_services says what its replicas hold; only where a replica here could load it.",
            labels=("service",),
        )
        if any(one.has_readers for one in self._registry.namespaces.values()):
            for address, is_followed in self._registry.peer_services.items():
                services.add_metric((address,), is_followed)
        yield services

    def _of(self, entries: Sequence[Entry]) -> Iterator[Metric]:
        """Yield the metric families that have a value per replica, with the values of these registered replicas."""
        hosts = [entry.host for entry in entries]
        for family in _FAMILIES:
            yield family.collect(entries)
        yield _step_seconds(hosts)
        for name, attribute, text in _HISTOGRAMS_IN_STEPS:
            histogram = HistogramMetricFamily(f"kvplane_{name}_steps", text, labels=("replica",))
            for host in hosts:
                counts: list[int] = getattr(host.replica.residency, attribute)
                histogram.add_metric((host.name,), _buckets_in_steps(counts), None)
            yield histogram
        yield from tiers.collect(entries)
        yield from _store([(entry.host.name, self._report(entry)) for entry in entries])


def _build_info() -> Metric:
    family = GaugeMetricFamily("kvplane_build_info", "Always 1; the version is a label.", labels=("version",))
    family.add_metric((version("kvplane"),), 1)
    return family


def _held(holds: Holds) -> Metric:
    family = HistogramMetricFamily(
        "kvplane_loop_held_seconds",
        "How long the event loop was blocked at a time, sampled 100 times a second; the service answers nothing "
        "meanwhile.",
        labels=(),
    )
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    family.add_metric((), list(zip(bounds, map(float, accumulate(holds.counts)), strict=True)), holds.sum_s)
    return family


def _states(hosts: Sequence[ReplicaHost]) -> Metric:
    states = ", ".join(f"`{state.value}`" for state in ReplicaState)
    family = GaugeMetricFamily("kvplane_replicas", f"Registered replicas by state: {states}.", labels=("state",))
    found = [host.state for host in hosts]
    for state in ReplicaState:
        family.add_metric((state.value,), found.count(state))
    return family


def _store(reports: Sequence[tuple[str, StoreReport]]) -> Iterator[Metric]:
    """Yield the metric families about the store, with values for the replicas that have a store."""
    lag = GaugeMetricFamily(
        "kvplane_store_lag_entries", "Changes that are not stored yet; absent without a store.", labels=("replica",)
    )
    age = GaugeMetricFamily(
        "kvplane_store_lag_seconds", "Age of the oldest change that is not stored yet.", labels=("replica",)
    )
    failures = CounterMetricFamily(
        "kvplane_store_failures", "Failed store calls of the whole service.", labels=("replica",)
    )
    for name, report in reports:
        if report.state is not StoreState.OFF:
            lag.add_metric((name,), report.lag_entries)
            age.add_metric((name,), report.lag_ms / 1000)
            failures.add_metric((name,), report.failures)
    yield from (lag, age, failures)


def _step_seconds(hosts: Sequence[ReplicaHost]) -> Metric:
    family = HistogramMetricFamily(
        "kvplane_step_seconds",
        "Allocator time per step, or per message of a step sent in parts; exemplars name the step.",
        labels=("replica",),
    )
    for host in hosts:
        times = host.tally.step_times
        family.add_metric((host.name,), _step_buckets(times), times.sum_ns * _NS)
    return family


def _step_buckets(times: StepTimes) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the cumulative buckets of step times, each with one step of that bucket as its exemplar (an example with
    its trace).
    """
    bounds = [*(str(bound * _NS) for bound in STEP_BOUNDS_NS), "+Inf"]
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for bound, count, example in zip(bounds, accumulate(times.counts), times.examples(), strict=True):
        if example is None:
            buckets.append((bound, float(count)))
        else:
            buckets.append((bound, float(count), Exemplar(_where(example), example.took_ns * _NS)))
    return buckets


def _where(example: Example) -> dict[str, str]:
    """Return the labels by which an operator finds the step: trace and span id if the engine sent a trace context,
    otherwise epoch and step number.
    """
    context = parse_traceparent(example.traceparent)
    if context is None:
        return {"epoch": str(example.epoch), "seq": str(example.seq)}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _buckets_in_steps(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative histogram buckets. Entry k of `counts` is the number of durations of 2^(k-1) to 2^k - 1 steps;
    entry 0 is that of durations within one step.
    """
    total = list(accumulate(counts))
    buckets = [(str(float((1 << k) - 1)), float(total[k])) for k in range(_MAX_STEPS_EXPONENT + 1)]
    return [*buckets, ("+Inf", float(total[-1]))]
