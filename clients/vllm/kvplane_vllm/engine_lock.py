"""The lock of an engine whose pages are in its own process: one such process at a time writes a replica.

Where kvplane workers have the pages, they admit one engine process at a time; this lock does so where there is no
worker. It covers the processes of one user on one host; the service refuses a second session from anywhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

from kvplane.base.errors import OtherWriter, PermissionDenied

WAIT = "end that process first, or choose another replica"


class EngineLock:
    """Held from its construction until `release`, or until the process ends in any way: the kernel then releases it.

    A child process does not inherit it. Within a process it excludes nothing.

    Attributes:
        path: the locked file, which has the pid of the process that locked it last.
    """

    def __init__(self, address: str, replica: str, folder: Path | None = None) -> None:
        """Lock the replica `replica` of the service at `address`.

        Raises OtherWriter if another process has the lock, and PermissionDenied if the folder of the locks belongs to
        another user.
        """
        folder = folder or lock_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionDenied(f"{folder} belongs to another user", field="replica", remedy="set XDG_RUNTIME_DIR")
        name = hashlib.sha256(f"{address} {replica}".encode()).hexdigest()[:16]
        self.path = folder / f"engine-{name}.lock"
        self._file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(self._file, 20, 0).decode() or "unknown"
            os.close(self._file)
            message = f"the engine process {pid} writes the replica {replica!r} at {address}"
            raise OtherWriter(message, field="replica", remedy=WAIT, metadata={"pid": pid}) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Release the lock; the file stays, since another process may already wait for it. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def lock_folder() -> Path:
    """Return the folder of this user's locks."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kvplane-{os.getuid()}"
