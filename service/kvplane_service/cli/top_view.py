"""What `kvplane top` shows of a replica: its pool as bars, hits as a spark line, losses by reason, slowest steps."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane import Client, wire
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaState
from kvplane_service.cli.asking import age, by_reason, described, word
from kvplane_service.cli.live import hit_line, pool_table
from kvplane_service.cli.watch import Trend, pools_of

MAX_REPLICAS = 50
PANEL_WIDTH = 76
NO_REPLICA = Text("no replica is registered")
_STYLES = {"live": "green", "lapsed": "red", "recovering": "yellow"}


class Watchers:
    """All replicas of a service over time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._trends: dict[str, Trend] = {}

    def look(self, now_s: float) -> list[RenderableType]:
        """Ask the service; a panel per replica, so many at most. Raises KvplaneError."""
        panels: list[RenderableType] = []
        listed = list(self._client.list_replicas())
        for told in described(self._client, listed[:MAX_REPLICAS]):
            trend, counters = self._trends.setdefault(told.replica, Trend()), told.counters
            trend.note(now_s, counters.steps, counters.queried_tokens, counters.hit_tokens)
            panels.append(panel(told, trend))
        if len(listed) > MAX_REPLICAS:
            panels.append(f"{len(listed) - MAX_REPLICAS} more: kvplane replicas")
        return panels


def panel(told: DescribeReplicaResponse, trend: Trend) -> Panel:
    """One replica."""
    state = word(ReplicaState.Name(told.state), "REPLICA_STATE_")
    pools = pools_of(told, wire.decode_spec(told.spec).groups)
    body = Group(pool_table(pools, told.free_blocks, told.spec.num_blocks), Text(), _hits(told, trend), *_losses(told))
    slowest = _slowest(told)
    return Panel(
        Group(body, slowest) if slowest else body,
        title=Text.assemble((told.replica, "bold"), " ", (state, _STYLES.get(state, "bright_black"))),
        title_align="left",
        subtitle=f"{told.running_requests:,} running · {trend.steps_per_s:,.0f} steps/s · epoch {told.epoch}",
        subtitle_align="right",
        box=box.ROUNDED,
        width=PANEL_WIDTH,
    )


def _hits(told: DescribeReplicaResponse, trend: Trend) -> Text:
    counters = told.counters
    share = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    return hit_line(counters.hit_tokens, share, list(trend.hit_shares))


def _losses(told: DescribeReplicaResponse) -> Iterable[Text]:
    for label, counts, style in (
        ("keys removed ", told.removed_keys, "yellow"),
        ("preempted ", told.preemptions, "red"),
        ("refused ", told.refusals, "magenta"),
    ):
        yield Text.assemble((label, "bright_black"), (by_reason(counts), style if any(counts.values()) else "default"))


def _slowest(told: DescribeReplicaResponse) -> Table | None:
    if not told.slowest_steps:
        return None
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for heading in ("slowest steps", "time", "rows", "ago"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in told.slowest_steps:
        table.add_row(str(one.seq), f"{one.took_ns / 1e6:.2f} ms", str(one.rows), age(one.age_ms))
    return table
