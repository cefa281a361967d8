"""What the disk tier holds over restarts of the engine: the keys of its slots, in a file next to its own.

The versions of the slots are in the stamp table of the rank, in shared memory, or in the index next to its file
(`kvplane_worker.tiers.kept`). A key counts only if its slot still has the version with which it was recorded. What
the system had not written when the machine stops is lost in part, so a file counts only until it is started again.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.key_records import KeyRecord, KeyRecords, records_bytes
from kvplane_core.face.entries import Entries
from kvplane_vllm.records import entries_of
from kvplane_vllm.tiers.layout import Views, parts_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")  # code too: it may come with a model
_log = logging.getLogger("vllm.kvplane")


class KeyFile:
    """The keys of the slots of one engine's disk tier.

    A thread writes them, behind the scheduler, which never waits for this disk. A key that is written late or not at
    all costs a hit: a record counts only with the version that its slot has.
    """

    def __init__(self, folder: Path, name: str, num_ids: int, digest_bytes: int, disks: Sequence[int]) -> None:
        """Open the file of this name, an empty one if there is none of this size since the machine was started.

        `num_ids`: blocks and slots. `disks`: what names the content of the tier's file of each rank (`Ready.disk`): a
        file that begins empty counts versions from the start again, so no key of what it held before may be left.
        Raises InvalidArgument if it cannot be used.
        """
        held = BOOT_ID.read_bytes() + repr(list(disks)).encode()
        self.path = folder / f"{name}-{num_ids}-{blake2b(held, digest_size=8).hexdigest()}.keys"
        try:
            for old in folder.glob(f"{name}-*.keys"):
                if old != self.path:
                    old.unlink(missing_ok=True)
            self._file, found = self._opened(records_bytes(num_ids))
            try:
                records = KeyRecords(found)
            except InvalidArgument:
                records = KeyRecords.create(bytearray(len(found)), num_ids, digest_bytes)
                self._write(0, records.header())
        except OSError as error:
            raise InvalidArgument(
                f"{self.path} cannot be used: {error.strerror}",
                field="disk",
                remedy="give a folder on which this user can write",
            ) from None
        self._entries: Entries | None = entries_of(records)
        self._age = max(self._entries.age, default=0) + 1
        self._lock = threading.Condition()
        self._waiting: dict[int, KeyRecord] = {}  # by slot
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvplane-keys", daemon=True)
        self._thread.start()

    def _opened(self, size: int) -> tuple[int, bytearray]:
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise PermissionError(0, "it is of another user")
            if info.st_size != size:
                os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)
            found = bytearray(size)
            if os.preadv(descriptor, [found], 0) != size:
                raise OSError(0, "it cannot be read")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, found

    def entries(self) -> Entries:
        """Return all keys that were recorded before; once."""
        found, self._entries = self._entries, None
        assert found is not None, "they were read"
        return found

    def record(self, entries: Entries) -> None:
        """Record the keys of slots that were written."""
        groups = chain.from_iterable(repeat(run.group, run.count) for run in entries.runs)
        size = entries.digest_size
        with self._lock:
            for at, (slot, number, group) in enumerate(zip(entries.block, entries.stamp, groups, strict=True)):
                digest = bytes(entries.digests[at * size : (at + 1) * size])
                self._waiting[slot] = KeyRecord(slot, number, digest, group, 0, self._age)
            self._lock.notify()
        self._age += 1

    def clear(self) -> bool:
        """Forget all keys, and record none any more; returns False if the disk cannot."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("%s cannot be removed: %s", self.path, error.strerror)
            return False
        self.close(0.0)
        return True

    def close(self, within_s: float) -> None:
        """Stop, and wait as long for what is not written yet."""
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            while found := self._next():
                for one in found.values():
                    for offset, part in one.writes():
                        self._write(offset, part)
        except OSError as error:
            _log.error("the disk keeps nothing more for the next start: %s: %s", self.path, error.strerror)
        finally:
            os.close(self._file)

    def _next(self) -> dict[int, KeyRecord]:
        """Wait for records that are not written; none: it is closed, and there is none left."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._is_closed)
            found, self._waiting = self._waiting, {}
        return found

    def _write(self, offset: int, part: bytes) -> None:
        os.pwrite(self._file, part, offset)


def content_of(config: VllmConfig, cache: KVCacheConfig, views: Views) -> bytes:
    """Return 16 bytes that name everything that gives the bytes of pages their meaning: weights, layout, hashes.

    Raises FailedPrecondition if the weights cannot be named without reading them.
    """
    model, parallel, text = config.model_config, config.parallel_config, cache.kv_cache_layout
    pages = [(name, one) for name, view in views.items() for one in parts_of(view)]
    # Of a page, not of the pool: engines with other numbers of blocks have the same rows.
    layout = [
        (name, one.shape[0] // cache.num_blocks, one.shape[1:], one.stride()[1:], one.dtype, one.device.type)
        for name, one in pages
    ]
    parts = [
        version("vllm"),
        [(repr(group.kv_cache_spec), group.layer_names) for group in cache.kv_cache_groups],
        [text, layout],
        [parallel.world_size],
        [str(model.dtype), str(config.cache_config.cache_dtype), str(model.quantization), model.model],
        [sorted(model.hf_config.to_dict().items(), key=str), repr(getattr(model, "multimodal_config", None))],
        [config.cache_config.prefix_caching_hash_algo, os.getenv("PYTHONHASHSEED"), cache.hash_block_size],
        list(_weights(config)),
    ]
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _weights(config: VllmConfig) -> Iterable[tuple[str | int, ...]]:
    model, folder = config.model_config, Path(config.model_config.model)
    if config.load_config.load_format in ("dummy", "tensorizer", "sharded_state"):
        raise _unnamed(f"load_format {config.load_config.load_format} reads no file that names them", "load_format")
    if getattr(model, "model_weights", ""):
        raise _unnamed("the weights come from an object store", "model_weights")
    if folder.is_dir():
        files = sorted((one.name, one.stat()) for one in folder.iterdir() if one.suffix in WEIGHTS)
        return [(name, found.st_size, found.st_mtime_ns, found.st_ctime_ns) for name, found in files]
    revision = model.revision or ""
    if len(revision) != 40 or not set(revision) <= set("0123456789abcdef"):
        raise _unnamed("the revision of the model is not pinned", "revision")
    return [(revision,)]


def _unnamed(problem: str, field: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"what pages hold cannot be named, so no disk is kept over a restart and no peer is read: {problem}",
        field=field,
        remedy="give --model a local folder, or --revision the 40 digits of a commit",
    )
