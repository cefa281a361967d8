"""Pages of one pool by key, in slots in host memory and on a disk.

    save   pages ─▶ host slot, sealed ─ seal verified ─▶ disk slot, sealed
    stage  disk slot ─ seal verified ─▶ host slot, sealed
           host slot ─ seal verified ─▶ pinned until it is loaded

The seal of a slot names its key. So the directory, and the file of keys that it is read from after a restart, are
hints: a slot that has other bytes than those of the key is refused, whatever they say.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane_sglang.settings import FIELD
from kvplane_worker.tiers import DiskSlots, HostSlots
from kvplane_worker.tiers.seal import IDENTITY_BYTES, Content
from kvplane_worker.tiers.slots import SlotCounts, Slots

KEY_BYTES = 32
PIECE_BYTES = 4 << 20  # that a thread reads from the disk at a time
HOST, DISK = 0, 1
_EMPTY = bytes(KEY_BYTES)

Gather = Callable[[Sequence[int], Tensor], bool]  # copies the pages at these positions into rows; False: it may not

_log = logging.getLogger("sglang.kvplane")


class KeyFile:
    """The keys of the slots of a file, in a file next to it: what a restarted engine looks up.

    It is written, not mapped: access to a mapped page that was cut off, or that the disk cannot read, ends the process.
    """

    def __init__(self, path: Path, num_slots: int, is_new: bool) -> None:
        """Open or create the file; `is_new`: the slots hold nothing. Raises InvalidArgument if it cannot be used."""
        self.path = path
        size = num_slots * KEY_BYTES
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                info = os.fstat(file)
                if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                    raise PermissionError(0, "it is no file of this user")
                if is_new or info.st_size != size:
                    os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, size)
                self._keys = bytearray(size)
                os.preadv(file, [self._keys], 0)  # what is not read is no key
            except BaseException:
                os.close(file)
                raise
            self._file: int | None = file
        except OSError as error:
            raise InvalidArgument(
                f"{path} cannot be used: {error.strerror}",
                field=f"{FIELD}.disk",
                remedy="remove it, or give another folder",
            ) from None

    def __getitem__(self, slot: int) -> bytes:
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def __setitem__(self, slot: int, key: bytes) -> None:
        self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
        try:
            if self._file is not None:
                os.pwrite(self._file, key, slot * KEY_BYTES)
        except OSError as error:  # a key that stays there is a hint, which the seal of its slot refuses
            _log.error("%s cannot be written, its keys are not kept: %s", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        """Write nothing any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Directory:
    """Which key is in which slot of a tier. That used longest ago, and not pinned, is given away first."""

    def __init__(self, num_slots: int, keys: KeyFile | None = None) -> None:
        self._names = keys
        self._slots = OrderedDict[bytes, int]()
        self._free = list[int]()
        self._pins = Counter[int]()
        self._dropped = set[int]()  # pinned slots whose key was forgotten: free when the last pin ends
        for slot in reversed(range(num_slots)):
            key = keys[slot] if keys is not None else _EMPTY
            if key == _EMPTY or key in self._slots:
                self._free.append(slot)
            else:
                self._slots[key] = slot

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        """The slots that are pinned."""
        return len(self._pins)

    def pin(self, key: bytes) -> int | None:
        """Return the slot of a key, which is not given away until `unpin`; None if there is none."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
            self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """End a pin."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._dropped:
                self._dropped.remove(slot)
                self._free.append(slot)

    def take(self, count: int) -> list[int] | None:
        """Return slots that hold nothing, for `end`; None, and nothing changes, if there are too few."""
        missing = count - len(self._free)
        if missing > 0:
            unpinned = (key for key, slot in self._slots.items() if slot not in self._pins)
            evicted = [key for key, _ in zip(unpinned, range(missing), strict=False)]
            if len(evicted) < missing:
                return None
            for key in evicted:
                self.drop(key)
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return sorted(taken)

    def end(self, key: bytes, slot: int, is_good: bool) -> None:
        """A slot that was taken has the page of a key, or holds nothing."""
        if not is_good or key in self._slots:
            self._free.append(slot)
            return
        self._slots[key] = slot
        if self._names is not None:
            self._names[slot] = key

    def drop(self, key: bytes) -> None:
        """Forget a key, if it is there. Its slot is not given away while it is pinned."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        if self._names is not None:
            self._names[slot] = _EMPTY
        if slot in self._pins:
            self._dropped.add(slot)
        else:
            self._free.append(slot)


class KeyedSlots:
    """The pages of one pool. Threads may save and stage at once; the directories have a lock, the bytes none.

    Attributes:
        host, disk: the slots.
        page_bytes: bytes of a page.
    """

    def __init__(
        self, group: int, page_bytes: int, host: HostSlots, disk: DiskSlots | None, keys: KeyFile | None
    ) -> None:
        self.host, self.disk, self.page_bytes = host, disk, page_bytes
        self._group, self._keys = group, keys
        self._in_host = Directory(host.spec.num_blocks)
        self._on_disk = Directory(disk.spec.num_blocks if disk else 0, keys)
        self._lock = threading.Lock()

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page can be staged, as far as the directories say."""
        asks_disk = self.disk is not None and not self.disk.is_suspended
        with self._lock:
            return [key in self._in_host or (asks_disk and key in self._on_disk) for key in keys]

    @property
    def most_staged(self) -> int:
        """The pages that can be staged now."""
        return self.host.spec.num_blocks - self._in_host.num_pinned

    @property
    def num_slots(self) -> tuple[int, int]:
        """The slots in host memory and on the disk."""
        return self.host.spec.num_blocks, self.disk.spec.num_blocks if self.disk else 0

    def counts(self) -> dict[str, SlotCounts]:
        """What happened, by tier."""
        return {one.spec.kind.value: one.counts for one in (self.host, self.disk) if one is not None}

    def save(self, keys: Sequence[bytes], gather: Gather) -> list[bytes] | None:
        """Copy pages into host memory, of which those that are there already are left out. Returns the keys that the
        disk lacks, for `write`; None if not all pages are in host memory.
        """
        with self._lock:
            missing = [at for at, key in enumerate(keys) if key not in self._in_host]
            slots = self._in_host.take(len(missing))
        if slots is None:
            return None
        good = [False] * len(slots)
        try:
            for first, end in _runs(slots):
                positions = missing[first:end]
                good[first:end] = self.host.write(
                    self._contents(HOST, [keys[at] for at in positions], slots[first:end]),
                    self.page_bytes,
                    lambda rows, positions=positions: [gather(positions, rows)] * len(positions),  # type: ignore[misc]
                )
        finally:
            with self._lock:
                for at, slot, is_good in zip(missing, slots, good, strict=True):
                    self._in_host.end(keys[at], slot, is_good)
        _count_saved(self.host, sum(good), self.page_bytes)
        if not all(good):
            return None
        with self._lock:
            return [key for key in keys if self.disk is not None and key not in self._on_disk]

    def write(self, keys: Sequence[bytes]) -> None:
        """Copy pages from host memory to the disk, those that host memory still has."""
        assert self.disk is not None, "there is a disk where keys lack on it"
        with self._lock:
            pinned = {key: slot for key in keys if (slot := self._in_host.pin(key)) is not None}
            targets = self._on_disk.take(len(pinned))
        for (key, source), target in zip(pinned.items(), targets or (), strict=False):
            is_good = self._copy(key, (HOST, source), (DISK, target))
            with self._lock:
                self._on_disk.end(key, target, is_good)
        self.unpin(list(pinned.values()))

    def stage(self, keys: Sequence[bytes], threads: Executor | None, timeout_s: float) -> list[int] | None:
        """Make pages available in host memory, verified and pinned. Returns their slots, for `rows` and `unpin`; None,
        with a warning, if one is missing, damaged, or was not read in time: then nothing is pinned.
        """
        with self._lock:
            pinned = {key: slot for key in keys if (slot := self._in_host.pin(key)) is not None}
            absent = [key for key in keys if key not in pinned]
        if absent and threads and self._fetch(absent, threads, timeout_s):
            with self._lock:
                pinned |= {key: slot for key in absent if (slot := self._in_host.pin(key)) is not None}
        damaged = [
            key
            for key, slot in pinned.items()
            if self.host.read(self._contents(HOST, [key], [slot]), self.page_bytes) is None
        ]
        if len(pinned) == len(keys) and not damaged:
            return [pinned[key] for key in keys]
        self.unpin(list(pinned.values()))
        self._refuse(self.host, self._in_host, damaged)
        return None

    def rows(self, keys: Sequence[bytes], slots: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
        """Yield the pages of staged keys, as runs of `keys` and rows of host memory, verified."""
        for first, end in _runs(slots):
            rows = self.host.read(self._contents(HOST, keys[first:end], slots[first:end]), self.page_bytes)
            if rows is None:
                raise MemoryError("host memory was changed while a load was queued")
            self.host.counts.loaded += end - first
            self.host.counts.loaded_bytes += rows.numel()
            yield slice(first, end), rows

    def unpin(self, slots: Sequence[int]) -> None:
        """End the pins of staged pages."""
        with self._lock:
            for slot in slots:
                self._in_host.unpin(slot)

    def remove_files(self) -> None:
        """Remove the files of the disk; what is written to them from now on ends with the process."""
        for path in (self.disk.path, self._keys.path) if self.disk and self._keys else ():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the memory and close the file, which keeps what it has."""
        for one in (self.host, self.disk, self._keys):
            if one is not None:
                one.close()

    def _fetch(self, keys: Sequence[bytes], threads: Executor, timeout_s: float) -> bool:
        """Copy pages from the disk to host memory; whether all were good, in time. A read that ends later is kept."""
        assert self.disk is not None, "threads read a disk"
        with self._lock:
            sources = {key: slot for key in keys if (slot := self._on_disk.pin(key)) is not None}
            targets = self._in_host.take(len(keys)) if len(sources) == len(keys) else None
            if targets is None:
                for slot in sources.values():
                    self._on_disk.unpin(slot)
                return False
        rows = [(key, source, target) for (key, source), target in zip(sources.items(), targets, strict=True)]
        step = max(1, PIECE_BYTES // self.page_bytes)
        futures = [threads.submit(self._fetch_piece, rows[at : at + step]) for at in range(0, len(rows), step)]
        done, late = wait(futures, timeout_s)
        if late:
            _log.warning("the disk did not answer within %s s: the request is computed", timeout_s)
        return not late and all(one.result() for one in done)

    def _fetch_piece(self, rows: Sequence[tuple[bytes, int, int]]) -> bool:
        assert self.disk is not None, "its pages are read"
        damaged = []
        for key, source, target in rows:
            failures = self.disk.counts.failed
            is_good = self._copy(key, (DISK, source), (HOST, target))
            if not is_good and failures == self.disk.counts.failed and not self.disk.is_suspended:
                damaged.append(key)
            with self._lock:
                self._on_disk.unpin(source)
                self._in_host.end(key, target, is_good)
        self.disk.counts.loaded += len(rows) - len(damaged)
        self.disk.counts.loaded_bytes += (len(rows) - len(damaged)) * self.page_bytes
        self._refuse(self.disk, self._on_disk, damaged)
        return all(key in self._in_host for key, _, _ in rows)

    def _copy(self, key: bytes, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Copy a page from a slot, verified, to a slot of the other tier; both as (tier, slot)."""
        payload = self._tier(source[0]).read(self._contents(source[0], [key], [source[1]]), self.page_bytes)
        if payload is None:
            return False

        def fill(rows: Tensor) -> list[bool]:
            rows.copy_(payload)
            return [True]

        tier = self._tier(target[0])
        (is_good,) = tier.write(self._contents(target[0], [key], [target[1]]), self.page_bytes, fill)
        _count_saved(tier, int(is_good), self.page_bytes)
        return is_good

    def _refuse(self, tier: Slots, directory: Directory, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        _log.warning("%s: %d slots are not what they should be, and are refused", tier.spec.kind.value, len(keys))
        tier.counts.refused += len(keys)
        with self._lock:
            for key in keys:
                directory.drop(key)

    def _tier(self, tier: int) -> Slots:
        found = (self.host, self.disk)[tier]
        assert found is not None, "no slot of a disk that is not there"
        return found

    def _contents(self, tier: int, keys: Sequence[bytes], slots: Sequence[int]) -> list[Content]:
        identity = self._tier(tier).identity
        names = (blake2b(identity + key, digest_size=IDENTITY_BYTES).digest() for key in keys)
        return [Content(name, tier, slot, self._group, 1) for name, slot in zip(names, slots, strict=True)]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield intervals of positions whose slots follow each other."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield first, at
            first = at


def _count_saved(tier: Slots, pages: int, page_bytes: int) -> None:
    tier.counts.saved += pages
    tier.counts.saved_bytes += pages * page_bytes
