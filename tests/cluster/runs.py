"""A run: its namespaces, its rows, and what is kept of failures."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.access import Found
from tests.cluster.cluster import Cluster, Failed, Space
from tests.cluster.table import Row, Table


@dataclass
class Seen:
    """What a case says: what was measured, and the parts that it left out."""

    text: str = ""
    left_out: list[str] = field(default_factory=list)


class Run:
    """All cases of one call.

    Attributes:
        folder: where a failure's artefacts are kept.
        name: begins the name of every namespace of this run.
    """

    def __init__(self, cluster: Cluster, found: Found, folder: Path, table: Table) -> None:
        self.cluster, self.found, self.folder, self.table = cluster, found, folder, table
        self.name = f"kvplane-test-{secrets.token_hex(3)}"
        self._left: list[Space] = []

    @contextmanager
    def space(self, slug: str, enforce: str = "restricted") -> Iterator[Space]:
        """A namespace, which is removed at the end, whatever happens."""
        space = Space(self.cluster, f"{self.name}-{slug}")
        self._left.append(space)
        try:
            space.make(enforce)
            yield space
        finally:
            with suppress(Failed):
                space.remove(waits=False)

    @contextmanager
    def row(self, name: str, *spaces: Space) -> Iterator[Seen]:
        """A row of the table: what the body says, or why it fails. A failure ends the body and nothing else."""
        seen, began, why = Seen(), time.monotonic(), ""
        try:
            yield seen
        except Failed as failure:
            why = str(failure)
        except Exception as error:  # a fault of a case fails its row, and the other cases run
            why = f"{type(error).__name__}: {error}"
            self._write(name, traceback.format_exc())
        seconds, kept = time.monotonic() - began, ""
        if why:
            kept = str(self.folder / slug_of(name))
            for space in spaces:
                space.keep(self.folder / slug_of(name))
        self.table.add(Row(name, seconds, why or seen.text, tuple(seen.left_out), bool(why), kept))

    def end(self) -> None:
        """Wait until every namespace of the run is gone: a removal that hangs is a failure."""
        with self.row("namespaces are removed", *self._left) as seen:
            for space in self._left:
                space.remove()
            seen.text = f"{len(self._left)} namespaces"

    def _write(self, name: str, text: str) -> None:
        folder = self.folder / slug_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "traceback.txt").write_text(text)


def slug_of(name: str) -> str:
    """A name of a row as a folder."""
    return "".join(one if one.isalnum() else "-" for one in name.lower()).strip("-")
