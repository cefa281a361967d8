"""Seal what a store holds with a key that the store does not have, so that a process that can write to the store cannot
forge records. A service without such a key trusts its store.

    byte 0      4         6      8             40
         | magic | version | kind | HMAC-SHA256 | record ...

The HMAC covers the header, the *place* of the record and the record. The place of a chunk is the name of its log
(replica, namespace, incarnation) and its number, that of a registration the name of the replica, that of a lease the
address of the service; there is one table of owners. So a record proves nothing at another place. A store can still
return an older record of the same place.
"""

from __future__ import annotations

import hmac
import logging
import stat
import struct
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_service.runtime.executors import Offload
from kvplane_service.store.interface import ALIVE, IndexStore, LogName, OwnerStore, SharedStore, Stored, StoredChunk
from kvplane_service.store.record import CHUNK, LEASE, NOT_PROVEN, OWNERS, REGISTRATION, SEAL_MAGIC

_VERSION = 1
_HEAD = struct.Struct("<4sHH")
_MAC_BYTES = 32
_MIN_KEY_BYTES, _MAX_KEY_BYTES, _MAX_KEYS = 32, 1024, 16
_CLOSED_TO = stat.S_IWGRP | stat.S_IRWXO  # a group may read: Kubernetes gives the files of a Secret to the pod's group
_FIELD = "store_key_file"

_log = logging.getLogger(__name__)


class Seals:
    """Seals records with the first of several keys, and proves records that were sealed with any of them."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)

    def seal(self, kind: int, place: str, raw: bytes) -> bytes:
        """Return the record with the seal of its kind and place."""
        head = _HEAD.pack(SEAL_MAGIC, _VERSION, kind)
        return head + _mac(self._keys[0], head, place, raw) + raw

    def prove(self, kind: int, place: str, sealed: bytes) -> bytes:
        """Return the record without its seal; NOT_PROVEN if no key proves that it was stored as this kind, at this
        place.
        """
        head, found = _HEAD.pack(SEAL_MAGIC, _VERSION, kind), sealed[_HEAD.size : _HEAD.size + _MAC_BYTES]
        raw = sealed[_HEAD.size + _MAC_BYTES :]
        macs = (_mac(key, head, place, raw) for key in self._keys)
        is_proven = sealed[: _HEAD.size] == head and any(hmac.compare_digest(mac, found) for mac in macs)
        return raw if is_proven else NOT_PROVEN


class SealedStore:
    """Implements IndexStore: seals what it gives to another store, and returns what was sealed by a key of the service.
    Instead of anything else it returns NOT_PROVEN, which is refused before it is parsed.
    """

    def __init__(self, store: IndexStore, seals: Seals, offload: Offload) -> None:
        """`offload` seals and proves chunks on a thread; nothing else is long."""
        self._store = store
        self._seals = seals
        self._offload = offload
        self.open, self.close, self.keep_alive = store.open, store.close, store.keep_alive
        self.drop, self.drop_record, self.size_bytes = store.drop, store.drop_record, store.size_bytes

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Seal a chunk and append it (see IndexStore.append)."""
        sealed = await self._offload(partial(self._seals.seal, CHUNK, _place(log, chunk.seq), chunk.raw))
        return await self._store.append(log, StoredChunk(chunk.seq, sealed), trim_below)

    async def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """Yield the chunks of a log, NOT_PROVEN instead of forged ones (see IndexStore.load)."""
        async for page in self._store.load(log):
            yield await self._offload(partial(self._prove_all, log, page))

    def _prove_all(self, log: LogName, page: list[StoredChunk]) -> list[StoredChunk]:
        return [StoredChunk(seq, self._seals.prove(CHUNK, _place(log, seq), sealed)) for seq, sealed in page]

    async def put_record(self, replica: str, record: bytes) -> None:
        """Seal the record of a replica, and replace it (see IndexStore.put_record)."""
        await self._store.put_record(replica, self._seals.seal(REGISTRATION, replica, record))

    async def get_record(self, replica: str) -> bytes | None:
        """Return the record of a replica, NOT_PROVEN if it is forged (see IndexStore.get_record)."""
        sealed = await self._store.get_record(replica)
        return None if sealed is None else self._seals.prove(REGISTRATION, replica, sealed)

    async def records(self) -> list[tuple[str, bytes]]:
        """Return all pairs of name and record, NOT_PROVEN instead of forged ones (see IndexStore.records)."""
        stored = await self._store.records()
        unsealed = [name for name, sealed in stored if not sealed.startswith(SEAL_MAGIC)]
        if unsealed:
            _log.warning(
                "%d of %d records in the store have no seal, as of a service without %s: their replicas begin without "
                "stored keys (%s, ...)",
                *(len(unsealed), len(stored), _FIELD, unsealed[0]),
            )
        return [(name, self._seals.prove(REGISTRATION, name, sealed)) for name, sealed in stored]


class SealedSharedStore(SealedStore):
    """Implements SharedStore as SealedStore implements IndexStore."""

    def __init__(self, store: SharedStore, seals: Seals, offload: Offload) -> None:
        super().__init__(store, seals, offload)
        self._shared = store

    async def announce(self, service: str, lease_ms: int, lease: bytes = ALIVE) -> None:
        """Record with a seal that a service is alive (see SharedStore.announce)."""
        await self._shared.announce(service, lease_ms, self._seals.seal(LEASE, service, lease))

    async def lease(self, service: str) -> bytes | None:
        """Return what the service announced; None if its lease has ended or is forged (see SharedStore.lease)."""
        sealed = await self._shared.lease(service)
        lease = NOT_PROVEN if sealed is None else self._seals.prove(LEASE, service, sealed)
        return None if lease == NOT_PROVEN else lease


class SealedOwnerStore(SealedSharedStore):
    """Implements OwnerStore too: a forged table of owners is read as a damaged one."""

    def __init__(self, store: SharedStore, owners: OwnerStore, seals: Seals, offload: Offload) -> None:
        super().__init__(store, seals, offload)
        self._owners = owners

    async def read_owners(self) -> Stored:
        """Return the table, NOT_PROVEN instead of a forged one (see OwnerTable.read)."""
        raw, version = await self._owners.read_owners()
        return Stored(raw if version is None else self._seals.prove(OWNERS, "", raw), version)

    async def replace_owners(self, version: str | None, raw: bytes) -> bool:
        """Seal the table, and replace it (see OwnerTable.replace)."""
        return await self._owners.replace_owners(version, self._seals.seal(OWNERS, "", raw))


def guarded(store: IndexStore, key_file: str, offload: Offload) -> IndexStore:
    """Return the store, sealed with the keys of the file; the store itself if the file's name is empty."""
    if not key_file:
        return store
    seals = Seals(read_keys(Path(key_file)))
    if isinstance(store, SharedStore):
        if isinstance(store, OwnerStore):
            return SealedOwnerStore(store, store, seals, offload)
        return SealedSharedStore(store, seals, offload)
    return SealedStore(store, seals, offload)


def read_keys(path: Path) -> list[bytes]:
    """Return the keys in a file, one per line.

    Raises:
        NotFound: the file cannot be read.
        InvalidArgument: users other than the service's may read or change it, or a key is too short or too long.
    """
    try:
        if path.stat().st_mode & _CLOSED_TO:
            what = f"{path} can be read or written by other users"
            raise InvalidArgument(what, field=_FIELD, remedy=f"run chmod 600 {path}")
        with path.open("rb") as file:
            content = file.read((_MAX_KEY_BYTES + 2) * _MAX_KEYS)
    except OSError as error:
        what, remedy = f"{path} cannot be read: {error.strerror}", "name a file that the service's user can read"
        raise NotFound(what, field=_FIELD, remedy=remedy) from None
    keys = [line.strip() for line in content.splitlines() if line.strip()]
    are_fit = all(_MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES for key in keys)
    if not (are_fit and 1 <= len(keys) < _MAX_KEYS):
        raise InvalidArgument(
            f"{path} has not 1 to {_MAX_KEYS - 1} keys of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, one per line",
            field=_FIELD,
            remedy=f"write a key with: openssl rand -hex 32 > {path}",
        )
    return keys


def _place(log: LogName, seq: int) -> str:
    return f"{log} {seq}"


def _mac(key: bytes, head: bytes, place: str, raw: bytes) -> bytes:
    where = place.encode()
    state = hmac.new(key, head + struct.pack("<I", len(where)) + where, "sha256")
    state.update(raw)  # a long one without the interpreter's lock
    return state.digest()
