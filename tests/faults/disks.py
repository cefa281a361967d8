"""A small disk that can be full, read-only or hung: a file system in a file, or a tmpfs, where the user may mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_BYTES = 16 << 20
# Blocks every write for $1 seconds at a time, with short pauses, until its standard input is closed.
_HANGING = """
while fsfreeze --freeze "$0"; do
    echo
    read -r -t "$1"; ended=$?
    fsfreeze --unfreeze "$0"
    [ $ended -gt 128 ] || exit 0
    sleep 0.02
done
exit 1
"""
_FOR_EVER_S = 1e6


class Disk:
    """A folder on a disk of SIZE_BYTES, or on the disk of the machine.

    Attributes:
        is_own: whether the disk can be filled and made read-only.
        can_hang: whether writes to the disk can be blocked.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._hanging: subprocess.Popen[bytes] | None = None
        self.can_hang = _mount_file(folder)
        self.is_own = self.can_hang or _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder))

    def hang(self, seconds: float = _FOR_EVER_S) -> None:
        """Block writes until `go_on`, for at most the given time each.
        A process that writes cannot be killed meanwhile.
        """
        assert self.can_hang
        assert self._hanging is None
        command = ["bash", "-c", _HANGING, str(self.folder), str(seconds)]
        self._hanging = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._hanging.stdout is not None
        self._hanging.stdout.read(1)

    def go_on(self) -> None:
        """Unblock writes."""
        hanging, self._hanging = self._hanging, None
        if hanging is not None:
            hanging.communicate()
            assert hanging.returncode == 0, "fsfreeze"

    def fill(self) -> None:
        """Fill the disk."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(b"x" * 4096):
                    pass
            except OSError:
                return

    def make_room(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def allow_writes(self, allowed: bool) -> None:
        """Remount. No process may have a file open for writing when writes are disabled."""
        assert _run("mount", "-o", f"remount,{'rw' if allowed else 'ro'}", str(self.folder)), "remount"

    def unmount(self) -> None:
        self.go_on()
        if self.is_own:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


def _mount_file(folder: Path) -> bool:
    """A file with a file system of its own, which can be frozen."""
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    made = _run("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)) and _run("fsfreeze", "--version")
    if not (made and _run("mount", "-o", "loop", str(image), str(folder))):
        return False
    (folder / "lost+found").rmdir()
    return True


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    disk = Disk(folder)
    try:
        yield disk
    finally:
        disk.unmount()
