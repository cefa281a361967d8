"""A store in Redis or Valkey: a log is a stream whose entries are chunks.

    PREFIX:format                                       the version of what is written here
    PREFIX:replicas                                     names by the time at which their records end (sorted set)
    PREFIX:service:ADDRESS                              a service lives
    PREFIX:{replica}:record                             a replica's record
    PREFIX:{replica}:NAMESPACE:INCARNATION:log          its log on one life of its page memory

The braces keep what belongs to a replica on one node of a cluster. Everything but the format ends by itself when no
service has renewed it for the time to live. Nothing is ever searched for among the keys of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import redis
from redis.cluster import RedisCluster
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

from kvplane_service.store.errors import (
    StoreDenied,
    StoreForeign,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    StoreUnavailable,
)
from kvplane_service.store.interface import LogName, StoredChunk

FORMAT_VERSION = 1
_PAGE = 64  # chunks, or names, of one answer
_CHUNK = b"c"  # the one field of a stream's entries

Client: TypeAlias = redis.Redis | RedisCluster


class RedisStore:
    """Implements SharedStore over a connected client of one server, of a cluster, or behind Sentinels.

    The server's clock decides what has ended.
    """

    def __init__(self, connect: Callable[[], Client], prefix: str, ttl_ms: int) -> None:
        """`connect` makes a client. It is asked again when the last one was lost: a cluster may have moved.

        Raises:
            StoreDenied, StoreForeign, StoreNewer, StoreUnavailable: and nothing was written.
        """
        self._connect = connect
        self._prefix = prefix
        self._ttl_ms = ttl_ms
        self._client: Client | None = None
        self._lock = threading.RLock()
        with self._named_errors() as client:
            self._check_format(client)

    def _check_format(self, client: Client) -> None:
        key = f"{self._prefix}:format"
        found = cast(bytes | None, client.get(key))
        if found is None:
            client.set(key, FORMAT_VERSION, nx=True)
            return
        if not found.isdigit():
            raise StoreForeign(
                f"{key} holds {found[:32]!r}", field="store_prefix", remedy="choose another; nothing was touched"
            )
        if int(found) > FORMAT_VERSION:
            raise StoreNewer(
                f"{key} says version {int(found)}, this service knows {FORMAT_VERSION}",
                field="store",
                remedy="run a newer kvplane, or choose another store_prefix; nothing was touched",
            )

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """See IndexStore."""
        key = self._log_key(log)
        with self._named_errors() as client:
            # XADD refuses a number that is not above the last: then this chunk has been added before.
            pipeline = client.pipeline(transaction=True)
            pipeline.xadd(key, {_CHUNK: chunk.raw}, id=f"{chunk.seq}-0")
            pipeline.xtrim(key, minid=f"{trim_below}-0", approximate=False)
            pipeline.pexpire(key, self._ttl_ms)
            pipeline.xlen(key)
            added, trimmed, kept, length = pipeline.execute(raise_on_error=False)
            for answer in (trimmed, kept, length):
                if isinstance(answer, Exception):
                    raise answer
            if isinstance(added, Exception) and "equal or smaller" not in str(added):
                raise added
            return int(length)

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """See IndexStore."""
        key, start = self._log_key(log), "-"
        while True:
            with self._named_errors() as client:
                entries: list[tuple[bytes, dict[bytes, bytes]]] = client.xrange(key, min=start, count=_PAGE)
            for number, fields in entries:
                yield StoredChunk(int(number.partition(b"-")[0]), fields.get(_CHUNK, b""))
            if len(entries) < _PAGE:
                return
            start = f"({entries[-1][0].decode()}"

    def drop(self, log: LogName) -> None:
        """See IndexStore."""
        with self._named_errors() as client:
            client.delete(self._log_key(log))

    def size_bytes(self, log: LogName) -> int:
        """See IndexStore."""
        with self._named_errors() as client:
            return int(client.memory_usage(self._log_key(log), samples=0) or 0)

    def put_record(self, replica: str, record: bytes) -> None:
        """See IndexStore. The record before its name: a name without a record is passed over."""
        with self._named_errors() as client:
            client.set(self._record_key(replica), record, px=self._ttl_ms)
            seconds, microseconds = self._time(client)
            ends_ms = seconds * 1000 + microseconds // 1000 + self._ttl_ms
            names = f"{self._prefix}:replicas"
            client.zadd(names, {replica: ends_ms})
            client.zremrangebyscore(names, "-inf", ends_ms - self._ttl_ms)
            client.pexpire(names, self._ttl_ms)

    def get_record(self, replica: str) -> bytes | None:
        """See IndexStore."""
        with self._named_errors() as client:
            found: bytes | None = client.get(self._record_key(replica))
            return found

    def records(self) -> Iterator[tuple[str, bytes]]:
        """See IndexStore."""
        with self._named_errors() as client:
            names = [name.decode() for name in client.zrange(f"{self._prefix}:replicas", 0, -1)]
        for name in sorted(names):
            record = self.get_record(name)
            if record is not None:
                yield name, record

    def drop_record(self, replica: str) -> None:
        """See IndexStore."""
        with self._named_errors() as client:
            client.delete(self._record_key(replica))
            client.zrem(f"{self._prefix}:replicas", replica)

    def keep_alive(self, log: LogName) -> None:
        """See IndexStore."""
        with self._named_errors() as client:
            client.pexpire(self._log_key(log), self._ttl_ms)

    def announce(self, service: str, lease_ms: int) -> None:
        """See SharedStore."""
        with self._named_errors() as client:
            client.set(self._service_key(service), b"", px=lease_ms)

    def is_announced(self, service: str) -> bool:
        """See SharedStore."""
        with self._named_errors() as client:
            return client.get(self._service_key(service)) is not None

    def close(self) -> None:
        """See IndexStore."""
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()

    def _time(self, client: Client) -> tuple[int, int]:
        """Seconds and microseconds of the node that keeps the names."""
        if isinstance(client, RedisCluster):
            node = client.get_node_from_key(f"{self._prefix}:replicas")  # type: ignore[no-untyped-call]
            client = client.get_redis_connection(node)
        return client.time()

    def _log_key(self, log: LogName) -> str:
        return f"{self._prefix}:{{{log.replica}}}:{log.namespace.hex()}:{log.incarnation:016x}:log"

    def _service_key(self, service: str) -> str:
        return f"{self._prefix}:service:{service}"

    def _record_key(self, replica: str) -> str:
        return f"{self._prefix}:{{{replica}}}:record"

    @contextmanager
    def _named_errors(self) -> Iterator[Any]:
        """The client, for one thread at a time: who gives it up closes it. What it raises gets its name here."""
        with self._lock:
            try:
                if self._client is None:
                    self._client = self._connect()
                yield self._client
            except (RedisError, RedisClusterException, OSError) as error:
                named = _named(error)
                if isinstance(named, StoreUnavailable):
                    self.close()
                raise named from error


def _named(error: Exception) -> Exception:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OutOfMemoryError) or str(error).startswith(("OOM", "MISCONF")):
        remedy = "give the server more memory or disk, or shorten store_ttl_ms; allocation goes on meanwhile"
        return StoreFull(text, field="store", remedy=remedy)
    if isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError)) or "NOAUTH" in str(error):
        remedy = "look at store_username and store_password, and at the server's ACL"
        return StoreDenied(text, field="store_password", remedy=remedy)
    if isinstance(error, ReadOnlyError):
        return StoreReadOnly(text, field="store", remedy="name the primary, or its Sentinels")
    if isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE"):
        return StoreForeign(text, field="store_prefix", remedy="choose another; nothing was touched")
    return StoreUnavailable(text, field="store", remedy="look at the server; allocation goes on meanwhile")
