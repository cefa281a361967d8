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

from kvplane.base.trace import parse_traceparent
from kvplane_service.core.interface import GroupView
from kvplane_service.core.setup import is_cached
from kvplane_service.decisions.counters import REFUSALS, REMOVALS, STEP_BOUNDS_NS, Example, StepTimes
from kvplane_service.registry import Entry, Registry
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.runtime.reports import StoreReport, StoreState
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


def _by_kind(host: ReplicaHost, value: Callable[[GroupView], float]) -> Values:
    """Return, for each kind of group, the sum of a value over the groups of that kind."""
    sums: dict[str, float] = {}
    for group in host.replica.groups:
        kind = group.spec.kind.value
        sums[kind] = sums.get(kind, 0) + value(group)
    return [((kind,), value) for kind, value in sums.items()]


def _queried(host: ReplicaHost) -> Values:
    queried = host.replica.counters.queried_tokens
    return _by_kind(host, lambda group: queried if is_cached(group.spec) else 0)


def _hit(host: ReplicaHost) -> Values:
    return _by_kind(host, lambda group: group.adopted * group.block_size)


def _keys(host: ReplicaHost) -> Values:
    return _by_kind(host, lambda group: host.replica.count_keys_of(group.group))


_FAMILIES = (
    Family(GaugeMetricFamily, "kvplane_blocks", "Blocks of the pool by state.", ("state",), _blocks),
    Family(GaugeMetricFamily, "kvplane_keys", "Distinct keys of the prefix cache.", ("group_kind",), _keys),
    _gauge("kvplane_running_requests", "Requests that hold blocks.", lambda host: host.replica.num_running),
    _counter("kvplane_steps", "Steps applied.", lambda host: host.replica.counters.steps),
    _counter("kvplane_admitted_requests", "Admissions granted.", lambda host: host.replica.counters.admitted),
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
        "Rows granted nothing after 64 such rows of a request: the others left less than a state block.",
        lambda host: host.replica.counters.starved_chunks,
    ),
    _counter(
        "kvplane_prefix_hit_tokens",
        "Tokens of these that hit the prefix cache.",
        lambda host: host.replica.counters.hit_tokens,
    ),
    Family(
        CounterMetricFamily,
        "kvplane_group_queried_tokens",
        "Tokens looked up, once for each group of the kind.",
        ("group_kind",),
        _queried,
    ),
    Family(
        CounterMetricFamily,
        "kvplane_group_hit_tokens",
        "Tokens of blocks that hits adopted, in groups of the kind.",
        ("group_kind",),
        _hit,
    ),
    Family(
        CounterMetricFamily,
        "kvplane_allocated_blocks",
        "Blocks handed out.",
        ("group_kind",),
        lambda host: _by_kind(host, lambda group: group.allocated),
    ),
    Family(
        CounterMetricFamily,
        "kvplane_removed_keys",
        "Keys removed from their block.",
        ("reason",),
        lambda host: [((name,), host.tally.removals[reason]) for reason, name in REMOVALS.items()],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_preemptions",
        "Requests that lost their blocks before their end.",
        ("reason",),
        lambda host: [((reason.value,), count) for reason, count in host.tally.preemptions.items()],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_refusals",
        "Admissions not granted.",
        ("reason",),
        lambda host: [((name,), host.tally.refusals[status]) for status, name in REFUSALS.items()],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_idle_checks",
        "Checks of the replica's state while it was idle.",
        ("outcome",),
        lambda host: [((outcome.value,), count) for outcome, count in host.idle_check.counts.items()],
    ),
    _counter("kvplane_lives", "Engine lives begun by sessions.", lambda host: host.tally.lives),
    _counter("kvplane_lapses", "Session leases that lapsed.", lambda host: host.events.num_withdrawals),
    _gauge("kvplane_mirror_lag_steps", "Steps of the mirrored engine not applied.", lambda host: host.mirror.lag_steps),
    _gauge(
        "kvplane_mirror_lag_seconds",
        "Age of the last message of the mirrored engine.",
        lambda host: host.mirror.lag_ms / 1000,
    ),
    _counter(
        "kvplane_mirror_divergences",
        "Steps whose result differed from the mirrored engine's.",
        lambda host: host.mirror.divergences,
    ),
    _counter("kvplane_mirror_images", "Images of mirrored engines loaded.", lambda host: host.mirror.images),
    Family(
        GaugeMetricFamily,
        "kvplane_lease_left_seconds",
        "Seconds until the lease of the replica's session expires; absent without a session.",
        (),
        lambda host: [] if host.lease_left_ns is None else [((), host.lease_left_ns * _NS)],
    ),
    _counter("kvplane_event_batches", "Batches of cache events published.", lambda host: host.events.last_seq),
    _gauge("kvplane_event_subscribers", "Subscribers of the events.", lambda host: host.events.num_subscribers),
    _gauge("kvplane_decisions", "Entries kept in the decision log.", lambda host: len(host.decisions)),
    _counter("kvplane_lost_decisions", "Entries dropped from the decision log.", lambda host: host.decisions.num_lost),
    Family(
        GaugeMetricFamily,
        "kvplane_log_bytes",
        "Bytes of the log budget in use.",
        ("log",),
        lambda host: [(("decisions",), host.decisions.num_bytes), (("events",), host.events.num_bytes)],
    ),
    Family(
        CounterMetricFamily,
        "kvplane_lost_log_bytes",
        "Bytes of entries dropped from a log.",
        ("log",),
        lambda host: [(("decisions",), host.decisions.lost_bytes), (("events",), host.events.lost_bytes)],
    ),
)


def _no_store(_: Entry) -> StoreReport:
    return StoreReport(StoreState.OFF)


_HISTOGRAMS_IN_STEPS = (
    ("evicted_idle", "idle_before_evict", "Steps between the last use of a block and the eviction of its key."),
    ("block_lifetime", "lifetime", "Steps between two allocations of a block."),
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
        budget = GaugeMetricFamily("kvplane_log_budget_bytes", "Memory budget of all logs together.", labels=())
        budget.add_metric((), self._registry.logs.max_bytes)
        yield budget

    def _of(self, entries: Sequence[Entry]) -> Iterator[Metric]:
        """Yield the metric families that have a value per replica, with the values of these registered replicas."""
        hosts = [entry.host for entry in entries]
        for family in _FAMILIES:
            yield family.collect(hosts)
        yield _step_seconds(hosts)
        for name, attribute, text in _HISTOGRAMS_IN_STEPS:
            histogram = HistogramMetricFamily(f"kvplane_{name}_steps", text, labels=("replica",))
            for host in hosts:
                counts: list[int] = getattr(host.replica.residency, attribute)
                histogram.add_metric((host.name,), _buckets_in_steps(counts), None)
            yield histogram
        yield from _store([(entry.host.name, self._report(entry)) for entry in entries])


def _build_info() -> Metric:
    family = GaugeMetricFamily("kvplane_build_info", "Always 1; the version is a label.", labels=("version",))
    family.add_metric((version("kvplane"),), 1)
    return family


def _held(holds: Holds) -> Metric:
    family = HistogramMetricFamily(
        "kvplane_loop_held_seconds", "How long the event loop was blocked at a time, sampled.", labels=()
    )
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    family.add_metric((), list(zip(bounds, map(float, accumulate(holds.counts)), strict=True)), holds.sum_s)
    return family


def _states(hosts: Sequence[ReplicaHost]) -> Metric:
    family = GaugeMetricFamily("kvplane_replicas", "Registered replicas by state.", labels=("state",))
    states = [host.state for host in hosts]
    for state in ReplicaState:
        family.add_metric((state.value,), states.count(state))
    return family


def _store(reports: Sequence[tuple[str, StoreReport]]) -> Iterator[Metric]:
    """Yield the metric families about the store, with values for the replicas that have a store."""
    lag = GaugeMetricFamily("kvplane_store_lag_entries", "Changes not written to the store yet.", labels=("replica",))
    age = GaugeMetricFamily("kvplane_store_lag_seconds", "Age of the oldest unwritten change.", labels=("replica",))
    failures = CounterMetricFamily("kvplane_store_failures", "Failed store calls.", labels=("replica",))
    for name, report in reports:
        if report.state is not StoreState.OFF:
            lag.add_metric((name,), report.lag_entries)
            age.add_metric((name,), report.lag_ms / 1000)
            failures.add_metric((name,), report.failures)
    yield from (lag, age, failures)


def _step_seconds(hosts: Sequence[ReplicaHost]) -> Metric:
    family = HistogramMetricFamily(
        "kvplane_step_seconds", "Time of the allocator per step, or piece of one.", labels=("replica",)
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
