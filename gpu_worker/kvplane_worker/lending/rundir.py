"""The worker's private directory (mode 0700), with these files:

lock         locked while the worker runs; the kernel releases the lock when the process ends, so that a free lock
             proves that the last worker has exited
token        secret that engines send; a process that can read it runs as the same user
worker.json  worker id and pid of the process that holds the lock, or held it last
worker.sock  Unix socket of the gRPC API kvplane.v1.Worker
grpc.sock    Unix socket to which the worker passes the connections of worker.sock on
arena.sock   Unix socket at which workers of peers get the descriptor of the host tier
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvplane.base.errors import InvalidArgument, NotFound, PermissionDenied, WorkerExists
from kvplane.base.worker import is_socket_path
from kvplane_worker.memory.folders import make_private
from kvplane_worker.memory.shared import SHM_FOLDER

SOCKET, GRPC_SOCKET, TOKEN, LOCK, STATE = "worker.sock", "grpc.sock", "token", "lock", "worker.json"
ARENA_SOCKET = "arena.sock"
TABLE, LEFT = "-stamps", "-left"  # ends of the names of stamp tables in shared memory
MAX_SOCKET_CHARS = 107  # most characters of a Unix socket address


@dataclass(frozen=True, slots=True)
class LastWorker:
    """The worker that used the directory before. Its process has exited."""

    worker_id: int
    pid: int


def default_run_dir(replica: str, rank: int) -> Path:
    """Return the default directory of the worker of a rank."""
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = hashlib.sha256(replica.encode()).hexdigest()[:16]
    return Path(home) / f"kvplane-{os.getuid()}" / f"{name}-{rank}"


def run_dir_of(where: str | Path) -> Path:
    """Return the worker's directory, given that directory or the worker's address."""
    path = Path(str(where).removeprefix("unix:"))
    return path.parent if path.name == SOCKET else path


def shared_prefix(path: Path) -> str:
    """Return the prefix of the names of shared memory that belongs to a directory."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return f"kvplane-{os.getuid()}-{name}-"


class RunDir:
    """The directory of a running worker.

    Attributes:
        path: path of the directory.
        token: secret that engines must send.
        last: the worker that used the directory before; None if there was none, or its file cannot be read.
        left: the stamp table of a worker that was killed, if no process has it mapped any more; b"" if there is none.
            It stays for the next worker until `forget_left`.
    """

    def __init__(self, path: Path) -> None:
        """Create the directory if it does not exist, lock it, and remove the files of an earlier worker.

        Raises:
            WorkerExists: a running worker has the lock; `metadata["pid"]` is its process.
            PermissionDenied: the directory belongs to another user, or other users can enter it.
            InvalidArgument: the directory cannot be made; or its path is too long for a Unix socket, or has a character
                that gRPC parses (%, ?, #).
        """
        path = path.resolve()  # the service reads it, from a directory of its own
        if not is_socket_path(str(path / SOCKET)):
            raise InvalidArgument(
                f"{path} is not the path of a directory that gRPC can use",
                field="run_dir",
                remedy="choose a path of printable characters without %, ? and #",
            )
        if len(str(path / SOCKET)) > MAX_SOCKET_CHARS:
            raise InvalidArgument(
                f"{path / SOCKET} is longer than {MAX_SOCKET_CHARS} characters, the maximum of a Unix socket",
                field="run_dir",
                remedy="choose a shorter path",
            )
        self.path = path
        make_private(path, "run_dir")
        self._lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.last = self._read_state()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            pid = self.last.pid if self.last else 0
            raise WorkerExists(
                f"the worker process {pid} holds the pages of this rank and uses the directory {path}",
                field="rank",
                remedy="stop that process first, or choose another rank or run_dir",
                metadata={"pid": str(pid), "address": self.address},
            ) from None
        self.last = self._read_state()
        self.left = self._left_table()
        self._remove_leftovers()
        self.token = secrets.token_hex(32)
        _write_private(path / TOKEN, self.token)

    @property
    def address(self) -> str:
        """The gRPC address of the worker."""
        return f"unix:{self.path / SOCKET}"

    def shared_path(self, name: str) -> Path:
        """Return a new path for shared memory that belongs to this directory."""
        return SHM_FOLDER / f"{shared_prefix(self.path)}{secrets.token_hex(8)}-{name}"

    def write_state(self, worker_id: int) -> None:
        """Record this process as the worker that uses the directory."""
        _write_private(self.path / STATE, json.dumps({"worker_id": worker_id, "pid": os.getpid()}))

    def leave(self) -> None:
        """Remove socket, token and shared memory, then release the lock.

        The lock file stays: another worker may already wait to lock it.
        """
        (self.path / STATE).unlink(missing_ok=True)
        self.give_up()

    def give_up(self) -> None:
        """Leave before `write_state`: the next worker can still remove the registration of the last one."""
        self._remove_leftovers()
        os.close(self._lock)

    def _remove_leftovers(self) -> None:
        """Remove the files of this worker or of an earlier worker. Safe, since no other worker uses these files while
        this worker has the lock.
        """
        for name in (SOCKET, GRPC_SOCKET, ARENA_SOCKET, TOKEN):
            (self.path / name).unlink(missing_ok=True)
        for left in self._shared(""):
            if not left.name.endswith(LEFT):
                left.unlink(missing_ok=True)

    def forget_left(self) -> None:
        """Remove the table of `left`: another one has what it says."""
        for table in self._shared(LEFT):
            table.unlink(missing_ok=True)

    def _left_table(self) -> bytes:
        """Return the stamp table that a killed worker left. A process that maps it may still write it: then b""."""
        left, tables = self._shared(LEFT), self._shared(TABLE)
        if not left and len(tables) == 1 and not _is_mapped(tables[0]):
            left = [tables[0].rename(str(tables[0]).removesuffix(TABLE) + LEFT)]
        return left[0].read_bytes() if left else b""

    def _shared(self, end: str) -> list[Path]:
        """The shared memory of this directory whose names have this end."""
        return list(SHM_FOLDER.glob(f"{shared_prefix(self.path)}*{end}"))

    def _read_state(self) -> LastWorker | None:
        try:
            state = json.loads((self.path / STATE).read_text())
            return LastWorker(int(state["worker_id"]), int(state["pid"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # not written yet, or only in part because its writer was killed


def read_token(path: Path) -> str:
    """Return the token in a worker's directory.

    Raises:
        PermissionDenied: the directory belongs to another user.
        NotFound: there is no running worker with this directory.
    """
    try:
        return (path / TOKEN).read_text()
    except PermissionError:
        raise PermissionDenied(
            f"user {os.getuid()} may not read the directory {path} of the worker",
            field="run_dir",
            remedy="run the engine as the worker's user",
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"no worker runs with the directory {path}",
            field="run_dir",
            remedy="start a worker, or give the run_dir of a running one",
        ) from None


def _is_mapped(path: Path) -> bool:
    """Whether a process of this user maps the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has exited, or is of another user, who cannot map the file
            if str(path) in maps.read_text():
                return True
    return False


def _write_private(path: Path, text: str) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.rename(path)
