"""The process at the other end of a Unix socket, as the kernel names it (SO_PEERCRED): no message can claim another."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from kvplane.base.errors import PermissionDenied, Unavailable

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Peer(NamedTuple):
    """A process with a Unix socket.

    Attributes:
        pid: the process that connected, or that listens; 0 = in a process namespace that this process does not see.
        uid: the user that it ran as.
    """

    pid: int
    uid: int

    @property
    def is_trusted(self) -> bool:
        """Whether it runs as the user of this process, or as root."""
        return self.uid in (0, os.getuid())


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end of a connected Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def check_listener(path: str, shown: str) -> None:
    """Connect to a Unix socket, and check that a process of this user listens there. Does not wait.

    Args:
        path: the path of the socket.
        shown: its name in errors.

    Raises:
        PermissionDenied: a process of another user listens.
        Unavailable: no process listens, or too many connections wait.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            raise Unavailable(f"cannot connect to {shown}: {error.strerror}") from None
        listener = peer_of(probe)
    if not listener.is_trusted:
        raise PermissionDenied(
            f"a process of user {listener.uid} listens at {shown}, and not one of user {os.getuid()}",
            field="run_dir",
            remedy="run worker, engine and service as the same user",
        )
