"""What the disk tier holds over restarts of the engine: the keys of its slots, in a file that is mapped.

The versions of the slots are in the stamp table of the rank, in shared memory, or in the index next to its file
(`kvplane_worker.tiers.kept`). A key counts only if its slot still has the version with which it was recorded. What
was mapped when the machine stops may be written in part, so a file counts only until the machine is started again.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.key_records import KeyRecord, KeyRecords, records_bytes
from kvplane_core.face.entries import Entries
from kvplane_vllm.records import entries_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
_log = logging.getLogger("vllm.kvplane")


class KeyFile:
    """The keys of the slots of one engine's disk tier."""

    def __init__(self, folder: Path, name: str, num_ids: int, digest_bytes: int) -> None:
        """Map the file of this name, an empty one if there is none of this size since the machine was started.

        `num_ids`: blocks and slots. Raises InvalidArgument if it cannot be used.
        """
        boot = blake2b(BOOT_ID.read_bytes(), digest_size=4).hexdigest()
        self.path = folder / f"{name}-{num_ids}-{boot}.keys"
        size = records_bytes(num_ids)
        try:
            for old in folder.glob(f"{name}-*.keys"):
                if old != self.path:
                    old.unlink(missing_ok=True)
            descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                info = os.fstat(descriptor)
                if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                    raise PermissionError(0, "it is of another user")
                if info.st_size != size:
                    os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)
                memory = memoryview(mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InvalidArgument(
                f"{self.path} cannot be used: {error.strerror}",
                field="disk",
                remedy="give a folder on which this user can write",
            ) from None
        try:
            self.records = KeyRecords(memory)
        except InvalidArgument:
            self.records = KeyRecords.create(memory, num_ids, digest_bytes)
        self._age = 1

    def entries(self) -> Entries:
        """Return all keys that were recorded."""
        found = entries_of(self.records)
        self._age = max(found.age, default=0) + 1
        return found

    def record(self, entries: Entries) -> None:
        """Record the keys of slots that were written."""
        groups = chain.from_iterable(repeat(run.group, run.count) for run in entries.runs)
        size = entries.digest_size
        for at, (slot, number, group) in enumerate(zip(entries.block, entries.stamp, groups, strict=True)):
            digest = bytes(entries.digests[at * size : (at + 1) * size])
            self.records.write(KeyRecord(slot, number, digest, group, 0, self._age))
        self._age += 1

    def clear(self) -> None:
        """Forget all keys, durably as far as this machine runs."""
        rows = self.records.records()
        rows[:] = bytes(len(rows))


def content_of(config: VllmConfig, cache: KVCacheConfig, views: Mapping[str, Tensor]) -> bytes:
    """Return 16 bytes that name everything that gives the bytes of pages their meaning: weights, layout, hashes.

    Raises FailedPrecondition if the weights cannot be named without reading them.
    """
    model, parallel, text = config.model_config, config.parallel_config, cache.kv_cache_layout
    layout = [(name, view.shape, view.stride(), view.dtype, view.device.type) for name, view in views.items()]
    parts = [
        version("vllm"),
        list(map(repr, cache.kv_cache_tensors)),
        [(repr(group.kv_cache_spec), group.layer_names) for group in cache.kv_cache_groups],
        [text, layout],
        [parallel.world_size, parallel.data_parallel_index],
        [str(model.dtype), str(config.cache_config.cache_dtype), str(model.quantization), model.model],
        sorted(model.hf_config.to_dict().items(), key=str),
        [config.cache_config.prefix_caching_hash_algo, os.getenv("PYTHONHASHSEED"), cache.hash_block_size],
        list(_weights(config)),
    ]
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _weights(config: VllmConfig) -> Iterable[tuple[str, int, int]]:
    model, folder = config.model_config, Path(config.model_config.model)
    if config.load_config.load_format in ("dummy", "tensorizer", "sharded_state"):
        raise _unnamed(f"load_format {config.load_config.load_format} reads no file that names them", "load_format")
    if folder.is_dir():
        files = sorted(one for one in folder.iterdir() if one.suffix in WEIGHTS)
        return [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    revision = model.revision or ""
    if len(revision) != 40 or not set(revision) <= set("0123456789abcdef"):
        raise _unnamed("the revision of the model is not pinned", "revision")
    return [(revision, 0, 0)]


def _unnamed(problem: str, field: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the disk keeps nothing over a restart: {problem}",
        field=field,
        remedy="give --model a local folder, or --revision the 40 digits of a commit",
    )
