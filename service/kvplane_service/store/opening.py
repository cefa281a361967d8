"""Create the store that the configuration key `store` names:

none | memory | sqlite:PATH
redis://HOST:PORT[/DB] | redis+cluster://HOST:PORT,... | redis+sentinel://HOST:PORT,.../NAME     (rediss: TLS)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_service.config import Config
from kvplane_service.runtime.executors import InOrder
from kvplane_service.store.interface import IndexStore
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import Offloaded, OffloadedShared
from kvplane_service.store.seals import guarded
from kvplane_service.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

_URL = re.compile(r"(?P<scheme>rediss?)(?:\+(?P<kind>cluster|sentinel))?://(?P<hosts>[^/@?#]+)(?:/(?P<rest>[^/?#]*))?")
_DEFAULT_PORT = {"sentinel": 26379}


def make_store(config: Config, read_only: bool = False) -> IndexStore | None:
    """Return the configured store, which is not open yet and is sealed if there is a key; None if the configuration
    names no store.

    With `read_only` nothing is written to the store, not even its format version.

    Raises:
        InvalidArgument: the value of `store`, or the content of the key file, is invalid.
        NotFound: a file of certificates or keys does not exist.
    """
    if config.store == "none":
        return None
    return guarded(_make(config, read_only), config.store_key_file, InOrder("the seals of the store"))


def _make(config: Config, read_only: bool) -> IndexStore:
    name = config.store
    if name == "memory":
        return OffloadedShared(MemoryStore, InOrder("the store"))
    if name.startswith("sqlite:"):
        path, busy_s = Path(name.removeprefix("sqlite:")), config.store_timeout_ms / 1000
        timeout_s = 2 * busy_s  # longer than SQLite's own timeout, which reports a locked file
        return Offloaded(partial(SqliteStore, path, busy_s, read_only), InOrder("the store"), timeout_s)
    return _make_redis(config, read_only)


def _make_redis(config: Config, read_only: bool) -> IndexStore:
    from kvplane_service.store.redis_store import RedisStore

    return RedisStore(_connector(config), config, read_only)


def _connector(config: Config) -> Callable[[], Redis | RedisCluster]:
    """Return the function that connects to the Redis URL of the configuration. Imports the Redis driver, which other
    stores do not need.
    """
    from redis.asyncio import Redis
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    if "@" in config.store:
        raise InvalidArgument(
            "the address contains `@`, as in USER:PASSWORD@HOST, but logs and messages show the address",
            field="store",
            remedy="give user and password by store_username and store_password",
        )
    match = _URL.fullmatch(config.store)
    if match is None:
        raise InvalidArgument(
            f"{config.store!r} is not an address of a store",
            field="store",
            remedy="use none, memory, sqlite:PATH, redis://HOST:PORT, redis+cluster://... or redis+sentinel://.../NAME",
        )
    kind, rest = match["kind"], match["rest"] or ""
    hosts = [_host(text, _DEFAULT_PORT.get(kind, 6379)) for text in match["hosts"].split(",")]
    options = _options(config, match["scheme"] == "rediss")
    # The driver must not retry, because that would hide that a chunk may be lost; StoreWriter retries.
    once = Retry(NoBackoff(), 0)
    if kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in hosts]
        return lambda: RedisCluster(startup_nodes=nodes, retry=once, **options)
    if kind == "sentinel":
        if not rest:
            what = f"{config.store!r} lacks the name of the primary that the Sentinels monitor"
            raise InvalidArgument(what, field="store", remedy="write redis+sentinel://HOST:PORT,.../NAME")
        return lambda: _primary(hosts, rest, options)
    if rest and not rest.isdecimal():
        raise InvalidArgument(
            f"{rest!r} is not a database number", field="store", remedy="write redis://HOST:PORT/NUMBER"
        )
    host, port = hosts[0]
    return lambda: Redis(host=host, port=port, db=int(rest or 0), retry=once, **options)


def _primary(hosts: list[tuple[str, int]], name: str, options: dict[str, Any]) -> Redis:
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    shared = ("socket_timeout", "socket_connect_timeout", "ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    to_sentinels = {key: value for key, value in options.items() if key in shared}
    sentinel = Sentinel(hosts, sentinel_kwargs=to_sentinels, retry=Retry(NoBackoff(), 0), **options)  # type: ignore[no-untyped-call]
    primary: Redis = sentinel.master_for(name)
    return primary


def _options(config: Config, tls: bool) -> dict[str, Any]:
    timeout_s = config.store_timeout_ms / 1000
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    if config.store_username:
        options["username"] = config.store_username
    if config.store_password.get_secret_value():
        options["password"] = config.store_password.get_secret_value()
    if tls:
        files = (("ssl_ca_certs", "store_tls_ca"), ("ssl_certfile", "store_tls_cert"), ("ssl_keyfile", "store_tls_key"))
        options |= {"ssl": True} | {option: _file(config, key) for option, key in files if getattr(config, key)}
    return options


def _file(config: Config, key: str) -> str:
    path = Path(getattr(config, key))
    if not path.is_file():
        raise NotFound(f"the file {path} does not exist", field=key, remedy="name a PEM file")
    return str(path)


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        what = f"{text!r} is not an address"
        raise InvalidArgument(what, field="store", remedy="write HOST:PORT with a port of 1 to 65535")
    return host.strip("[]"), int(port)
