"""A metric family with values for each replica, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvplane_service.registry import Entry
from kvplane_service.replicas.host import ReplicaHost

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
Values = Iterable[tuple[tuple[str, ...], float]]  # label values after the replica's name, value
Labelled = Iterable[tuple[str, float]]  # the same, with one label


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family (counter or gauge) with values for each replica."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Entry], Values]

    def collect(self, entries: Sequence[Entry]) -> Metric:
        """Return the metric family with the current values of these replicas."""
        family = self.kind(self.name, self.help, labels=("replica", *self.labels))
        for entry in entries:
            for labels, value in self.read(entry):
                family.add_metric((entry.host.name, *labels), value)
        return family


def counter(name: str, help: str, read: Callable[[ReplicaHost], float]) -> Family:  # noqa: A002 - Prometheus' word
    """Return a counter with one value per replica."""
    return Family(CounterMetricFamily, name, help, (), lambda entry: [((), read(entry.host))])


def gauge(name: str, help: str, read: Callable[[ReplicaHost], float | None]) -> Family:  # noqa: A002
    """Return a gauge with one value per replica; None = it has none now."""

    def values(entry: Entry) -> Values:
        value = read(entry.host)
        return [] if value is None else [((), value)]

    return Family(GaugeMetricFamily, name, help, (), values)


def counters(name: str, help: str, label: str, read: Callable[[ReplicaHost], Labelled]) -> Family:  # noqa: A002
    """Return a counter with values by one label."""
    return Family(CounterMetricFamily, name, help, (label,), _by_label(read))


def gauges(name: str, help: str, label: str, read: Callable[[ReplicaHost], Labelled]) -> Family:  # noqa: A002
    """Return a gauge with values by one label."""
    return Family(GaugeMetricFamily, name, help, (label,), _by_label(read))


def _by_label(read: Callable[[ReplicaHost], Labelled]) -> Callable[[Entry], Values]:
    return lambda entry: (((label,), value) for label, value in read(entry.host))
