"""The process to which the pages are lent: their only writer. The worker watches this process until it has exited."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvplane.base.errors import InvalidArgument, OtherWriter, PermissionDenied

# Index of the start time (field 22) among the fields of /proc/PID/stat after the name, which ends with ")".
_START_FIELD = 22 - 3


@dataclass(frozen=True, slots=True)
class ProcessName:
    """A process on this host, identified by pid and start time. Unlike a pid alone, the pair is never reused.

    Attributes:
        pid: process id.
        start_ticks: start time, in clock ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessName:
        """Return the name of the process with this pid. Raises InvalidArgument if there is none."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            raise InvalidArgument(
                f"there is no process with pid {pid}", field="pid", remedy="send the pid of the calling process"
            ) from None
        return cls(pid, int(text.rpartition(")")[2].split()[_START_FIELD]))


class Watched(Protocol):
    """A process that is watched until it exits."""

    def has_exited(self) -> bool:
        """Return whether the process has exited, so that it can no longer write."""

    def close(self) -> None:
        """Stop watching the process and release its file descriptor."""


class Writer:
    """The process to which the pages are lent. The process keeps the pages until it exits; nothing
    else ends the loan.
    """

    def __init__(self, watch: Callable[[ProcessName], Watched] | None = None) -> None:
        """Start without a writer. `watch` is a function that starts to watch a process, or raises InvalidArgument or
        PermissionDenied; None = PidFd.
        """
        self._watch = watch or PidFd
        self._name: ProcessName | None = None
        self._watched: Watched | None = None

    @property
    def pid(self) -> int:
        """The pid of the process to which the pages are lent; 0 if there is none, or it has exited."""
        if self._name is None or self._watched is None:
            return 0
        if self._watched.has_exited():
            self.close()
            return 0
        return self._name.pid

    def lend(self, name: ProcessName) -> bool:
        """Lend the pages to a process. Returns False if the pages are already lent to that process, otherwise True.

        Raises:
            OtherWriter: the pages are lent to another running process; `metadata["pid"]` is its pid.
            InvalidArgument: there is no such process, or it has exited.
            PermissionDenied: the process belongs to another user.
        """
        holder = self.pid
        if self._name == name:
            return False
        if holder:
            raise OtherWriter(
                f"the pages are lent to process {holder}, which is still running",
                field="pid",
                remedy="stop that process; the pages are free once it has exited",
                metadata={"pid": str(holder)},
            )
        self._watched, self._name = self._watch(name), name
        return True

    def close(self) -> None:
        """Stop watching the process, if there is one."""
        if self._watched is not None:
            self._watched.close()
        self._name, self._watched = None, None


class PidFd:
    """A process that is watched through a pidfd (pidfd_open(2))."""

    def __init__(self, name: ProcessName) -> None:
        """Open a pidfd of exactly this process. Start time and owner are checked afterwards: an open pidfd follows no
        reused pid.

        Raises:
            InvalidArgument: there is no such process, or it has exited.
            PermissionDenied: the process belongs to another user.
        """
        try:
            self._pidfd = os.pidfd_open(name.pid)
        except (OSError, OverflowError) as error:
            raise InvalidArgument(
                f"process {name.pid} cannot be watched: {error}",
                field="pid",
                remedy="send the pid of the calling process",
            ) from None
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            if ProcessName.of(name.pid) != name or self.has_exited():
                raise InvalidArgument(
                    f"process {name.pid} does not have the start time {name.start_ticks}, or has exited",
                    field="start_ticks",
                    remedy="send pid and start time of the calling process",
                )
            owner = Path(f"/proc/{name.pid}").stat().st_uid
            if owner != os.getuid():
                raise PermissionDenied(
                    f"process {name.pid} belongs to user {owner}, not to the worker's user {os.getuid()}",
                    field="pid",
                    remedy="run the engine as the worker's user",
                )
            cleanup.pop_all()

    def has_exited(self) -> bool:
        """Return whether the process has exited, without waiting."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)
