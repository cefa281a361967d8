"""The metrics of a service as Prometheus metric families, read at each scrape.

Every value is a counter that the core or a `Tally` maintains, so a scrape iterates over no blocks. The values of labels
are bounded: registered replicas, kinds of groups, states and reasons; never a request, a hash or a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from kvplane_service.telemetry.holds import BOUNDS_S, Holds

_NS = 1e-9
_MAX_STEPS_EXPONENT = 20  # histograms in steps have buckets up to 2^20 steps; longer spans count in the last bucket

Values = Iterable[tuple[tuple[str, ...], float]]  # label values after the replica's name, value


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family (counter or gauge) with values for each replica."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[ReplicaHost], Values]

    def collect(self, hosts: Sequence[ReplicaHost]) -> Metric:
        """Return the metric family with the current values of these replicas."""
        family = self.kind(self.name, self.help, labels=("replica", *self.labels))
        for host in hosts:
            for labels, value in self.read(host):
                family.add_metric((host.name, *labels), value)
        return family


def _counter(name: str, help: str, read: Callable[[ReplicaHost], float]) -> Family:  # noqa: A002 - Prometheus' word
    return Family(CounterMetricFamily, name, help, (), lambda host: [((), read(host))])


def _gauge(name: str, help: str, read: Callable[[ReplicaHost], float]) -> Family:  # noqa: A002
    return Family(GaugeMetricFamily, name, help, (), lambda host: [((), read(host))])


def _blocks(host: ReplicaHost) -> Values:
    return [((state,), count) for state, count in host.replica.block_counts._asdict().items()]


def _by_kind(host: ReplicaHost, value: Callable[[GroupSpec, GroupTotals], float]) -> Values:
    """Return, for each kind of group, the sum of a value over the groups of that kind."""
    sums: dict[str, float] = {}
    for group, totals in zip(host.replica.spec.groups, host.replica.group_totals(), strict=True):
        kind = group.kind.value
        sums[kind] = sums.get(kind, 0) + value(group, totals)
    return [((kind,), value) for kind, value in sums.items()]


def _queried(host: ReplicaHost) -> Values:
    queried = host.replica.counters.queried_tokens
    return _by_kind(host, lambda group, _: queried if group.is_cached else 0)


def _hit(host: ReplicaHost) -> Values:
    return _by_kind(host, lambda group, totals: totals.adopted * group.block_size)


def _keys(host: ReplicaHost) -> Values:
    return _by_kind(host, lambda _, totals: totals.keys)


def _core(host: ReplicaHost) -> Values:
    return [((loader.core_of(host.replica),), 1)]


_FAMILIES = (
    Family(
        GaugeMetricFamily,
        "kvplane_blocks",
        "Blocks by state: held by requests; busy (under loads of earlier epochs); cached and free; empty, free "
        "without a key; slack, with split pages: free without a key under superblocks in use, where no state fits.",
        ("state",),
        _blocks,
    ),
    Family(GaugeMetricFamily, "kvplane_keys", "Distinct keys of the prefix cache.", ("group_kind",), _keys),
    Family(
        GaugeMetricFamily,
        "kvplane_core_info",
        "Always 1; the label is what applies the steps: python or native (compiled).",
        ("core",),
        _core,
    ),
    _gauge("kvplane_running_requests", "Requests that hold blocks.", lambda host: host.replica.num_running),
    _counter("kvplane_steps", "Steps applied.", lambda host: host.replica.counters.steps),
    _counter(
        "kvplane_admitted_requests",
        "Admissions granted, including those after a preemption.",
        lambda host: host.replica.counters.admitted,
    ),
    _counter("kvplane_ended_requests", "Requests ended.", lambda host: host.replica.counters.ended),
    _counter("kvplane_granted_tokens", "Tokens granted.", lambda host: host.replica.counters.granted_tokens),
    _counter(
        "kvplane_prefix_queried_tokens",
        "Tokens looked up by granted admissions.",
        lambda host: host.replica.counters.queried_tokens,
    ),
    _counter(
        "kvplane_unaligned_chunks",
        "Chunks that ended inside a state block, because no row of their step could hold a whole one.",
        lambda host: host.replica.counters.unaligned_chunks,
    ),
    _counter(
        "kvplane_starved_chunks",
        "Rows that got no tokens after 64 such rows of the same request: earlier rows left less than one state block "
        "of each step's budget. The request waits while they continue; kvplane doctor has the remedy.",
        lambda host: host.replica.counters.starved_chunks,
    ),
    _counter(
        "kvplane_prefix_hit_tokens",
        "Tokens looked up by granted admissions that were hits.",
        lambda host: host.replica.counters.hit_tokens,
    ),
    Family(
        CounterMetricFamily,
        "kvplane_group_queried_tokens",
        "Tokens looked up, counted once per group of the kind.",
        ("group_kind",),
        _queried,
    ),
    Family(
        CounterMetricFamily,
        "kvplane_group_hit_tokens",
        "Tokens of the blocks that hits adopted; windows and states adopt few.",
        ("group_kind",),
        _hit,
    ),
    Family(
        CounterMetricFamily,
        "kvplane_allocated_blocks",
        "Blocks allocated.",
        ("group_kind",),
        lambda host: _by_kind(host, lambda _, totals: totals.allocated),
    ),
    Family(
        CounterMetricFamily,
        "kvplane_removed_keys",
        "Keys removed from their block: " + ", ".join(REMOVALS.values()) + ".",
        ("reason",),
        lambda host: [((name,), host.tally.removals[reason]) for reason, name in REMOVALS.items()],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_preemptions",
        "Requests that lost their blocks before their end: out_of_blocks; taken_back (a failed step, or adopted keys "
        "that were withdrawn); went_back (rejected drafts or a failed load moved the request back behind states or "
        "windows that it held); engine (requested by the engine).",
        ("reason",),
        lambda host: [((reason.value,), count) for reason, count in host.tally.preemptions.items()],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_refusals",
        "Admissions not granted: " + ", ".join(REFUSALS.values()) + ".",
        ("reason",),
        lambda host: [((name,), host.tally.refusals[status]) for status, name in REFUSALS.items()],
    ),
    Family(
        GaugeMetricFamily,
        "kvplane_waiting_requests",
        "Requests that wait for admission, as the engine reports it; absent if it does not.",
        (),
        lambda host: [] if host.waiting_requests is None else [((), host.waiting_requests)],
    ),
    _gauge("kvplane_retained_prefixes", "Prefixes that are retained.", lambda host: host.replica.retained_counts[0]),
    _gauge(
        "kvplane_retained_blocks",
        "Keys of blocks that retained prefixes name.",
        lambda host: host.replica.retained_counts[1],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_retentions",
        "Prefixes that were to be retained or released: retained (or renewed), released, over_budget, "
        "over_host_budget, over_disk_budget, too_many, other_owner.",
        ("outcome",),
        lambda host: [((outcome.name.lower(),), count) for outcome, count in host.tally.retentions.items()],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_idle_checks",
        "Checks of the replica's state while it was idle: passed, dropped (the replica changed meanwhile), broken "
        "(an invariant is violated).",
        ("outcome",),
        lambda host: [((outcome.value,), count) for outcome, count in host.idle_check.counts.items()],
    ),
    _counter(
        "kvplane_canary_checks",
        "Hits that a canary of the engine has computed again and compared with their pages.",
        lambda host: host.tally.hits_checked,
    ),
    _counter(
        "kvplane_canary_mismatches",
        "Blocks of these hits that had other content than their keys name; their keys were removed everywhere.",
        lambda host: host.tally.mismatches,
    ),
    _counter("kvplane_lives", "Epochs started by sessions.", lambda host: host.tally.lives),
    _counter("kvplane_lapses", "Expired leases of sessions.", lambda host: host.events.num_withdrawals),
    _gauge(
        "kvplane_mirror_lag_steps",
        "Steps that a mirrored engine has applied and the service has not, as of the last message.",
        lambda host: host.mirror.lag_steps,
    ),
    _gauge(
        "kvplane_mirror_lag_seconds",
        "Age of the last message of a mirrored engine when it was sent.",
        lambda host: host.mirror.lag_ms / 1000,
    ),
    _counter(
        "kvplane_mirror_divergences",
        "Steps whose result differed from that of the mirrored engine.",
        lambda host: host.mirror.divergences,
    ),
    _counter("kvplane_mirror_images", "Images of mirrored engines that were loaded.", lambda host: host.mirror.images),
    Family(
        GaugeMetricFamily,
        "kvplane_lease_left_seconds",
        "Time until the lease of the session expires; absent without a session.",
        (),
        lambda host: [] if host.lease_left_ns is None else [((), host.lease_left_ns * _NS)],
    ),
    _counter("kvplane_event_batches", "Batches of cache events published.", lambda host: host.events.last_seq),
    _gauge("kvplane_event_subscribers", "Subscribers of the events.", lambda host: host.events.num_subscribers),
    _gauge("kvplane_decisions", "Decisions in the log.", lambda host: len(host.decisions)),
    _counter("kvplane_lost_decisions", "Decisions that the log has dropped.", lambda host: host.decisions.num_lost),
    Family(
        GaugeMetricFamily,
        "kvplane_log_bytes",
        "Bytes of a log of the replica: decisions or events.",
        ("log",),
        lambda host: [(("decisions",), host.decisions.num_bytes), (("events",), host.events.num_bytes)],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_lost_log_bytes",
        "Bytes of entries that a log has dropped.",
        ("log",),
        lambda host: [(("decisions",), host.decisions.lost_bytes), (("events",), host.events.lost_bytes)],
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
        budget = GaugeMetricFamily(
            "kvplane_log_budget_bytes", "Byte limit of the logs of all replicas together (log_bytes).", labels=()
        )
        budget.add_metric((), self._registry.logs.max_bytes)
        yield budget
        room = GaugeMetricFamily("kvplane_max_replicas", "Largest number of replicas (max_replicas).", labels=())
        room.add_metric((), self._registry.max_replicas)
        yield room
        expired = CounterMetricFamily(
            "kvplane_expired_replicas", "Replicas that nothing had used for replica_ttl_ms.", labels=()
        )
        expired.add_metric((), self._registry.num_expired)
        yield expired
        services = GaugeMetricFamily(
            "kvplane_peer_service_followed",
            "1 while a service of peer_services says what its replicas hold, for replicas here that could load it.",
            labels=("service",),
        )
        for address, is_followed in self._registry.peer_services.items():
            services.add_metric((address,), is_followed)
        yield services

    def _of(self, entries: Sequence[Entry]) -> Iterator[Metric]:
        """Yield the metric families that have a value per replica, with the values of these registered replicas."""
        hosts = [entry.host for entry in entries]
        for family in _FAMILIES:
            yield family.collect(hosts)
        yield _owners(entries)
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


def _owners(entries: Sequence[Entry]) -> Metric:
    family = GaugeMetricFamily(
        "kvplane_replica_info",
        "Always 1; the label is the owner that registered the replica, empty without auth_owners.",
        labels=("replica", "owner"),
    )
    for entry in entries:
        family.add_metric((entry.host.name, entry.registration.registered_by), 1)
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
