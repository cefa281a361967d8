"""What `kvplane top` shows of a replica: its pool as bars, hits as a spark line, losses by reason, slowest steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane import Client, wire
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaState
from kvplane_service.cli.asking import age, word
from kvplane_service.cli.live import pool_table, spark
from kvplane_service.cli.watch import HISTORY, pools_of

MAX_REPLICAS = 50
PANEL_WIDTH = 76
_STYLES = {"live": "green", "idle": "bright_black", "lapsed": "red"}


@dataclass(slots=True)
class ReplicaWatch:
    """One replica over time: what the last look was compared with."""

    hit_shares: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    steps_per_s: float = 0.0
    _last: tuple[float, int, int, int] = (0.0, 0, 0, 0)

    def note(self, told: DescribeReplicaResponse, now_s: float) -> None:
        """Take what the service says; `now_s` is any clock that goes on."""
        counters = told.counters
        then_s, steps, queried, hit = self._last
        self._last = (now_s, counters.steps, counters.queried_tokens, counters.hit_tokens)
        if then_s and now_s > then_s:
            self.steps_per_s = (counters.steps - steps) / (now_s - then_s)
        if counters.queried_tokens > queried:
            self.hit_shares.append((counters.hit_tokens - hit) / (counters.queried_tokens - queried))


class Watchers:
    """All replicas of a service over time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watches: dict[str, ReplicaWatch] = {}

    def look(self, now_s: float) -> list[Panel]:
        """Ask the service; a panel per replica, so many at most. Raises KvplaneError."""
        panels = []
        for one in islice(self._client.list_replicas(), MAX_REPLICAS):
            told = self._client.describe_replica(one.replica)
            watch = self._watches.setdefault(one.replica, ReplicaWatch())
            watch.note(told, now_s)
            panels.append(panel(told, watch))
        return panels


def panel(told: DescribeReplicaResponse, watch: ReplicaWatch) -> Panel:
    """One replica."""
    state = word(ReplicaState.Name(told.state), "REPLICA_STATE_")
    pools = pools_of(told, wire.decode_spec(told.spec).groups)
    body = Group(pool_table(pools, told.free_blocks, told.spec.num_blocks), Text(), _hits(told, watch), *_losses(told))
    slowest = _slowest(told)
    return Panel(
        Group(body, slowest) if slowest else body,
        title=f"[bold]{told.replica}[/] [{_STYLES[state]}]{state}[/]",
        title_align="left",
        subtitle=f"{told.running_requests:,} running · {watch.steps_per_s:,.0f} steps/s · epoch {told.epoch}",
        subtitle_align="right",
        box=box.ROUNDED,
        width=PANEL_WIDTH,
    )


def _hits(told: DescribeReplicaResponse, watch: ReplicaWatch) -> Text:
    counters = told.counters
    share = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    return Text.assemble(
        ("hit tokens ", "bright_black"),
        (f"{counters.hit_tokens:,} ", "cyan"),
        (f"{share:.0%} ", "bold cyan"),
        (spark(list(watch.hit_shares)), "cyan"),
    )


def _losses(told: DescribeReplicaResponse) -> Iterable[Text]:
    for label, counts, style in (
        ("keys removed ", told.removed_keys, "yellow"),
        ("preempted ", told.preemptions, "red"),
        ("refused ", told.refusals, "magenta"),
    ):
        yield Text.assemble((label, "bright_black"), (_by_reason(counts), style if any(counts.values()) else "default"))


def _by_reason(counts: Mapping[str, int]) -> str:
    told = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(counts.items()) if count)
    return ", ".join(told) or "none"


def _slowest(told: DescribeReplicaResponse) -> Table | None:
    if not told.slowest_steps:
        return None
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for heading in ("slowest steps", "time", "rows", "ago"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in told.slowest_steps:
        table.add_row(str(one.seq), f"{one.took_ns / 1e6:.2f} ms", str(one.rows), age(one.age_ms))
    return table
