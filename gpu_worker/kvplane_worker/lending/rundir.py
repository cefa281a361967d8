"""The worker's directory: what proves that a process runs as the same user, and that an earlier worker is dead.

lock        held while the worker lives, and by nothing after it: the kernel lets go when the process ends
token       proves that its reader may enter the directory
worker.json who holds the lock, or held it last
worker.sock where kvplane.v1.Worker is served
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvplane.base.errors import InvalidArgument, NotFound, PermissionDenied, WorkerExists
from kvplane_worker.memory.shared import SHM_FOLDER

SOCKET, TOKEN, LOCK, STATE = "worker.sock", "token", "lock", "worker.json"
MAX_SOCKET_CHARS = 107  # what a Unix socket's address holds


@dataclass(frozen=True, slots=True)
class LastWorker:
    """Who held the directory before; it is dead."""

    worker_id: int
    pid: int


def default_run_dir(replica: str, rank: int) -> Path:
    """Where the worker of a rank has its directory unless it is told otherwise."""
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = hashlib.sha256(replica.encode()).hexdigest()[:16]
    return Path(home) / f"kvplane-{os.getuid()}" / f"{name}-{rank}"


def run_dir_of(where: str | Path) -> Path:
    """The worker's directory, from that or from its address."""
    path = Path(str(where).removeprefix("unix:"))
    return path.parent if path.name == SOCKET else path


def shared_prefix(path: Path) -> str:
    """What the names of the shared memory of a directory's worker begin with."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return f"kvplane-{os.getuid()}-{name}-"


class RunDir:
    """The directory of a living worker.

    Attributes:
        path: of the directory.
        token: what an engine must send.
        last: who held it before; None when nobody did, or its state cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Take the directory; make it where there is none, and clean up after a worker that died in it.

        Raises:
            WorkerExists: a worker lives there; `metadata["pid"]`.
            PermissionDenied: the directory is another user's, or others can enter it.
            InvalidArgument: its path is too long for a socket.
        """
        if len(str(path / SOCKET)) > MAX_SOCKET_CHARS:
            raise InvalidArgument(f"{path} is too long for a socket", field="run_dir", remedy="name a shorter one")
        self.path = path
        _make_private(path)
        self._lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.last = self._read_state()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            pid = self.last.pid if self.last else 0
            raise WorkerExists(
                f"process {pid} serves this rank from {path}",
                field="rank",
                remedy="stop it first, or name another rank or run_dir",
                metadata={"pid": str(pid), "address": self.address},
            ) from None
        self.last = self._read_state()
        self._remove_leftovers()
        self.token = secrets.token_hex(32)
        _write_private(path / TOKEN, self.token)

    @property
    def address(self) -> str:
        """Where gRPC listens."""
        return f"unix:{self.path / SOCKET}"

    def shared_path(self, name: str) -> Path:
        """Name for a file of shared memory that belongs to this directory."""
        return SHM_FOLDER / f"{shared_prefix(self.path)}{secrets.token_hex(8)}-{name}"

    def write_state(self, worker_id: int) -> None:
        """Say who holds the directory."""
        _write_private(self.path / STATE, json.dumps({"worker_id": worker_id, "pid": os.getpid()}))

    def leave(self) -> None:
        """Remove what is of use only while the worker lives, and let go. The lock's file stays for the next one."""
        self._remove_leftovers()
        (self.path / STATE).unlink(missing_ok=True)
        os.close(self._lock)

    def _remove_leftovers(self) -> None:
        """Of this worker, or of one that died: who holds the lock knows that nobody serves them."""
        for name in (SOCKET, TOKEN):
            (self.path / name).unlink(missing_ok=True)
        for left in SHM_FOLDER.glob(f"{shared_prefix(self.path)}*"):
            left.unlink(missing_ok=True)

    def _read_state(self) -> LastWorker | None:
        try:
            state = json.loads((self.path / STATE).read_text())
            return LastWorker(int(state["worker_id"]), int(state["pid"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # none yet, or cut short by the death of its writer


def read_token(path: Path) -> str:
    """The token of a worker's directory.

    Raises:
        PermissionDenied: the directory belongs to another user.
        NotFound: no worker serves there.
    """
    try:
        return (path / TOKEN).read_text()
    except PermissionError:
        raise PermissionDenied(
            f"user {os.getuid()} may not enter {path}", field="run_dir", remedy="run the engine as the worker's user"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"no worker serves in {path}", field="run_dir", remedy="start one, or name its run_dir"
        ) from None


def _make_private(path: Path) -> None:
    """Every directory that is made here, and the last one in any case, is the user's alone.

    The one above it may be root's too, but nobody else's, who could put another directory in its place.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid not in (0, os.getuid()):
        raise PermissionDenied(f"{path.parent} belongs to another user", field="run_dir", remedy="name another")
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionDenied(
            f"{path} is not a directory of user {os.getuid()} alone",
            field="run_dir",
            remedy="name another, or take the rights of others away (chmod 700)",
        )


def _write_private(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader sees all of it or the one before."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.rename(path)
