"""Opens a public serving trace of any known kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from enum import Enum
from itertools import chain
from pathlib import Path
from types import TracebackType

from kvplane.base.errors import InvalidArgument
from kvplane_replay.workloads.fields import parse
from kvplane_replay.workloads.lines import Line, TraceLines, malformed
from kvplane_replay.workloads.mooncake import read_mooncake
from kvplane_replay.workloads.requests import TraceRequest
from kvplane_replay.workloads.weka import DEFAULT_SPACING_S, read_weka


class TraceKind(Enum):
    """Whose format a trace has."""

    MOONCAKE = "mooncake"
    WEKA = "weka"


class TraceFile:
    """A trace, read once from front to back while it is iterated over.

    Attributes:
        kind: found by looking at the first line.
        size_bytes: of the file as stored.
    """

    def __init__(self, path: Path, session_spacing_s: float = DEFAULT_SPACING_S) -> None:
        """Opens the file and looks at its first line. `session_spacing_s` is used where sessions have no
        common clock.

        Raises:
            MalformedTrace: the first line is of no known kind, or damaged.
            NotFound, InvalidArgument, FailedPrecondition: as `TraceLines`.
        """
        if not session_spacing_s >= 0:
            raise InvalidArgument(f"{session_spacing_s} is below 0", field="session_spacing_s")
        with ExitStack() as if_refused:
            self._lines = TraceLines(path)
            if_refused.callback(self._lines.close)
            first = next(self._lines, None)
            if first is None:
                raise malformed(str(path), 1, "the file is empty")
            self.kind = _kind_of(first)
            if_refused.pop_all()
        self.size_bytes = self._lines.size_bytes
        lines = chain([first], self._lines)
        self._requests = (
            read_mooncake(lines) if self.kind is TraceKind.MOONCAKE else read_weka(lines, session_spacing_s)
        )

    @property
    def bytes_read(self) -> int:
        """Bytes of the stored file that were read so far, for a progress bar."""
        return self._lines.bytes_read

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests in order of arrival. At the place of a fault raises MalformedTrace; those before it
        are good.
        """
        return self._requests

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def _kind_of(first: Line) -> TraceKind:
    record = parse(first)
    if "requests" in record:
        return TraceKind.WEKA
    if "hash_ids" in record:
        return TraceKind.MOONCAKE
    raise first.malformed("neither a Mooncake request (hash_ids) nor a Weka session (requests)")
