"""The tiers of one engine: the pools of its pages together.

A look-up returns all lengths that can be restored: all pages of full attention from the first one on, and of each other
pool the last pages before the end. A save copies on a thread, one after the other in their order, first to host memory
and then to the disk; SGLang locks the pages until the copy in host memory has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvplane.base.errors import KvplaneError, OutOfMemory
from kvplane.base.groups import TierKind, TierSpec
from kvplane_sglang.pools import KV, PagePool
from kvplane_sglang.settings import FIELD, Settings, wrong
from kvplane_sglang.slots import KeyedSlots, KeyFile
from kvplane_worker.memory import free_host_bytes, is_in_memory, use_device
from kvplane_worker.tiers import DiskSlots, HostSlots
from kvplane_worker.tiers.disk import ENDING, KEYS
from kvplane_worker.tiers.slots import MOST_OF_FREE

NUM_READERS = 4  # threads that read the disk
MOST_SAVES = 64  # that wait: SGLang offers what is refused again, when it is hit the next time

_log = logging.getLogger("sglang.kvplane")


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one pool.

    Attributes:
        pool: its name.
        keys: of each page.
        indices: entries of the pool, int64 in host memory, `rows` per page; empty where a page is only looked up.
    """

    pool: str
    keys: Sequence[bytes]
    indices: Tensor


@dataclass(slots=True, eq=False)
class Save:
    """A save that waits or is carried out.

    Attributes:
        parts: what is saved.
        is_computed: waits until the pages have their content.
        is_void: nothing of it is read any more, and its end is not reported.
        is_ended: its end was reported.
    """

    parts: Sequence[Pages]
    is_computed: Callable[[], None]
    is_void: bool = False
    is_ended: bool = False


class Tiers:
    """Saves and loads the pages of an engine. Its methods are called by the engine's thread."""

    def __init__(self, pools: Sequence[PagePool], settings: Settings, content: bytes) -> None:
        """Allocate the slots. `content`: names what decides the bytes of a page, with its key.

        Raises:
            InvalidArgument: a tier has room for no page, or the folder or a file in it cannot be used.
            OutOfMemory: a tier does not fit.
            WorkerExists: another engine uses the files.
        PermissionDenied: other users can write to the folder.
        """
        self._pools = {one.name: one for one in pools}
        self._timeout_s = settings.load_timeout_s
        self._device = pools[0].device
        self._slots = _allocate(pools, settings, content)
        self._readers = ThreadPoolExecutor(NUM_READERS, "kvplane-reader") if settings.disk else None
        self._lock = threading.Condition()
        self._saves: deque[Save] = deque()
        self._working: Save | None = None
        self._ends: deque[bool] = deque()
        self._reads_pages = self._is_closed = self._is_off = False
        self._thread = threading.Thread(target=self._run, name="kvplane-saver", daemon=True)
        self._thread.start()

    @property
    def slots(self) -> Mapping[str, KeyedSlots]:
        """The slots of each pool."""
        return self._slots

    # -- look-up and loads -------------------------------------------------------------------------------------------

    def lengths(self, keys: Sequence[bytes], trailing: Mapping[str, int]) -> list[int]:
        """Return every number of pages, from the first key on, that can be restored. `trailing`: of each other pool,
        how many of the last pages a hit needs, or all if it is shorter.
        """
        if self._is_off:
            return []
        full = self._slots[KV].held(keys[: self._slots[KV].most_staged])
        most = full.index(False) if False in full else len(full)
        lengths = list(range(1, most + 1))
        for pool, count in trailing.items():
            runs, run = [0], 0
            for is_held in self._slots[pool].held(keys[:most]):
                run = run + 1 if is_held else 0
                runs.append(run)
            most_loaded = self._slots[pool].most_staged
            lengths = [one for one in lengths if runs[one] >= min(one, count) <= most_loaded]
        return lengths

    def stage(self, parts: Sequence[Pages]) -> list[list[int]] | None:
        """Make all pages of a load available in host memory, verified; returns their slots, pinned, for `load` or
        `unstage`. None if one is missing, damaged or late: then they are computed. Waits for the disk.
        """
        staged = list[list[int]]()
        for part in () if self._is_off else parts:
            slots = self._slots[part.pool].stage(part.keys, self._readers, self._timeout_s)
            if slots is None:
                self.unstage(parts, staged)
                return None
            staged.append(slots)
        return staged if len(staged) == len(parts) else None

    def load(self, parts: Sequence[Pages], staged: Sequence[Sequence[int]]) -> None:
        """Copy staged pages into those of the engine, and end their pins. When it returns, they are there."""
        try:
            for part, slots in zip(parts, staged, strict=True):
                pool = self._pools[part.pool]
                for run, rows in self._slots[part.pool].rows(part.keys, slots):
                    pool.scatter(part.indices[run.start * pool.rows : run.stop * pool.rows], rows)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        finally:
            self.unstage(parts, staged)

    def unstage(self, parts: Sequence[Pages], staged: Sequence[Sequence[int]]) -> None:
        """End the pins of staged pages."""
        for part, slots in zip(parts, staged, strict=False):
            self._slots[part.pool].unpin(slots)

    # -- saves -------------------------------------------------------------------------------------------------------

    def save(self, parts: Sequence[Pages], is_computed: Callable[[], None]) -> bool:
        """Save pages, which the caller keeps unchanged until the end is reported. False: they are not saved."""
        with self._lock:
            if self._is_off or len(self._saves) >= MOST_SAVES:
                return False
            self._saves.append(Save(parts, is_computed))
            self._lock.notify_all()
        return True

    @property
    def num_ended(self) -> int:
        """The saves whose end `ended` has not returned yet."""
        return len(self._ends)

    def ended(self) -> bool:
        """Return whether the oldest save that has ended is in host memory as a whole."""
        return self._ends.popleft()

    @property
    def is_busy(self) -> bool:
        """Whether a save waits or is carried out, the copy on the disk included."""
        with self._lock:  # the thread takes a save from the queue before it works on it
            return bool(self._saves or self._working)

    def quiesce(self) -> None:
        """Void all saves; no page is read any more when this returns."""
        with self._lock:
            for one in (*self._saves, *([self._working] if self._working else ())):
                one.is_void = True
            self._saves.clear()
            self._ends.clear()
            self._lock.wait_for(lambda: not self._reads_pages)

    def forget(self) -> None:
        """Forget all pages, those on the disk too, permanently: none of them is of the weights that follow."""
        if self._is_off:
            return
        self._is_off = True
        self.quiesce()
        for one in self._slots.values():
            one.remove_files()
        _log.warning("the weights change: kvplane's tiers are empty, and stay so until the engine is started again")

    def close(self) -> None:
        """Stop. What is on the disk stays there."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self.quiesce()
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            return  # the disk does not answer: its file is closed with the process
        for one in self._slots.values():
            one.close()

    def _run(self) -> None:
        if self._device.type == "cuda":
            use_device(str(self._device))
        with self._a_stream():
            while True:
                with self._lock:
                    self._working = None
                    self._lock.wait_for(lambda: self._is_closed or self._saves)
                    if self._is_closed:
                        return
                    save = self._working = self._saves.popleft()
                self._carry_out(save)

    def _a_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def _carry_out(self, save: Save) -> None:
        pieces = [piece for part in save.parts for piece in self._pieces(part)]
        try:
            save.is_computed()
            for at, piece in enumerate(pieces):
                lacking = self._slots[piece.pool].save(piece.keys, self._gather(save, piece))
                if lacking is None or at == len(pieces) - 1:
                    self._end(save, lacking is not None)
                if lacking is None:
                    return
                if lacking and not self._is_off:
                    self._slots[piece.pool].write(lacking)
        except Exception:  # the engine continues: it computes what is not saved
            _log.exception("a save failed")
            self._end(save, False)

    def _pieces(self, part: Pages) -> list[Pages]:
        """Return parts that take no more than half of the slots in host memory or on the disk."""
        slots, rows = self._slots[part.pool], self._pools[part.pool].rows
        step = max(1, min(one.spec.num_blocks for one in (slots.host, slots.disk) if one is not None) // 2)
        return [
            replace(part, keys=part.keys[at : at + step], indices=part.indices[at * rows : (at + step) * rows])
            for at in range(0, len(part.keys), step)
        ]

    def _gather(self, save: Save, part: Pages) -> Callable[[Sequence[int], Tensor], bool]:
        pool = self._pools[part.pool]

        def gather(positions: Sequence[int], rows: Tensor) -> bool:
            with self._lock:
                if save.is_void:
                    return False
                self._reads_pages = True
            try:
                pool.gather(part.indices.view(-1, pool.rows)[list(positions)].view(-1), rows)
            finally:
                with self._lock:
                    self._reads_pages = False
                    self._lock.notify_all()
            return True

        return gather

    def _end(self, save: Save, is_good: bool) -> None:
        with self._lock:
            if not save.is_void and not save.is_ended:
                self._ends.append(is_good)
                save.is_ended = True


def _allocate(pools: Sequence[PagePool], settings: Settings, content: bytes) -> dict[str, KeyedSlots]:
    """Return the slots of each pool. The bytes of a tier are divided as those of the pools are."""
    most = int(free_host_bytes() * MOST_OF_FREE)
    if settings.host_bytes > most:
        raise OutOfMemory(
            f"{settings.host_bytes} bytes are more than {MOST_OF_FREE:.0%} of the free memory of the host",
            field=f"{FIELD}.host",
            remedy=f"give at most {most} bytes",
        )
    if settings.disk is not None and is_in_memory(settings.disk):
        _log.warning("%s is in memory, not on a disk: it takes memory, and is lost with the machine", settings.disk)
    total, found = sum(one.total_bytes for one in pools), dict[str, KeyedSlots]()
    with ExitStack() as cleanup:
        for group, pool in enumerate(pools):
            share = pool.total_bytes / total
            spec = _spec(TierKind.HOST, pool, "host", settings.host_bytes, share)
            host, disk, keys = HostSlots(spec, pool.page_bytes, str(pool.device)), None, None
            cleanup.callback(host.close)
            if settings.disk is not None:
                spec = _spec(TierKind.DISK, pool, "disk_size", settings.disk_bytes, share)
                disk, is_kept = _open(spec, pool, settings.disk, content)
                cleanup.callback(disk.close)
                keys = KeyFile(disk.path.with_suffix(KEYS), spec.num_blocks, not is_kept)
                cleanup.callback(keys.close)
            found[pool.name] = KeyedSlots(group, pool.page_bytes, host, disk, keys)
        cleanup.pop_all()
    return found


def _spec(kind: TierKind, pool: PagePool, option: str, num_bytes: int, share: float) -> TierSpec:
    slot_bytes = kind.slot_bytes(pool.page_bytes)
    num_slots = int(num_bytes * share) // slot_bytes
    if not num_slots:
        problem = f"{num_bytes} bytes have room for no page of {slot_bytes} bytes of the pool {pool.name}"
        raise wrong(option, problem, f"give at least {int(slot_bytes / share) + 1} bytes")
    return TierSpec(kind, num_slots)


def _open(spec: TierSpec, pool: PagePool, folder: Path, content: bytes) -> tuple[DiskSlots, bool]:
    """Return the file of a pool, and whether it keeps what it has, of an equal engine."""
    try:
        disk = DiskSlots(spec, pool.page_bytes, folder, f"sglang-{pool.name}{ENDING}", content)
        return disk, disk.keep()
    except KvplaneError as error:
        option = "disk_size" if isinstance(error, OutOfMemory) else "disk"
        remedies = {"OutOfMemory": "give less", "WorkerExists": "give each engine a folder of its own"}
        remedy = remedies.get(type(error).__name__, error.remedy)
        raise type(error)(error.message, field=f"{FIELD}.{option}", remedy=remedy) from None
