"""A small disk of its own that can be filled and made read-only: a tmpfs, where this user may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = "2m"


class Disk:
    """A folder on a disk of SIZE, or on that of the machine.

    Attributes:
        is_own: whether it can be filled and made read-only.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.is_own = _mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)) == 0

    def fill(self) -> None:
        """Leave no byte of room."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(b"x" * 4096):
                    pass
            except OSError:
                return

    def make_room(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def allow_writes(self, allowed: bool) -> None:
        """Nobody may have a file of it open for writing when writes end."""
        assert _mount("-o", f"remount,{'rw' if allowed else 'ro'}", str(self.folder)) == 0, "remount"

    def unmount(self) -> None:
        if self.is_own:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


def _mount(*arguments: str) -> int:
    try:
        return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode
    except FileNotFoundError:
        return 1


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    disk = Disk(folder)
    try:
        yield disk
    finally:
        disk.unmount()
