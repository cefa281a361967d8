"""Draw the panel of one replica in `kvplane top`: the pool as bars, hits as a spark line, evictions and preemptions
by reason, and the slowest steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane import wire
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaState
from kvplane_tools.cli.output import (
    age,
    by_reason,
    peers_line,
    retained_line,
    slack_line,
    sources_line,
    tier_word,
    usable_blocks,
    word,
)
from kvplane_tools.cli.views.fleet import STYLES
from kvplane_tools.cli.views.panels import bar, hit_line, pool_table
from kvplane_tools.cli.views.samples import Trend, pools_of

PANEL_WIDTH = 76


def panel(answer: DescribeReplicaResponse, trend: Trend) -> Panel:
    """Return the terminal panel of one replica: pool, hits, removed keys, preemptions and slowest steps."""
    state = word(ReplicaState.Name(answer.state), "REPLICA_STATE_")
    pools = pools_of(answer, wire.decode_spec(answer.spec).groups)
    body = Group(
        pool_table(pools, answer.free_blocks, usable_blocks(answer.spec)),
        *_slack(answer),
        *_retained(answer),
        *_tiers(answer),
        Text(),
        _hits(answer, trend),
        *_losses(answer),
    )
    slowest = _slowest(answer)
    return Panel(
        Group(body, slowest) if slowest else body,
        title=Text.assemble((answer.replica, "bold"), " ", (state, STYLES.get(state, "bright_black"))),
        title_align="left",
        subtitle=f"{answer.running_requests:,} running · {trend.steps_per_s:,.0f} steps/s · epoch {answer.epoch}",
        subtitle_align="right",
        box=box.ROUNDED,
        width=PANEL_WIDTH,
    )


def _slack(answer: DescribeReplicaResponse) -> Iterable[Text]:
    if answer.spec.blocks_per_state > 1:
        yield Text.assemble(("slack ", "bright_black"), slack_line(answer))


def _retained(answer: DescribeReplicaResponse) -> Iterable[Text]:
    if answer.retained_prefixes:
        yield Text.assemble(("retained ", "bright_black"), retained_line(answer))


def _tiers(answer: DescribeReplicaResponse) -> Iterable[Text]:
    for tier in answer.tiers:
        yield Text.assemble(
            (f"{tier_word(tier.kind)} tier ", "bright_black"),
            bar(tier.held_blocks / tier.num_blocks),
            f" {tier.held_blocks:,} of {tier.num_blocks:,} slots, ",
            f"{tier.retained_blocks:,} retained, " if tier.retained_blocks else "",
            (f"{tier.hit_tokens:,}", "cyan"),
            " tokens hit by loads",
        )
    if answer.tiers:
        names = ("loads_failed", "failed", "discarded", "too_slow", "given_up")
        troubles = {name: answer.tier_counts[name] for name in names}
        uses = [use for worker in answer.workers for use in worker.tiers]
        troubles["refused"] = sum(use.refused_blocks for use in uses)
        peers = [use for use in uses if tier_word(use.kind) == "peers"]
        troubles["of_peers_written_again"] = sum(use.discarded_blocks for use in peers)
        troubles["of_peers_gone"] = sum(use.failed_blocks for use in peers)
        if answer.peers:
            yield Text.assemble(("peers ", "bright_black"), peers_line(answer))
        yield Text.assemble(("hits ", "bright_black"), sources_line(answer))
        yield Text.assemble(("tiers ", "bright_black"), by_reason(troubles))


def _hits(answer: DescribeReplicaResponse, trend: Trend) -> Text:
    counters = answer.counters
    share = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    return hit_line(counters.hit_tokens, share, trend.hit_shares)


def _losses(answer: DescribeReplicaResponse) -> Iterable[Text]:
    for label, counts, style in (
        ("keys removed ", answer.removed_keys, "yellow"),
        ("preempted ", answer.preemptions, "red"),
        ("refused ", answer.refusals, "magenta"),
    ):
        yield Text.assemble((label, "bright_black"), (by_reason(counts), style if any(counts.values()) else "default"))


def _slowest(answer: DescribeReplicaResponse) -> Table | None:
    if not answer.slowest_steps:
        return None
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for heading in ("slowest steps", "time", "rows", "ago"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in answer.slowest_steps:
        table.add_row(str(one.seq), f"{one.took_ns / 1e6:.2f} ms", str(one.rows), age(one.age_ms))
    return table
