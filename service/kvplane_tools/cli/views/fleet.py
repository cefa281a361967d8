"""The table of `kvplane top`: one row per replica, which can be sorted and filtered.

One call lists all replicas. Details take a call for each replica, so a sample asks for those of at most MAX_DESCRIBED
replicas: first of the rows on the screen, then of the others in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvplane import Client, NotFound
from kvplane.base.errors import InvalidArgument
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaState, ReplicaSummary
from kvplane_tools.cli.output import word
from kvplane_tools.cli.views.panels import bar
from kvplane_tools.cli.views.samples import Trend

MAX_DESCRIBED = 40
NO_REPLICA = Text("no replica is registered")
STYLES = {"live": "green", "lapsed": "red", "diverged": "red", "recovering": "yellow", "opening": "yellow"}
_BAR_CELLS = 12
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One replica.

    Attributes:
        summary: its entry in the list of replicas.
        details: its description, as of this sample or an earlier one; None before the first.
        trend: its rates.
    """

    summary: ReplicaSummary
    details: DescribeReplicaResponse | None
    trend: Trend

    @property
    def state(self) -> str:
        """The state in lower case, such as "live"."""
        return word(ReplicaState.Name(self.summary.state), "REPLICA_STATE_")

    @property
    def held_share(self) -> float:
        """Share of the pool that requests hold, from 0 to 1."""
        return 1 - self.summary.free_blocks / max(1, self.summary.num_blocks - 1)

    @property
    def hit_share(self) -> float | None:
        """Share of the tokens looked up that were hit; None while unknown."""
        counters = self.details.counters if self.details is not None else None
        return counters.hit_tokens / counters.queried_tokens if counters and counters.queried_tokens else None


def _of_details(number: Callable[[DescribeReplicaResponse], int]) -> Callable[[Row], int | None]:
    return lambda row: None if row.details is None else number(row.details)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, the value that rows are sorted by (None = unknown, always last), and how it is shown."""

    title: str
    value: Callable[[Row], str | float | None]
    text: Callable[[Row], str | Text] | None = None

    @property
    def is_number(self) -> bool:
        """Whether it is a count, which is shown on the right."""
        return self.text is None

    def show(self, row: Row) -> Text:
        """Return the cell of a row."""
        if self.text is not None:
            shown = self.text(row)
            return shown if isinstance(shown, Text) else Text(shown)
        value = self.value(row)
        return Text(_UNKNOWN if value is None else f"{value:,.0f}", justify="right")


def _percent(share: float | None) -> Text:
    return Text(_UNKNOWN if share is None else f"{share:.0%}", justify="right")


COLUMNS = (
    Column("replica", lambda row: row.summary.replica, lambda row: row.summary.replica),
    Column("state", lambda row: row.state, lambda row: Text(row.state, STYLES.get(row.state, "bright_black"))),
    Column("pool", lambda row: row.held_share, lambda row: bar(row.held_share, _BAR_CELLS)),
    Column("held", lambda row: row.held_share, lambda row: _percent(row.held_share)),
    Column("blocks", lambda row: row.summary.num_blocks - 1),
    Column("running", lambda row: row.summary.running_requests),
    Column("waiting", lambda row: row.summary.waiting_requests if row.summary.HasField("waiting_requests") else None),
    Column("hit", lambda row: row.hit_share, lambda row: _percent(row.hit_share)),
    Column("steps/s", lambda row: row.trend.steps_per_s if row.trend.num_samples > 1 else None),
    Column("preempted", _of_details(lambda answer: answer.counters.preempted)),
    Column("refused", _of_details(lambda answer: sum(answer.refusals.values()))),
)
TITLES = tuple(column.title for column in COLUMNS)


@dataclass(slots=True)
class Order:
    """How the table is sorted and filtered.

    Attributes:
        column: number of the column in COLUMNS.
        descending: largest values first.
        wanted: text that the name or the state of a shown replica contains.
    """

    column: int = 0
    descending: bool = False
    wanted: str = ""

    def sort_by(self, column: int) -> None:
        """Sort by a column; by the same one again: in the opposite order."""
        first = COLUMNS[column].title not in ("replica", "state")
        self.descending = not self.descending if column == self.column else first
        self.column = column

    def apply(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows to show, in order; rows with equal values by name, those without a value last."""
        wanted, value = self.wanted.lower(), COLUMNS[self.column].value
        shown = [row for row in rows if wanted in f"{row.summary.replica} {row.state}".lower()]
        shown.sort(key=lambda row: row.summary.replica)
        known = [row for row in shown if value(row) is not None]
        known.sort(key=value, reverse=self.descending)  # type: ignore[arg-type] # one type within a column
        return known + [row for row in shown if value(row) is None]


class Fleet:
    """Samples of all replicas of a service. Used by one thread at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._details: dict[str, DescribeReplicaResponse] = {}  # the least recently described one first
        self._trends: dict[str, Trend] = {}

    def sample(self, now_s: float, first: Sequence[str] = (), most: int = MAX_DESCRIBED) -> list[Row]:
        """Read the list of replicas, and the details of at most `most`: of `first`, then of those that were described
        least recently. `now_s`: seconds of any monotonic clock. Raises KvplaneError.
        """
        listed = {one.replica: one for one in self._client.list_replicas()}
        for gone in self._details.keys() - listed.keys():
            del self._details[gone], self._trends[gone]
        new = [name for name in listed if name not in self._details]
        turns = dict.fromkeys([*(name for name in first if name in listed), *new, *self._details])
        for name in list(islice(turns, most)):
            self._describe(name, now_s)
        return [Row(one, self._details.get(name), self._trends.get(name, Trend())) for name, one in listed.items()]

    def _describe(self, name: str, now_s: float) -> None:
        try:
            answer = self._client.describe_replica(name)
        except NotFound:  # deregistered since it was listed
            return
        self._details.pop(name, None)
        self._details[name] = answer
        counters = answer.counters
        trend = self._trends.setdefault(name, Trend())
        trend.note(now_s, counters.steps, counters.queried_tokens, counters.hit_tokens)


def order_of(sort: str, wanted: str) -> Order:
    """Return the order that the options name: a column, first from the largest number on; with "-" the other way round.

    Raises InvalidArgument for an unknown column.
    """
    name = sort.removeprefix("-")
    if name not in TITLES:
        raise InvalidArgument(f"{sort!r} is no column", field="--sort", remedy=f"use one of {', '.join(TITLES)}")
    order = Order(-1, wanted=wanted)
    order.sort_by(TITLES.index(name))
    order.descending ^= sort.startswith("-")
    return order


def plain_rows(order: Order, rows: Sequence[Row]) -> list[dict[str, str | float | None]]:
    """Return the table as dictionaries by title, for JSON and YAML."""
    return [
        {column.title: column.value(row) for column in COLUMNS if column.title != "pool"} for row in order.apply(rows)
    ]


def names_of(order: Order, rows: Sequence[Row]) -> str:
    """Return the names of the replicas in the table, one on each line."""
    return "\n".join(row.summary.replica for row in order.apply(rows))


def fleet_table(order: Order, rows: Sequence[Row]) -> RenderableType:
    """Return the table as text for a terminal, or a pipe."""
    if not rows:
        return NO_REPLICA
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for column in COLUMNS:
        table.add_column(column.title, no_wrap=True, justify="right" if column.is_number else "left")
    for row in order.apply(rows):
        table.add_row(*(column.show(row) for column in COLUMNS))
    return table
