"""The metrics of a router as Prometheus metric families. Labels are places, states, faults and causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvplane_fleet.decisions import Decisions
from kvplane_fleet.fleet import Fleet, Followed
from kvplane_fleet.work import Work

Values = Iterable[tuple[tuple[str, ...], float]]  # label values after the place's name, value


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family with values for each place."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    read: Callable[[Followed, Work], Values]
    labels: tuple[str, ...] = ()


def _one(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help: str,  # noqa: A002
         read: Callable[[Followed, Work], float]) -> Family:  # fmt: skip
    return Family(kind, f"kvplane_router_{name}", help, lambda one, work: [((), read(one, work))])


_COUNT, _GAUGE = CounterMetricFamily, GaugeMetricFamily
FAMILIES = (
    _one(_COUNT, "decisions", "Prompts that were booked at the place.", lambda _, work: work.truth.decisions),
    _one(_COUNT, "unreported_decisions", "Booked prompts that no client reported on.",
         lambda _, work: work.truth.unreported),
    _one(_GAUGE, "in_flight", "Booked prompts that have not ended.", lambda _, work: work.in_flight),
    _one(_COUNT, "prompt_tokens", "Tokens of the prompts whose cached tokens were reported.",
         lambda _, work: work.truth.prompts),
    _one(_COUNT, "claimed_tokens", "Tokens of these prompts that were claimed to be cached.",
         lambda _, work: work.truth.claimed),
    _one(_COUNT, "real_tokens", "Tokens of these prompts that the engine had cached.",
         lambda _, work: work.truth.real),
    Family(_COUNT, "kvplane_router_wrong_tokens", "Tokens by which claims differ from the engine's hits, by cause.",
           lambda _, work: [((cause,), value) for cause, value in work.truth.differences.items()], ("cause",)),
    _one(_COUNT, "regret_seconds",
         "Seconds by which first tokens came later than was predicted for the best other place.",
         lambda _, work: work.truth.regret_s),
    _one(_GAUGE, "prefill_tokens_per_second", "Prompt tokens that the place computes in a second, as fitted.",
         lambda _, work: work.costs.prefill_tokens_per_s),
    _one(_COUNT, "batches", "Batches of events applied.", lambda one, _: one.place.batches),
    _one(_COUNT, "events", "Events applied.", lambda one, _: one.place.events),
    _one(_GAUGE, "entries", "Different keys of the place, summed over groups and tiers.",
         lambda one, _: one.place.entries),
    _one(_COUNT, "digest_comparisons", "Comparisons of the entries with digests of the engine's.",
         lambda one, _: one.place.comparisons),
    Family(_COUNT, "kvplane_router_faults", "Faults of the place's events, by name.",
           lambda one, _: [((fault.value,), times) for fault, times in one.place.faults.counts.items()], ("fault",)),
    Family(_GAUGE, "kvplane_router_place_state", "1 for the state that the place is in.",
           lambda one, _: [((one.state,), 1)], ("state",)),
)  # fmt: skip


class RouterCollector:
    """Collects the metrics of all places."""

    def __init__(self, fleet: Fleet, decisions: Decisions, probes: Mapping[str, Mapping[str, int]]) -> None:
        """`probes`: number of probes by place and result."""
        self._fleet, self._decisions, self._probes = fleet, decisions, probes

    def parts(self) -> Iterator[list[Metric]]:
        """Yield one family after the other; see telemetry.http."""
        for family in FAMILIES:
            metric = family.kind(family.name, family.help, labels=("place", *family.labels))
            for name, one in sorted(self._fleet.followed.items()):
                for labels, value in family.read(one, self._decisions.work_of(name)):
                    metric.add_metric((name, *labels), value)
            yield [metric]
        probes = CounterMetricFamily(
            "kvplane_router_probes",
            "Prompts that the place was asked for again, by result.",
            labels=("place", "result"),
        )
        for name, results in self._probes.items():
            for result, times in results.items():
                probes.add_metric((name, result), times)
        yield [probes]
        index = GaugeMetricFamily("kvplane_router_index_keys", "Different keys over all places.")
        index.add_metric((), self._fleet.index.num_keys)
        yield [index]
