"""A replay's outcome as text: a table for people, one line for the end of the demo."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.table import Table

from kvplane.base.groups import GroupSpec, ReplicaSpec
from kvplane_replay.summary import Summary

_NAMED_REFUSALS = 5


def describe_groups(spec: ReplicaSpec) -> list[str]:
    """The kinds of groups, equal ones counted: ["6 sliding_window(1024)/16", "full_attention/16"]."""
    counted = Counter(map(group_name, spec.groups))
    return [name if count == 1 else f"{count} {name}" for name, count in counted.items()]


def group_name(group: GroupSpec) -> str:
    """Kind, window or chunk, and tokens per block."""
    reach = group.window or group.chunk
    return f"{group.kind.value}{f'({reach})' if reach else ''}/{group.block_size}"


def rows(summary: Summary) -> list[tuple[str, str]]:
    """(what, how much) in the order in which a reader asks. What the service counts is the service's number."""
    counts = summary.counts
    return [
        ("model", f"{summary.model}: {', '.join(describe_groups(summary.spec))}"),
        ("replicas", f"{summary.num_replicas} of {summary.spec.num_blocks} blocks"),
        ("cost model", str(summary.cost)),
        ("requests", f"{summary.requests:,}"),
        ("completed", f"{summary.completed:,}"),
        *((f"refused: {reason}", f"{count:,}") for reason, count in summary.refused_by_reason().items()),
        ("prompt tokens", f"{summary.tally.prompt_tokens:,}"),
        ("generated tokens", f"{summary.tally.generated_tokens:,}"),
        ("looked up tokens", f"{counts.queried_tokens:,}"),
        ("hit tokens", f"{counts.hit_tokens:,} ({summary.hit_share:.1%})"),
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
    """For a terminal, or a pipe."""
    drawn = Table(title=summary.workload, box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for what, how_much in rows(summary):
        drawn.add_row(what, how_much)
    return drawn


def refusal_lines(summary: Summary) -> list[str]:
    """The first refused requests by name, and how many there are beyond."""
    lines = [
        f"refused {refusal.request_id}: {refusal.reason} ({refusal.detail})"
        for refusal in summary.refusals[:_NAMED_REFUSALS]
    ]
    more = len(summary.refusals) - _NAMED_REFUSALS
    return [*lines, f"refused {more:,} more; --json names them all"] if more > 0 else lines


def _numbers(values: tuple[int, ...]) -> str:
    return " ".join(f"{value:,}" for value in values)
