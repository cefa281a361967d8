"""The live view: a panel per model on a terminal, a line per model elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane_service.cli.watch import Look, Pool

PANEL_WIDTH = 58
_PANEL_HEIGHT = 11  # with the four pools that a model of the demo has at most
_BAR_CELLS = 16
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_CELLS = 20

# What rich would have a viewer load from the network; the viewer's own monospace does as well.
_REMOTE_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class View:
    """All models at one moment: panels side by side, or one below the other, or rows, as the terminal has room."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self._looks = looks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = min(2, options.max_width // PANEL_WIDTH)
        if columns and -(-len(self._looks) // columns) * _PANEL_HEIGHT <= console.height:
            yield _panels(self._looks, columns)
        else:
            yield _rows(self._looks)


def picture(looks: Sequence[Look], title: str) -> str:
    """The panels as SVG."""
    console = Console(record=True, width=2 * PANEL_WIDTH + 1, file=StringIO(), force_terminal=True)
    console.print(_panels(looks, 2))
    return _REMOTE_FONT.sub("", console.export_svg(title=title))


def _panels(looks: Sequence[Look], columns: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for start in range(0, len(looks), columns):
        grid.add_row(*map(panel, looks[start : start + columns]))
    return grid


def _rows(looks: Sequence[Look]) -> RenderableType:
    drawn = Table(box=None, pad_edge=False)
    for heading in ("model", "pool", "hit", "", "evicted", "preempted", "steps/s"):
        drawn.add_column(heading, no_wrap=True)
    for look in looks:
        counts = (f"{look.evicted:,}", f"{look.counts.preempted:,}", f"{look.steps_per_s:,.0f}")
        hits = Text(spark(look.hit_shares, 8), style="cyan")
        drawn.add_row(look.model, bar(look.held_share, 8), f"{look.hit_share:.0%}", hits, *counts)
    return drawn


def panel(look: Look) -> Panel:
    """One model."""
    return Panel(
        Group(
            pool_table(look.pools, look.free_blocks, look.num_blocks),
            Text(),
            hit_line(look.counts.hit_tokens, look.hit_share, look.hit_shares),
            _losses(look),
            _requests(look),
        ),
        title=f"[bold]{look.model}[/]",
        title_align="left",
        subtitle=f"{look.steps_per_s:,.0f} steps/s · {look.virtual_s:,.0f} s virtual",
        subtitle_align="right",
        box=box.ROUNDED,
        width=PANEL_WIDTH,
    )


def line(look: Look) -> str:
    """One model on one line."""
    return (
        f"{look.model:<14} {look.completed:>5,} done {look.running:>3} running {look.waiting:>3} waiting"
        f" | pool {look.held_share:4.0%} held | hit {look.hit_share:4.0%} of tokens"
        f" | {look.evicted:,} evicted {look.counts.preempted:,} preempted | {look.steps_per_s:,.0f} steps/s"
    )


def spark(shares: Sequence[float], cells: int = _SPARK_CELLS) -> str:
    """Values of 0 to 1 as a line of bars, the latest on the right."""
    last = shares[-cells:]
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(share * len(_SPARKS)))] for share in last)


def bar(share: float, cells: int = _BAR_CELLS) -> Text:
    """A share of 0 to 1 as a bar."""
    filled = round(min(1.0, share) * cells)
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble(("█" * filled, colour), ("░" * (cells - filled), "bright_black"))


def pool_table(pools: Sequence[Pool], free_blocks: int, num_blocks: int) -> Table:
    """What each kind of group takes of the pool, as bars, and the whole."""
    usable = num_blocks - 1
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


def hit_line(hit_tokens: int, share: float, shares: Sequence[float]) -> Text:
    """Tokens hit, their share of all that were looked up, and the share from look to look."""
    return Text.assemble(
        ("hit tokens ", "bright_black"),
        (f"{hit_tokens:,} ", "cyan"),
        (f"{share:.0%} ", "bold cyan"),
        (spark(shares), "cyan"),
    )


def _losses(look: Look) -> Text:
    return Text.assemble(
        ("evicted ", "bright_black"),
        (f"{look.evicted:,}  ", "yellow"),
        ("preempted ", "bright_black"),
        (f"{look.counts.preempted:,}", "red" if look.counts.preempted else "default"),
    )


def _requests(look: Look) -> Text:
    return Text.assemble(
        ("requests ", "bright_black"),
        f"{look.completed:,} done  {look.running:,} running  {look.waiting:,} waiting",
    )
