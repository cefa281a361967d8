"""A store in Redis or Valkey. A log is a Redis stream whose entries are chunks.

    PREFIX:format                                       version of the format
    PREFIX:replicas                                     names by the expiry time of their records (sorted set)
    PREFIX:service:ADDRESS                              lease of a live service
    PREFIX:owners                                       the table of owners, if the services use it, behind its version
    PREFIX:{replica}:record                             a replica's record
    PREFIX:{replica}:NAMESPACE:INCARNATION:log          its log on one incarnation of its page memory

The braces place the data of a replica on one node of a cluster. All keys except the format expire unless a service
renews them within the time to live. The key space of the server is never scanned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from kvplane_service.config import Config
from kvplane_service.store.errors import (
    LogSuperseded,
    StoreDamaged,
    StoreDenied,
    StoreForeign,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    StoreUnavailable,
)
from kvplane_service.store.interface import ALIVE, MAX_SEQ, LogName, Stored, StoredChunk

FORMAT_VERSION = 1
_PAGE = 64  # chunks, or names, of one answer
_MAX_DIGITS = 9  # of a format version
_CHUNK = b"c"  # name of the only field of a stream's entries
_MAX_CONNECTIONS = 4
_VERSION_BYTES = 16
# Replaces a table if it has the version ARGV[1], "" for none. Of two equal calls the second one changes nothing.
_REPLACE_OWNERS = f"""
local version = string.sub(redis.call('GET', KEYS[1]) or '', 1, {_VERSION_BYTES})
if version == string.sub(ARGV[2], 1, {_VERSION_BYTES}) then return 1 end
if version ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""

_log = logging.getLogger(__name__)

Client: TypeAlias = "Redis | RedisCluster"


class RedisStore:
    """Implements SharedStore with one server, a cluster, or a primary that Sentinels monitor. All calls must be on one
    event loop.

    Up to _MAX_CONNECTIONS calls run concurrently. Leases and records expire by the server's clock.
    """

    def __init__(self, connect: Callable[[], Client], config: Config, read_only: bool = False) -> None:
        """`connect` creates a client of the Redis driver, and is called again when the connection was lost, because the
        nodes of a cluster may have changed.
        """
        self._read_only = read_only
        self._connect = connect
        self._prefix = config.store_prefix
        self._ttl_ms = config.store_ttl_ms
        self._timeout_s = config.store_timeout_ms / 1000
        self._client: Client | None = None
        self._turns = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def open(self) -> None:
        """Connect and check the format version (see IndexStore.open).

        Raises:
            StoreDenied, StoreForeign, StoreNewer, StoreUnavailable: the store cannot be used; nothing was written.
        """
        async with self._named_errors() as client:
            await self._check_format(client)

    async def _check_format(self, client: Client) -> None:
        key = f"{self._prefix}:format"
        try:
            found = cast(bytes | None, await client.get(key))
        except ResponseError as error:
            if not (_is_wrong_type(error) and await self._has_replicas(client)):
                raise
            found = b"a value of another type"
        if found is None:
            if not self._read_only:
                await client.set(key, FORMAT_VERSION, nx=True)
            return
        is_number = found.isdigit() and len(found) < _MAX_DIGITS
        if not is_number and await self._has_replicas(client):
            _log.warning("the Redis key %s is damaged: it contains %r, and is written again", key, found[:32])
            if not self._read_only:
                await client.set(key, FORMAT_VERSION)
            return
        if not is_number:
            raise StoreForeign(
                f"the Redis key {key} contains {found[:32]!r}, not a format version of kvplane",
                field="store_prefix",
                remedy="choose another prefix; nothing was changed",
            )
        if int(found) > FORMAT_VERSION:
            raise StoreNewer(
                f"the store has format version {int(found)}, this service supports versions up to {FORMAT_VERSION}",
                field="store",
                remedy="run a newer kvplane, or choose another store_prefix; nothing was changed",
            )

    async def _has_replicas(self, client: Client) -> bool:
        """Return True if the prefix has the records of kvplane, so that no other program uses it."""
        try:
            return bool(await client.zrange(f"{self._prefix}:replicas", 0, 0))
        except ResponseError as error:
            if not _is_wrong_type(error):
                raise
            return False

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk to a log, and drop old chunks (see IndexStore.append)."""
        key = self._log_key(log)
        async with self._named_errors(key) as client:
            try:
                await client.xadd(key, {_CHUNK: chunk.raw}, id=f"{chunk.seq}-0")
            except ResponseError as error:
                # XADD refuses a number that is not above the newest: the log has this chunk already, or a newer one.
                if "exhausted" in str(error):
                    raise LogSuperseded(MAX_SEQ) from None
                if "equal or smaller" not in str(error):
                    raise
                found = await client.xrange(key, min=f"{chunk.seq}-0", count=2)
                last = int(found[-1][0].partition(b"-")[0]) if found else MAX_SEQ  # empty, with a high last number
                if last > chunk.seq:
                    raise LogSuperseded(last) from None
            pipeline = client.pipeline(transaction=not isinstance(client, RedisCluster))
            pipeline.xtrim(key, minid=f"{trim_below}-0", approximate=False)
            pipeline.pexpire(key, self._ttl_ms)
            pipeline.xlen(key)
            _, _, length = await pipeline.execute()
            return int(length)

    async def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """Yield the chunks of a log, ordered by number (see IndexStore.load)."""
        key, start = self._log_key(log), "-"
        while True:
            async with self._named_errors(key) as client:
                entries: list[tuple[bytes, dict[bytes, bytes]]] = await client.xrange(key, min=start, count=_PAGE)
            yield [StoredChunk(int(number.partition(b"-")[0]), one.get(_CHUNK, b"")) for number, one in entries]
            if len(entries) < _PAGE:
                return
            start = f"({entries[-1][0].decode()}"

    async def drop(self, log: LogName) -> None:
        """Delete a log (see IndexStore.drop)."""
        async with self._named_errors() as client:
            await client.delete(self._log_key(log))

    async def size_bytes(self, log: LogName) -> int:
        """Return the size of a log in bytes (see IndexStore.size_bytes)."""
        async with self._named_errors() as client:
            return int(await client.memory_usage(self._log_key(log), samples=0) or 0)

    async def put_record(self, replica: str, record: bytes) -> None:
        """Replace the record of a replica (see IndexStore.put_record). The record is written before its name is listed;
        readers skip a listed name without a record.
        """
        async with self._named_errors(f"{self._prefix}:replicas") as client:
            await client.set(self._record_key(replica), record, px=self._ttl_ms)
            seconds, microseconds = await self._time(client)
            ends_ms = seconds * 1000 + microseconds // 1000 + self._ttl_ms
            names = f"{self._prefix}:replicas"
            await client.zadd(names, {replica: ends_ms})
            await client.zremrangebyscore(names, "-inf", ends_ms - self._ttl_ms)
            await client.pexpire(names, self._ttl_ms)

    async def get_record(self, replica: str) -> bytes | None:
        """Return the record of a replica, or None (see IndexStore.get_record)."""
        async with self._named_errors(self._record_key(replica)) as client:
            found: bytes | None = await client.get(self._record_key(replica))
            return found

    async def records(self) -> list[tuple[str, bytes]]:
        """Return all pairs of name and record (see IndexStore.records)."""
        async with self._named_errors(f"{self._prefix}:replicas") as client:
            names = [name.decode(errors="replace") for name in await client.zrange(f"{self._prefix}:replicas", 0, -1)]
        found = []
        for name in sorted(names):
            try:
                record = await self.get_record(name)
            except StoreDamaged as error:
                _log.warning("the record of %s is lost: %s", name, error)
            else:
                found += [(name, record)] if record is not None else []
        return found

    async def drop_record(self, replica: str) -> None:
        """Delete the record of a replica (see IndexStore.drop_record)."""
        async with self._named_errors(f"{self._prefix}:replicas") as client:
            await client.delete(self._record_key(replica))
            await client.zrem(f"{self._prefix}:replicas", replica)

    async def keep_alive(self, log: LogName) -> None:
        """Extend the lifetime of a log (see IndexStore.keep_alive)."""
        async with self._named_errors() as client:
            await client.pexpire(self._log_key(log), self._ttl_ms)

    async def announce(self, service: str, lease_ms: int, lease: bytes = ALIVE) -> None:
        """Record that a service is alive (see SharedStore.announce)."""
        async with self._named_errors() as client:
            await client.set(self._service_key(service), lease, px=lease_ms)

    async def lease(self, service: str) -> bytes | None:
        """Return the lease of a service (see SharedStore.lease)."""
        async with self._named_errors(self._service_key(service)) as client:
            found: bytes | None = await client.get(self._service_key(service))
            return found

    async def read_owners(self) -> Stored:
        """Return the table of owners (see OwnerTable.read). A primary may have lost it, or what was written last."""
        async with self._named_errors(f"{self._prefix}:owners") as client:
            found: bytes | None = await client.get(f"{self._prefix}:owners")
        if found is None:
            return Stored(b"", None)
        return Stored(found[_VERSION_BYTES:], found[:_VERSION_BYTES].hex())

    async def replace_owners(self, version: str | None, raw: bytes) -> bool:
        """Replace the table of owners (see OwnerTable.replace)."""
        before, now = bytes.fromhex(version or ""), secrets.token_bytes(_VERSION_BYTES)
        async with self._named_errors(f"{self._prefix}:owners") as client:
            return bool(
                await client.eval(_REPLACE_OWNERS, 1, f"{self._prefix}:owners", before, now + raw, self._ttl_ms)
            )

    async def close(self) -> None:
        """Close connections and files (see IndexStore.close)."""
        client, self._client = self._client, None
        if client is not None:
            # Closing waits for an answer of the server; without one the connection is closed anyway.
            with contextlib.suppress(RedisError, OSError):
                async with asyncio.timeout(self._timeout_s):
                    await client.aclose()

    async def _time(self, client: Client) -> tuple[int, int]:
        """Return the time of the server node that holds the list of replica names, in seconds and microseconds."""
        if isinstance(client, RedisCluster):
            answer = await client.time(target_nodes=client.get_node_from_key(f"{self._prefix}:replicas"))
        else:
            answer = await client.time()
        seconds, microseconds = answer
        return seconds, microseconds

    def _log_key(self, log: LogName) -> str:
        return f"{self._prefix}:{{{log.replica}}}:{log.namespace.hex()}:{log.incarnation:016x}:log"

    def _service_key(self, service: str) -> str:
        return f"{self._prefix}:service:{service}"

    def _record_key(self, replica: str) -> str:
        return f"{self._prefix}:{{{replica}}}:record"

    @asynccontextmanager
    async def _named_errors(self, key: str = "") -> AsyncIterator[Any]:
        """Yield the client as soon as a connection is free. Translate the driver's errors into errors of
        `store.errors`, and close the client if the server is unavailable. If `key` is of another type, delete it.
        """
        client = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
            try:
                client = self._client = self._client or self._connect()
                yield client
            finally:
                self._turns.release()
        except (RedisError, RedisClusterException, OSError) as error:
            named = _named(error)
            if isinstance(named, StoreForeign) and key and not self._read_only:
                async with self._named_errors() as client:
                    await client.delete(key)
                raise StoreDamaged(f"{key} was of another type, and is deleted", field="store") from error
            if isinstance(named, StoreUnavailable) and client is not None and client is self._client:
                await self.close()
            raise named from error


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


def _named(error: Exception) -> Exception:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OutOfMemoryError) or str(error).startswith(("OOM", "MISCONF")):
        remedy = "give the server more memory or disk, or shorten store_ttl_ms; allocation continues meanwhile"
        return StoreFull(text, field="store", remedy=remedy)
    if isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError)) or "NOAUTH" in str(error):
        remedy = "check store_username and store_password, and the server's ACL"
        return StoreDenied(text, field="store_password", remedy=remedy)
    if isinstance(error, ReadOnlyError):
        return StoreReadOnly(text, field="store", remedy="name the primary server, or its Sentinels")
    if _is_wrong_type(error):
        return StoreForeign(text, field="store_prefix", remedy="choose another prefix; nothing was changed")
    return StoreUnavailable(text, field="store", remedy="check the server; allocation continues meanwhile")
