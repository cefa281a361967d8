"""The live view: a panel per model on a terminal, a line per model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvplane_service.cli.watch import Look, Pool

PANEL_WIDTH = 58
_BAR_CELLS = 16
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_CELLS = 20


def view(looks: Sequence[Look]) -> RenderableType:
    """All models at one moment."""
    return Columns([panel(look) for look in looks], width=PANEL_WIDTH)


def picture(looks: Sequence[Look], title: str) -> str:
    """The view as SVG."""
    console = Console(record=True, width=2 * PANEL_WIDTH + 1, file=StringIO(), force_terminal=True)
    console.print(view(looks))
    return console.export_svg(title=title)


def panel(look: Look) -> Panel:
    """One model."""
    return Panel(
        Group(_pools(look), Text(), _hits(look), _losses(look), _requests(look)),
        title=f"[bold]{look.model}[/]",
        title_align="left",
        subtitle=f"{look.steps_per_s:,.0f} steps/s · {look.virtual_s:,.0f} s virtual",
        subtitle_align="right",
        box=box.ROUNDED,
        width=PANEL_WIDTH,
    )


def line(look: Look) -> str:
    """One model on one line."""
    held = 1 - look.free_blocks / (look.num_blocks - 1)
    return (
        f"{look.model:<14} {look.completed:>5,} done {look.running:>3} running {look.waiting:>3} waiting"
        f" | pool {held:4.0%} held | hit {look.hit_share:4.0%} of tokens"
        f" | {look.evicted:,} evicted {look.counts.preempted:,} preempted | {look.steps_per_s:,.0f} steps/s"
    )


def spark(shares: Sequence[float]) -> str:
    """Values of 0 to 1 as a line of bars, the latest on the right."""
    last = shares[-_SPARK_CELLS:]
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(share * len(_SPARKS)))] for share in last)


def bar(share: float, cells: int = _BAR_CELLS) -> Text:
    """A share of 0 to 1 as a bar."""
    filled = round(min(1.0, share) * cells)
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble(("█" * filled, colour), ("░" * (cells - filled), "bright_black"))


def _pools(look: Look) -> Table:
    usable = look.num_blocks - 1
    whole = Pool("pool", usable - look.free_blocks, sum(pool.cached_blocks for pool in look.pools))
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, width=_BAR_CELLS)
    grid.add_column(justify="right", no_wrap=True)
    for pool in (*look.pools, whole):
        name = Text(pool.name, style="bold" if pool is whole else "")
        numbers = f"{pool.held_blocks:,} held {pool.cached_blocks:,} cached"
        grid.add_row(name, bar(pool.held_blocks / usable), Text(numbers, style="bright_black"))
    return grid


def _hits(look: Look) -> Text:
    return Text.assemble(
        ("hit tokens ", "bright_black"),
        (f"{look.counts.hit_tokens:,} ", "cyan"),
        (f"{look.hit_share:.0%} ", "bold cyan"),
        (spark(look.hit_shares), "cyan"),
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
