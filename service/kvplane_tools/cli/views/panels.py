"""Draw the live view of `kvplane demo`: a panel per model on a terminal, a line per model elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane_tools.cli.views.samples import Pool, Sample
from kvplane_tools.replay.plan import NS_PER_SECOND

PANEL_WIDTH = 58
_PANEL_HEIGHT = 11  # of a panel with four kinds of groups, the most that a model of the demo has
_BAR_CELLS = 16
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_CELLS = 20

# Pictures name a font that a viewer would load from the network; without it the viewer's monospace font is used.
REMOTE_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class View:
    """Draws the samples of all models: panels in one or two columns, or rows of a table if the terminal is too
    small.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = min(2, options.max_width // PANEL_WIDTH)
        if columns and -(-len(self._samples) // columns) * _PANEL_HEIGHT <= console.height:
            yield _panels(self._samples, columns)
        else:
            yield _rows(self._samples)


def picture(samples: Sequence[Sample], title: str) -> str:
    """Return the panels of all samples as an SVG document."""
    console = Console(record=True, width=2 * PANEL_WIDTH + 1, file=StringIO(), force_terminal=True)
    console.print(_panels(samples, 2))
    return REMOTE_FONT.sub("", console.export_svg(title=title))


def _panels(samples: Sequence[Sample], columns: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for start in range(0, len(samples), columns):
        grid.add_row(*map(panel, samples[start : start + columns]))
    return grid


def _rows(samples: Sequence[Sample]) -> RenderableType:
    drawn = Table(box=None, pad_edge=False)
    for heading in ("model", "pool", "hit", "", "evicted", "preempted", "steps/s"):
        drawn.add_column(heading, no_wrap=True)
    for sample in samples:
        counts = (f"{sample.counts.evicted:,}", f"{sample.counts.preempted:,}", f"{sample.trend.steps_per_s:,.0f}")
        hits = Text(spark(sample.trend.hit_shares, 8), style="cyan")
        drawn.add_row(sample.model, bar(sample.held_share, 8), f"{sample.counts.hit_share:.0%}", hits, *counts)
    return drawn


def panel(sample: Sample) -> Panel:
    """Return the terminal panel of one model: pool, hits, evictions, preemptions and requests."""
    traffic_s = sample.progress.clock_ns / NS_PER_SECOND
    return Panel(
        Group(
            pool_table(sample.pools, sample.free_blocks, sample.num_blocks - 1),
            Text(),
            hit_line(sample.counts.hit_tokens, sample.counts.hit_share, sample.trend.hit_shares),
            _losses(sample),
            _requests(sample),
        ),
        title=f"[bold]{sample.model}[/]",
        title_align="left",
        subtitle=f"{sample.trend.steps_per_s:,.0f} steps/s · {traffic_s:,.0f} s of traffic",
        subtitle_align="right",
        box=box.ROUNDED,
        width=PANEL_WIDTH,
    )


def line(sample: Sample) -> str:
    """Return the sample of one model as a line of text."""
    counts, now = sample.counts, sample.progress
    return (
        f"{sample.model:<14} {now.completed:>5,} done {now.running:>3} running {now.waiting:>3} waiting"
        f" | pool {sample.held_share:4.0%} held | hit {counts.hit_share:4.0%} of tokens"
        f" | {counts.evicted:,} evicted {counts.preempted:,} preempted | {sample.trend.steps_per_s:,.0f} steps/s"
    )


def spark(shares: Iterable[float], cells: int = _SPARK_CELLS) -> str:
    """Return a spark line of values from 0 to 1, the latest on the right."""
    last = list(shares)[-cells:]
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(share * len(_SPARKS)))] for share in last)


def bar(share: float, cells: int = _BAR_CELLS) -> Text:
    """Return a bar that shows a share from 0 to 1."""
    filled = round(min(1.0, share) * cells)
    return Text.assemble(("█" * filled, "green"), ("░" * (cells - filled), "bright_black"))


def pool_table(pools: Sequence[Pool], free_blocks: int, usable: int) -> Table:
    """Return a table of the usable blocks of the pool, by kind of group and in total, with bars."""
    cached = sum(pool.cached_blocks for pool in pools)
    whole = Pool("pool", usable - free_blocks, cached)
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bright_black")
    grid.add_column("group", no_wrap=True)
    grid.add_column(f"of {usable:,} blocks", no_wrap=True, width=_BAR_CELLS)
    grid.add_column("held", justify="right", no_wrap=True)
    grid.add_column("cached", justify="right", no_wrap=True)
    for pool in (*pools, whole):
        share = bar(pool.held_blocks / usable)
        style = "bold" if pool is whole else ""
        grid.add_row(pool.name, share, f"{pool.held_blocks:,}", f"{pool.cached_blocks:,}", style=style)
    return grid


def hit_line(hit_tokens: int, share: float, shares: Iterable[float]) -> Text:
    """Return the number of hit tokens, their share of all tokens looked up, and a spark line of that share by
    sample.
    """
    return Text.assemble(
        ("hit tokens ", "bright_black"),
        (f"{hit_tokens:,} ", "cyan"),
        (f"{share:.0%} ", "bold cyan"),
        (spark(shares), "cyan"),
    )


def _losses(sample: Sample) -> Text:
    return Text.assemble(
        ("evicted ", "bright_black"),
        (f"{sample.counts.evicted:,}  ", "yellow"),
        ("preempted ", "bright_black"),
        (f"{sample.counts.preempted:,}", "red" if sample.counts.preempted else "default"),
    )


def _requests(sample: Sample) -> Text:
    return Text.assemble(
        ("requests ", "bright_black"),
        f"{sample.progress.completed:,} done  {sample.progress.running:,} running  {sample.progress.waiting:,} waiting",
    )
