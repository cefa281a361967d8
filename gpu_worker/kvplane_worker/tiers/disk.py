"""The slots of a tier on a disk: one file of fixed size, which no other worker uses."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument, OutOfMemory, WorkerExists
from kvplane.base.groups import TierSpec
from kvplane.base.stamp_table import StampTable
from kvplane_worker.memory.folders import WRITE_OF_OTHERS, make_private
from kvplane_worker.tiers.kept import Kept, kept_of, read_index, remove_index, write_index
from kvplane_worker.tiers.seal import HEADER_BYTES, IDENTITY_BYTES, Content, held_in
from kvplane_worker.tiers.slots import ALIGNMENT_BYTES, Fill, SlotCounts, Slots, aligned

MAGIC = b"kvptier2"
_EARLIER = b"kvptier1"  # its seals did not name keys: such a file begins empty
_CONTENT = struct.Struct(f"<8s{IDENTITY_BYTES}sQQ")  # magic, content, number of slots, bytes of a slot
FAILURES = 3  # in a row, after which the disk is left alone for a while
PAUSE_S = 30.0
ENDING = ".slots"  # of the names of the files
KEYS = ".keys"  # of the file next to one, where a linker names its slots

_log = logging.getLogger(__name__)


class DiskSlots(Slots):
    """A tier in a file. See `Slots`.

    The file begins with a page that names its content, then come the slots: a page with the header, then the payload.
    Nothing is synchronized to the disk: a slot that was not written, or in part, does not have the seal that its reader
    expects. The file is opened with O_DIRECT where the file system has it, so the page cache holds no second copy.

    Attributes:
        path: the file.
        incarnation: names the content of the file; another one whenever the file begins empty.
    """

    def __init__(
        self, spec: TierSpec, slot_bytes: int, folder: Path, name: str, content: bytes = bytes(IDENTITY_BYTES)
    ) -> None:
        """Create and reserve the file `name` in a folder, which is created if it does not exist.

        `content`: names what the slots of this tier may hold. Raises:
            WorkerExists: another worker uses the file.
            OutOfMemory: the disk has too little room.
            InvalidArgument: the folder cannot be used, or the file is none of a tier.
            PermissionDenied: other users can write to the folder, or replace it.
        """
        self.spec = spec
        self.slot_bytes = aligned(slot_bytes)
        self.counts = SlotCounts()
        self._stride = ALIGNMENT_BYTES + self.slot_bytes
        self._threads = threading.local()
        self._failures, self._paused_until = 0, 0.0
        self.path = _private(folder) / name
        self._content = _CONTENT.pack(MAGIC, content, spec.num_blocks, self.slot_bytes)
        self.namespace = self.incarnation = content
        try:
            self._file, self.is_direct = _open(self.path)
        except OSError as error:
            raise InvalidArgument(
                f"{self.path} cannot be created: {error.strerror}",
                field="--disk",
                remedy="give a folder that this user can write",
            ) from None
        with ExitStack() as undo:
            undo.callback(os.close, self._file)
            self._lock()
            self._check_kind()
            self._may_hold = os.fstat(self._file).st_size > 0
            self._reserve()
            undo.pop_all()

    @property
    def number(self) -> int:
        """A number, not 0, that names the content of the file, in stamp tables."""
        return int.from_bytes(self.incarnation[:8], "little") or 1

    def take_over(self, left: StampTable | None, first: int = 0) -> Kept | None:
        """Return what the file holds for an equal tier: according to its index, else to `left`, the table of a worker
        that was killed, if it is of this file; `first` is the id of the first slot there. None: the file begins empty.
        Call it before the first write, and write the versions to the stamp table before `begin`.
        """
        if not self._is_equal():
            return None
        kept = read_index(self._index, self.incarnation, self.spec.num_blocks)
        if kept is None and left is not None and left.disk_incarnation == self.number:
            return kept_of(left, first, self.spec.num_blocks)
        return kept

    def keep(self) -> bool:
        """Begin to use the file with all that its slots hold if it is of an equal tier, else empty; returns which. For
        seals that name what a slot holds by themselves (`Content.identity`), not by a version that is kept elsewhere.
        """
        is_equal = self._is_equal()
        self.begin(Kept(0, ()) if is_equal else None)
        return is_equal

    def begin(self, kept: Kept | None) -> None:
        """Begin to use the file, with what it kept or empty, without what it held for another registration. Raises
        InvalidArgument if it cannot be written, OutOfMemory if other files took its room meanwhile.
        """
        if kept is None:
            if self._may_hold:
                os.ftruncate(self._file, 0)
                self._reserve()
            self.incarnation = secrets.token_bytes(IDENTITY_BYTES)  # no seal of earlier content fits
            buffer, _ = self._buffer(1, 0)
            buffer[: _CONTENT.size + IDENTITY_BYTES] = self._content + self.incarnation
            if not self._does(os.pwritev, [buffer], 0):
                problem = f"{self.path} cannot be written"
                raise InvalidArgument(problem, field="--disk", remedy="give a folder on another disk")
        try:
            remove_index(self._index)
        except OSError as error:
            raise InvalidArgument(
                f"{self._index} cannot be removed: {error.strerror}", field="--disk", remedy="give another folder"
            ) from None

    def _is_equal(self) -> bool:
        """Whether the file was written for an equal tier; then its incarnation is that of this one."""
        head, size = self._head(), _CONTENT.size
        if head is None or head[:size] != self._content:
            return False
        self.incarnation = bytes(head[size : size + IDENTITY_BYTES])
        return True

    @property
    def _index(self) -> Path:
        return _index_of(self.path)

    def _head(self) -> memoryview | None:
        buffer, _ = self._buffer(1, 0)
        return buffer if self._does(os.preadv, [buffer], 0) else None

    def _check_kind(self) -> None:
        """Refuse a file that no worker of this user wrote: it may be someone else's, who could write its slots."""
        info = os.fstat(self._file)
        is_ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        if is_ours and not info.st_size:
            return
        head = self._head() if is_ours else None
        if head is None or head[: len(MAGIC)] not in (MAGIC, _EARLIER):
            raise InvalidArgument(
                f"{self.path} is no file of a disk tier of this user",
                field="--disk",
                remedy="remove it, or give another folder",
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkerExists(
                f"another worker uses {self.path}", field="--disk", remedy="give each worker a folder of its own"
            ) from None

    def _reserve(self) -> None:
        size = ALIGNMENT_BYTES + self.spec.num_blocks * self._stride
        is_new = not os.fstat(self._file).st_size
        free = os.statvfs(self.path)
        room = free.f_bavail * free.f_frsize + os.fstat(self._file).st_blocks * 512
        try:
            if size > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if is_new:  # from its first byte on the file is of a tier, and holds nothing
                buffer, _ = self._buffer(1, 0)
                buffer[: len(MAGIC)] = MAGIC
                os.pwritev(self._file, [buffer], 0)
                os.fsync(self._file)
            os.ftruncate(self._file, size)
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            if is_new:
                self.path.unlink(missing_ok=True)
            raise OutOfMemory(
                f"the disk tier needs {size} bytes in {self.path.parent}, {room} are free: {error.strerror}",
                field="tiers",
                remedy=f"register the replica with a disk tier of at most {room // self._stride} blocks",
                metadata={"asked": str(size), "free": str(room), "num_blocks": str(room // self._stride)},
            ) from None

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        """See `Slots.write`. False also while the disk fails."""
        buffer, rows = self._buffer(len(contents), num_bytes)
        if self.is_suspended:
            return [False] * len(contents)
        good = fill(rows)
        width = len(buffer) // len(contents)
        for at in compress(range(len(contents)), good):
            row = buffer[at * width : (at + 1) * width]
            row[:HEADER_BYTES] = contents[at].seal(row[ALIGNMENT_BYTES : ALIGNMENT_BYTES + num_bytes])
        if all(good) and width == self._stride:  # rows that follow each other in the file too
            return [self._does(os.pwritev, [buffer], self._at(contents[0].slot))] * len(contents)
        for at in compress(range(len(contents)), list(good)):
            row = buffer[at * width : (at + 1) * width]
            good[at] = self._does(os.pwritev, [row], self._at(contents[at].slot))
        return good

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        """See `Slots.read`. None also while the disk fails."""
        self._threads.is_damaged = num_bytes > self.slot_bytes
        if self._threads.is_damaged or self.is_suspended:
            return None
        buffer, rows = self._buffer(len(contents), num_bytes)
        width = len(buffer) // len(contents)
        at_once = len(contents) if width == self._stride else 1  # rows that follow each other in the file too
        for at, content in enumerate(contents):
            row = buffer[at * width : (at + 1) * width]
            some = buffer[at * width : (at + at_once) * width]
            if at % at_once == 0 and not self._does(os.preadv, [some], self._at(content.slot)):
                return None
            payload = row[ALIGNMENT_BYTES : ALIGNMENT_BYTES + num_bytes]
            if row[:HEADER_BYTES] != content.seal(payload):
                self._threads.is_damaged = True
                return None
        return rows

    def note_unread(self, contents: Sequence[Content]) -> None:
        """See `Slots.note_unread`. What the disk fails to read is counted as it fails."""
        self.counts.refused += len(contents) * self._threads.is_damaged

    def held(self, slot: int) -> tuple[int, int]:
        """See `Slots.held`."""
        buffer, _ = self._buffer(1, 0)
        return held_in(bytes(buffer[:HEADER_BYTES])) if self._does(os.preadv, [buffer], self._at(slot)) else (0, 0)

    def close(self, kept: Kept | None = None, erase: bool = False) -> None:
        """Close the file; see `Slots.close`."""
        try:
            if erase:
                _erase(self.path)
                _log.info("%s: erased", self.path)
            elif kept is not None:
                os.fsync(self._file)  # else a crash of the host could leave an index that is newer than the slots
                write_index(self._index, self.incarnation, kept)
        except OSError as error:
            _log.warning("%s keeps nothing for the next worker: %s", self.path, error)
        finally:
            os.close(self._file)

    def _at(self, slot: int) -> int:
        return ALIGNMENT_BYTES + slot * self._stride

    def _buffer(self, count: int, num_bytes: int) -> tuple[memoryview, Tensor]:
        """Return the buffer of this thread for this number of slots, and the payloads in it."""
        width = ALIGNMENT_BYTES + aligned(num_bytes)
        held: mmap.mmap | None = getattr(self._threads, "buffer", None)
        if held is None or len(held) < count * width:
            held = self._threads.buffer = mmap.mmap(-1, count * width)
        view = memoryview(held)[: count * width]
        rows = torch.frombuffer(view, dtype=torch.uint8).view(count, width)
        return view, rows[:, ALIGNMENT_BYTES : ALIGNMENT_BYTES + num_bytes]

    def _does(self, act: Callable[[int, list[memoryview], int], int], buffers: list[memoryview], offset: int) -> bool:
        """Read or write whole buffers; False, after a warning, if the disk does not."""
        try:
            done = act(self._file, buffers, offset)
            if done != len(buffers[0]):
                raise OSError(errno.EIO, f"{done} of {len(buffers[0])} bytes")
        except OSError as error:
            self._failures += 1
            self.counts.failed += 1
            _log.warning("%s: %s", self.path, error)
            if self._failures >= FAILURES:
                self._paused_until = time.monotonic() + PAUSE_S
            return False
        self._failures = 0
        return True

    @property
    def is_suspended(self) -> bool:
        """See `Slots.is_suspended`."""
        return self._failures >= FAILURES and time.monotonic() < self._paused_until


def erase_left(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Remove what disk tiers of this user hold in a folder. Yields each file, and whether it was removed: not while a
    worker uses it.
    """
    for path in sorted(folder.glob(f"*{ENDING}")):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # a link, or of another user
        try:
            info = os.fstat(file)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and os.pread(file, len(MAGIC), 0) == MAGIC:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _erase(path)
                yield path, True
        except BlockingIOError:
            yield path, False
        finally:
            os.close(file)


def _erase(path: Path) -> None:
    """Remove a file, its index and its keys; its worker, or who has its lock, calls it."""
    remove_index(_index_of(path))
    path.with_suffix(KEYS).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def _private(folder: Path) -> Path:
    """Return the folder, made if it does not exist, or in one of root, such as a mounted volume, one of this user.
    Raises as `make_private`.
    """
    folder = folder.resolve()
    if os.geteuid() and folder.is_dir() and not folder.stat().st_uid:
        folder /= f"kvplane-{os.geteuid()}"
    make_private(folder, "--disk", WRITE_OF_OTHERS)
    return folder


def _open(path: Path) -> tuple[int, bool]:
    """Open a file for direct reads and writes where the file system has them; returns whether it does."""
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), False
