"""Format the outcome of a replay as text: a table for a trace or a recording, a line per model for the demo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from rich import box
from rich.table import Table

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupSpec, ReplicaSpec
from kvplane_tools.cli.options import FAILED, Shape
from kvplane_tools.cli.output import columns, text_of
from kvplane_tools.replay.from_log import Outcome, replay_log
from kvplane_tools.replay.plan import CostModel
from kvplane_tools.replay.pools import PoolHits, pool_hits
from kvplane_tools.replay.recorded import Recorded
from kvplane_tools.replay.summary import Summary

_NAMED_REFUSALS = 5


def describe_groups(spec: ReplicaSpec) -> list[str]:
    """Return each kind of group with its number, such as ["6 sliding_window(1024)/16", "full_attention/16"]."""
    counted = Counter(map(group_name, spec.groups))
    return [name if count == 1 else f"{count} {name}" for name, count in counted.items()]


def group_name(group: GroupSpec) -> str:
    """Return the kind, the window or chunk in tokens, and the tokens per block, such as "sliding_window(1024)/16"."""
    reach = group.window or group.chunk
    return f"{group.kind.value}{f'({reach})' if reach else ''}/{group.block_size}"


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the outcome as (name, value) pairs, the most important first. If engine and service both count a quantity,
    the value of the service is used.
    """
    counts = summary.counts
    return [
        ("model", f"{summary.model}: {', '.join(describe_groups(summary.spec))}"),
        ("replicas", f"{summary.num_replicas} of {summary.spec.num_blocks} blocks"),
        *(
            (
                f"{tier.kind.value} tier",
                f"{tier.num_blocks:,} blocks, saved {tier.save.value}"
                + f", {tier.checkpoint_percent} % checkpoints" * (tier.checkpoint_percent > 0),
            )
            for tier in summary.spec.tiers
        ),
        ("cost model", str(summary.cost)),
        ("requests", f"{summary.requests:,}"),
        ("completed", f"{summary.completed:,}"),
        *((f"refused: {reason}", f"{count:,}") for reason, count in summary.refused_by_reason().items()),
        ("prompt tokens", f"{summary.tally.prompt_tokens:,}"),
        ("generated tokens", f"{summary.tally.generated_tokens:,}"),
        ("looked up tokens", f"{counts.queried_tokens:,}"),
        ("hit tokens", f"{counts.hit_tokens:,} ({summary.counts.hit_share:.1%})"),
        *(
            (f"copied into {tier.kind.value}", f"{count:,} blocks")
            for tier, count in zip(summary.spec.tiers, summary.tally.tier_writes, strict=True)
        ),
        *(
            (f"loaded from {tier}", f"{share:.1%} of the tokens looked up")
            for tier, share in summary.tier_shares.items()
        ),
        ("block hits per group", _numbers(counts.hit_blocks)),
        ("evictions per group", _numbers(counts.evicted_blocks)),
        ("preemptions", f"{counts.preempted:,}"),
        ("admissions refused", f"{counts.refused:,}"),
        ("steps", f"{counts.steps:,}"),
        ("rows", f"{summary.tally.rows:,}"),
        ("messages", f"{summary.tally.messages:,}"),
        ("virtual time", f"{summary.virtual_s:,.1f} s"),
        ("wall time", f"{summary.wall_s:,.1f} s"),
        ("steps per second", f"{counts.steps / summary.wall_s:,.0f}" if summary.wall_s else "-"),
    ]


def table(summary: Summary) -> Table:
    """Return the outcome as a table for a terminal or a pipe."""
    drawn = Table(title=summary.workload, box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in rows(summary):
        drawn.add_row(name, value)
    return drawn


def refusal_lines(summary: Summary) -> list[str]:
    """Return one line for each of the first refused requests, and one line with the number of the others."""
    lines = [
        f"refused {refusal.request_id}: {refusal.reason} ({refusal.detail})"
        for refusal in summary.refusals[:_NAMED_REFUSALS]
    ]
    more = len(summary.refusals) - _NAMED_REFUSALS
    return [*lines, f"refused {more:,} more; -o json lists all of them"] if more > 0 else lines


def _numbers(values: Sequence[int]) -> str:
    return " ".join(f"{value:,}" for value in values)


def summary_lines(summaries: Sequence[Summary]) -> list[str]:
    """Return the outcomes, a line for each model, as counted by the service."""
    return [
        f"{summary.model}: {summary.completed:,} requests, {summary.counts.hit_tokens:,} hit tokens "
        f"({summary.counts.hit_share:.0%}), {summary.counts.evicted:,} evictions, "
        f"{summary.counts.preempted:,} preemptions, {summary.counts.steps:,} steps"
        for summary in summaries
    ]


def show_log(path: Path, pool_blocks: int | None, output: Shape) -> int:
    """Replay a recording, print the outcome, and return the exit code: 0 if every decision is identical to the recorded
    one.

    With `pool_blocks` its requests also run in a pool of that size, and are printed next to the outcome in the recorded
    pool.
    """
    recorded = Recorded(CostModel())
    outcome = replay_log(path, recorded)
    other = None
    if pool_blocks and pool_blocks != outcome.spec.num_blocks:
        other = pool_hits(replace(outcome.spec, num_blocks=pool_blocks), recorded)
        if other.error:
            raise InvalidArgument(other.error, field="--pool-blocks", remedy="give a pool that the replica can have")
    print(text_of(lambda: _log_plain(outcome, other), output, table=lambda: _log_text(outcome, other)))
    return 0 if outcome.identical == outcome.decisions else FAILED


def _log_plain(outcome: Outcome, other: PoolHits | None) -> dict[str, object]:
    known = {field.name: getattr(outcome, field.name) for field in fields(outcome) if field.name != "spec"}
    as_recorded = {"num_blocks": outcome.spec.num_blocks, **known}
    return {"as_recorded": as_recorded, **({"other_pool": asdict(other)} if other else {})}


def _log_text(outcome: Outcome, other: PoolHits | None) -> str:
    head = f"{outcome.replica}, recorded by kvplane {outcome.version}: "
    head += f"{outcome.identical:,} of {outcome.decisions:,} decisions identical"
    if outcome.first_difference:
        head += f"; the first difference is in step {outcome.first_difference}"
    if outcome.is_cut:
        head += "; the file is cut off inside the next decision"
    pools = [(outcome.spec.num_blocks, outcome.counts)]
    if other is not None:
        pools.append((other.num_blocks, {**other.counts, "never_fits": other.never_fits}))
    table = [("", *(f"{num_blocks:,} BLOCKS" for num_blocks, _ in pools))]
    table += [(name.replace("_", " "), *(f"{counts[name]:,}" for _, counts in pools)) for name in outcome.counts]
    return f"{head}\n{columns(table)}"
