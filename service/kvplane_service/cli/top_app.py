"""`kvplane top` as a full-screen program."""

from __future__ import annotations

import re
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
from kvplane_service.cli.top_view import NO_REPLICA, Watchers

PICTURE_LOOKS = 25
PICTURE_CELLS = (80, 58)
# What the picture would have a viewer load from the network; the viewer's own monospace does as well.
_REMOTE_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Top(App[None]):
    """Panels of all replicas, asked for again every so many seconds.

    Attributes:
        num_looks: answers shown so far.
    """

    TITLE = "kvplane top"
    CSS = "Static { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "quit"), ("p", "pause", "pause or go on")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, service: str, interval_s: float) -> None:
        super().__init__()
        self.num_looks = 0
        self._watchers = Watchers(client)
        self._interval_s = interval_s
        self._is_paused = False
        self.sub_title = service

    def compose(self) -> ComposeResult:
        """The screen: a line that is only there when something is wrong, and the panels."""
        yield Header()
        yield Static(id="trouble")
        yield VerticalScroll(Static("asking the service ...", id="replicas"))
        yield Footer()

    def on_mount(self) -> None:
        """Begin to ask."""
        self._look()
        self.set_interval(self._interval_s, self._tick)

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._is_paused = not self._is_paused
        self._show_pause()

    def _tick(self) -> None:
        if not self._is_paused:
            self._look()

    @work(thread=True, exclusive=True)
    def _look(self) -> None:
        try:
            panels = self._watchers.look(time.monotonic())
        except KvplaneError as error:
            self.call_from_thread(self._show_trouble, str(error))
            return
        self.call_from_thread(self._show, panels)

    def _show(self, panels: Sequence[RenderableType]) -> None:
        self.num_looks += 1
        self._show_pause()
        self.query_one("#replicas", Static).update(Group(*panels) if panels else NO_REPLICA)

    def _show_pause(self) -> None:
        self.query_one("#trouble", Static).update("paused" if self._is_paused else "")

    def _show_trouble(self, text: str) -> None:
        self.query_one("#trouble", Static).update(Text(text, "bold red"))

    def save_picture(self, path: Path) -> None:
        """Look so often that the spark lines are full, without a terminal; then write the screen as SVG."""
        seen: list[str] = []

        async def wait(pilot: Pilot[object]) -> None:
            while self.num_looks < PICTURE_LOOKS:
                await pilot.pause(self._interval_s / 4)
            seen.append(self.picture())
            self.exit()

        self.run(headless=True, size=PICTURE_CELLS, auto_pilot=wait)
        path.write_text(seen[0], encoding="utf-8")

    def picture(self) -> str:
        """The screen as SVG."""
        return _REMOTE_FONT.sub("", self.export_screenshot())
