"""The one process that writes the pages: an engine's, watched until it has exited."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvplane.base.errors import InvalidArgument, OtherWriter, PermissionDenied

# Fields of /proc/PID/stat behind the name, which ends with the last parenthesis: the start time is field 22.
_START_FIELD = 22 - 3


@dataclass(frozen=True, slots=True)
class ProcessName:
    """A process of this host, which no later one can be taken for.

    Attributes:
        pid: its number.
        start_ticks: when it was started, in ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessName:
        """The process of this number. Raises InvalidArgument when there is none."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            raise InvalidArgument(f"there is no process {pid}", field="pid", remedy="send your own") from None
        return cls(pid, int(text.rpartition(")")[2].split()[_START_FIELD]))


class Watched(Protocol):
    """One process, which no later one can be taken for."""

    def has_exited(self) -> bool:
        """Whether it writes no more, for ever."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class Writer:
    """Who the pages are lent to. A process keeps them until it has exited; nothing else takes them from it."""

    def __init__(self, watch: Callable[[ProcessName], Watched] | None = None) -> None:
        """`watch` begins to watch a process, or raises InvalidArgument or PermissionDenied; None: by the kernel."""
        self._watch = watch or PidFd
        self._name: ProcessName | None = None
        self._watched: Watched | None = None

    @property
    def pid(self) -> int:
        """The process that has the pages; 0 when none has, or it has exited."""
        if self._name is None or self._watched is None:
            return 0
        if self._watched.has_exited():
            self.close()
            return 0
        return self._name.pid

    def lend(self, name: ProcessName) -> bool:
        """Lend the pages to a process; the same one may ask again. Returns whether they have changed hands.

        Raises:
            OtherWriter: another process has them and lives; `metadata["pid"]`.
            InvalidArgument: there is no such process, or no longer.
            PermissionDenied: it belongs to another user.
        """
        holder = self.pid
        if self._name == name:
            return False
        if holder:
            raise OtherWriter(
                f"process {holder} has the pages",
                field="pid",
                remedy="end it; they change hands when it has exited",
                metadata={"pid": str(holder)},
            )
        self._watched, self._name = self._watch(name), name
        return True

    def close(self) -> None:
        """Stop watching."""
        if self._watched is not None:
            self._watched.close()
        self._name, self._watched = None, None


class PidFd:
    """A process as the kernel watches it: by a descriptor."""

    def __init__(self, name: ProcessName) -> None:
        """Of exactly this process, checked behind its opening: the number cannot pass on meanwhile.

        Raises:
            InvalidArgument: there is no such process, or no longer.
            PermissionDenied: it belongs to another user.
        """
        try:
            self._pidfd = os.pidfd_open(name.pid)
        except (OSError, OverflowError) as error:
            raise InvalidArgument(f"process {name.pid}: {error}", field="pid", remedy="send your own") from None
        with contextlib.ExitStack() as unless_it_is_right:
            unless_it_is_right.callback(self.close)
            if ProcessName.of(name.pid) != name or self.has_exited():
                raise InvalidArgument(f"process {name.pid} is another one", field="start_ticks", remedy="send your own")
            owner = Path(f"/proc/{name.pid}").stat().st_uid
            if owner != os.getuid():
                raise PermissionDenied(
                    f"process {name.pid} is user {owner}'s", field="pid", remedy="run the engine as the worker's user"
                )
            unless_it_is_right.pop_all()

    def has_exited(self) -> bool:
        """See Watched."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """See Watched."""
        os.close(self._pidfd)
