"""The full-screen program `kvplane top`: a table of all replicas, and a screen for one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Header, Input, Static

from kvplane import Client, KvplaneError
from kvplane.v1.admin_pb2 import ListRequestsResponse
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse
from kvplane_tools.cli.output import request_state
from kvplane_tools.cli.views.fleet import COLUMNS, NO_REPLICA, Fleet, Order, Row
from kvplane_tools.cli.views.panels import REMOTE_FONT
from kvplane_tools.cli.views.samples import Trend
from kvplane_tools.cli.views.top_panels import panel

PICTURE_SAMPLES = 25
PICTURE_CELLS = (104, 15)
_MAX_REQUESTS = 20


class ReplicaScreen(Screen[None]):
    """One replica: its panel, and the requests that hold the most blocks."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "back"), ("q", "app.quit", "quit")]

    def __init__(self, client: Client, replica: str, interval_s: float) -> None:
        super().__init__()
        self._client, self._replica, self._interval_s = client, replica, interval_s
        self._trend = Trend()

    def compose(self) -> ComposeResult:
        """Build the screen."""
        yield Header(icon=" ")
        yield VerticalScroll(Static("connecting ...", id="replica"))
        yield Footer()

    def on_mount(self) -> None:
        """Take the first sample and start the timer for the following ones."""
        self._sample()
        self.set_interval(self._interval_s, self._sample)

    @work(thread=True, exclusive=True)
    def _sample(self) -> None:
        try:
            answer = self._client.describe_replica(self._replica)
            requests = self._client.list_requests(self._replica, _MAX_REQUESTS)
        except KvplaneError as error:
            self.app.call_from_thread(self._show, Text(str(error), "bold red"))
            return
        counters = answer.counters
        self._trend.note(time.monotonic(), counters.steps, counters.queried_tokens, counters.hit_tokens)
        self.app.call_from_thread(self._show, details(answer, requests, self._trend))

    def _show(self, shown: Group | Text) -> None:
        if self.is_running:  # a sample may end after the screen
            self.query_one("#replica", Static).update(shown)


def details(answer: DescribeReplicaResponse, requests: ListRequestsResponse, trend: Trend) -> Group:
    """Return what the screen of one replica shows."""
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for heading in ("request", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks", "computed", "of tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in requests.requests:
        counts = (f"{sum(one.num_blocks):,}", f"{one.computed_tokens:,}", f"{one.num_tokens:,}")
        table.add_row(Text(one.request_id or f"slot {one.slot}"), request_state(one), *counts)
    left = requests.num_requests - len(requests.requests)
    legend = Text("held: blocks of requests; cached: blocks with a key, held or free", "bright_black")
    return Group(panel(answer, trend), legend, Text(), table, Text(f"{left:,} more requests" if left else ""))


class Top(App[None]):
    """Shows all replicas in a table and refreshes it every `interval_s` seconds.

    Attributes:
        num_samples: number of samples shown so far.
    """

    TITLE = "kvplane top"
    CSS = "Static { height: auto; } #filter { display: none; } #filter.open { display: block; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("p", "pause", "pause or resume"),
        ("s", "sort", "sort by next column"),
        ("r", "reverse", "reverse"),
        ("slash", "filter", "filter"),
        ("escape", "clear_filter", "all"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, service: str, interval_s: float, order: Order | None = None) -> None:
        super().__init__()
        self.num_samples = 0
        self._client, self._interval_s, self._order = client, interval_s, order or Order()
        self._fleet, self._rows = Fleet(client), list[Row]()
        self._is_paused = self._has_failed = False
        # Kept, not looked for: a sample may end when another screen is shown, or none any more.
        self._line = Static("connecting ...", id="error")
        self._table = DataTable[Text](cursor_type="row", zebra_stripes=True)
        self.sub_title = service

    def compose(self) -> ComposeResult:
        """Build the screen: a line for errors and counts, the filter, and the table."""
        yield Header(icon=" ")
        yield self._line
        yield Input(placeholder="part of a name or state; Enter to use it", id="filter")
        yield self._table
        yield Footer()

    def on_mount(self) -> None:
        """Take the first sample and start the timer for the following ones."""
        table = self._table
        for column in COLUMNS:
            table.add_column(column.title, key=column.title)
        table.focus()
        self._sample()
        self.set_interval(self._interval_s, self._tick)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column whose heading was clicked."""
        self._order.sort_by(event.column_index)
        self._show_rows()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the replica of the selected row."""
        if event.row_key.value is not None:
            self.push_screen(ReplicaScreen(self._client, event.row_key.value, self._interval_s))

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while a text is typed."""
        self._order.wanted = event.value.strip()
        self._show_rows()

    def on_input_submitted(self) -> None:
        """Return to the table."""
        self._table.focus()

    def action_pause(self) -> None:
        """Pause the refresh, or resume it if it is paused."""
        self._is_paused = not self._is_paused
        self._show_counts()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._order.sort_by((self._order.column + 1) % len(COLUMNS))
        self._show_rows()

    def action_reverse(self) -> None:
        """Sort in the opposite order."""
        self._order.sort_by(self._order.column)
        self._show_rows()

    def action_filter(self) -> None:
        """Show the filter."""
        self.query_one("#filter", Input).add_class("open").focus()

    def action_clear_filter(self) -> None:
        """Show all replicas."""
        line = self.query_one("#filter", Input)
        line.value = ""
        line.remove_class("open")
        self._table.focus()

    def _tick(self) -> None:
        if self.is_running and not self._is_paused and not isinstance(self.screen, ReplicaScreen):
            self._sample()

    def _sample(self) -> None:
        self._take_sample(self._visible())  # read here: the thread would meet a table that changes

    @work(thread=True, exclusive=True)
    def _take_sample(self, first: Sequence[str]) -> None:
        try:
            rows = self._fleet.sample(time.monotonic(), first)
        except KvplaneError as error:
            self.call_from_thread(self._show_error, str(error))
            return
        self.call_from_thread(self._show, rows)

    def _visible(self) -> list[str]:
        """Return the names of the replicas on the screen."""
        table = self._table
        top, height = int(table.scroll_y), table.size.height
        keys = [row.key.value for row in table.ordered_rows[top : top + height]]
        return [key for key in keys if key is not None]

    def _show(self, rows: Sequence[Row]) -> None:
        if not self.is_running:
            return
        self.num_samples += 1
        self._rows = list(rows)
        self._show_rows()

    def _show_rows(self) -> None:
        """Show the rows; the cursor stays on its replica."""
        table, shown = self._table, self._order.apply(self._rows)
        arrow = " ▼" if self._order.descending else " ▲"
        for at, (column, heading) in enumerate(zip(COLUMNS, table.columns.values(), strict=True)):
            heading.label = Text(column.title + (arrow if at == self._order.column else ""))
        current = [row.key.value for row in table.ordered_rows]
        names = [row.summary.replica for row in shown]
        if names == current:
            for row in shown:
                self._update(table, row)
        else:
            self._fill(table, shown, current)
        self._show_counts()

    def _update(self, table: DataTable[Text], row: Row) -> None:
        """Draw those cells of a row again whose text has changed."""
        name = row.summary.replica
        for column, cell in zip(COLUMNS, table.get_row(name), strict=True):
            fresh = column.show(row)
            if fresh != cell:
                table.update_cell(name, column.title, fresh)

    def _fill(self, table: DataTable[Text], shown: Sequence[Row], current: Sequence[str | None]) -> None:
        chosen, scroll = (current[table.cursor_row] if current else None), table.scroll_y
        table.clear()
        for row in shown:
            table.add_row(*(column.show(row) for column in COLUMNS), key=row.summary.replica)
        at = next((at for at, row in enumerate(shown) if row.summary.replica == chosen), 0)
        table.move_cursor(row=at, scroll=False)
        table.scroll_to(y=scroll, animate=False)

    def _show_counts(self) -> None:
        line = Text("paused  " if self._is_paused else "")
        if not self._rows:
            line.append_text(NO_REPLICA)
        else:
            states = [row.state for row in self._rows]
            counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
            line.append(f"{self._table.row_count} of {len(states)} replicas shown: {counts}")
        self._line.update(line)

    def _show_error(self, text: str) -> None:
        self._has_failed = True
        self._line.update(Text(text, "bold red"))

    def save_picture(self, path: Path) -> None:
        """Run without a terminal for some samples, or until one fails, then write the screen to `path` as SVG."""
        seen: list[str] = []

        async def wait(pilot: Pilot[object]) -> None:
            while self.num_samples < PICTURE_SAMPLES and not self._has_failed:
                await pilot.pause(self._interval_s / 4)
            seen.append(self.picture())
            self.exit()

        self.run(headless=True, size=PICTURE_CELLS, auto_pilot=wait)
        path.write_text(seen[0], encoding="utf-8")

    def picture(self) -> str:
        """Return the screen as an SVG document."""
        return REMOTE_FONT.sub("", self.export_screenshot())
