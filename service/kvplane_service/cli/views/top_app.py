"""The full-screen program `kvplane top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import Footer, Header, Static

from kvplane import Client, KvplaneError
from kvplane_service.cli.views.panels import REMOTE_FONT
from kvplane_service.cli.views.top_panels import NO_REPLICA, ReplicaPanels

PICTURE_SAMPLES = 25
PICTURE_CELLS = (80, 58)


class Top(App[None]):
    """Shows panels of all replicas and refreshes them every `interval_s` seconds.

    Attributes:
        num_samples: number of samples shown so far.
    """

    TITLE = "kvplane top"
    CSS = "Static { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "quit"), ("p", "pause", "pause or resume")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, service: str, interval_s: float) -> None:
        super().__init__()
        self.num_samples = 0
        self._replicas = ReplicaPanels(client)
        self._interval_s = interval_s
        self._is_paused = False
        self.sub_title = service

    def compose(self) -> ComposeResult:
        """Build the screen: a line for errors, which is empty without one, and the panels."""
        yield Header()
        yield Static(id="error")
        yield VerticalScroll(Static("connecting ...", id="replicas"))
        yield Footer()

    def on_mount(self) -> None:
        """Take the first sample and start the timer for the following ones."""
        self._sample()
        self.set_interval(self._interval_s, self._tick)

    def action_pause(self) -> None:
        """Pause the refresh, or resume it if it is paused."""
        self._is_paused = not self._is_paused
        self._show_pause()

    def _tick(self) -> None:
        if not self._is_paused:
            self._sample()

    @work(thread=True, exclusive=True)
    def _sample(self) -> None:
        try:
            panels = self._replicas.sample(time.monotonic())
        except KvplaneError as error:
            self.call_from_thread(self._show_error, str(error))
            return
        self.call_from_thread(self._show, panels)

    def _show(self, panels: Sequence[RenderableType]) -> None:
        self.num_samples += 1
        self._show_pause()
        self.query_one("#replicas", Static).update(Group(*panels) if panels else NO_REPLICA)

    def _show_pause(self) -> None:
        self.query_one("#error", Static).update("paused" if self._is_paused else "")

    def _show_error(self, text: str) -> None:
        self.query_one("#error", Static).update(Text(text, "bold red"))

    def save_picture(self, path: Path) -> None:
        """Run without a terminal until the spark lines are full, then write the screen to `path` as SVG."""
        seen: list[str] = []

        async def wait(pilot: Pilot[object]) -> None:
            while self.num_samples < PICTURE_SAMPLES:
                await pilot.pause(self._interval_s / 4)
            seen.append(self.picture())
            self.exit()

        self.run(headless=True, size=PICTURE_CELLS, auto_pilot=wait)
        path.write_text(seen[0], encoding="utf-8")

    def picture(self) -> str:
        """Return the screen as an SVG document."""
        return REMOTE_FONT.sub("", self.export_screenshot())
