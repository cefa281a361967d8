"""The configuration keys of the service, with their defaults, limits and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MAX_BLOCKS, MAX_GROUPS

# With defaults, a process needs PROCESS_BYTES in addition to blocks and logs: for code, messages and answers.
PROCESS_BYTES = 256 << 20
BYTES_PER_BLOCK = 450
MIN_TOTAL_BLOCKS = 1 << 16
MIN_LOG_BYTES = 1 << 20
MAX_SOCKET_PATH = 107  # bytes of the path of a Unix socket, on Linux

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Millis = Annotated[int, Field(ge=1, le=24 * 3600 * 1000)]
Pause = Annotated[int, Field(ge=0, le=24 * 3600 * 1000)]


def _as_word(value: object) -> object:
    """Return a boolean as the word "true" or "false" and a text in lower case; return other values unchanged."""
    return str(value).lower() if isinstance(value, bool | str) else value


class Config(BaseModel):
    """All configuration keys of the service. Limits are inclusive."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    listen: str = "127.0.0.1:7070"
    """Listen address: host:port (port 0 selects a free port, which is printed) or unix:PATH."""
    session_socket: str = ""
    """Path of a Unix socket on which engines of this machine also open sessions, by ttrpc: a step takes a fraction of
    its time over gRPC. Who may write to the file may connect, with the same credentials as on `listen`. Empty = none.
    """
    metrics_listen: str = ""
    """Address (host:port) of the HTTP endpoint that Prometheus scrapes; empty = disabled."""
    metrics_token_file: str = ""
    """File with the bearer token that a scrape of `metrics_listen` must have; empty = scrapes need none. The service
    reads the file again when it changes. The endpoint has no TLS, so the token crosses the network in plain text.
    """
    health_listen: str = ""
    """Address (host:port) of a plaintext port that serves only gRPC Health, for probes without TLS; empty = disabled.
    """
    tls_cert: str = ""
    """PEM file of the service's certificate chain; enables TLS on `listen`. The service reloads the file when it
    changes.
    """
    tls_key: str = ""
    """PEM file of the private key of `tls_cert`, without a passphrase."""
    tls_client_ca: str = ""
    """PEM file of the certificate authorities that the service verifies client certificates against."""
    tls_client_auth: str = "none"
    """Whether clients must present a TLS certificate: none or require."""
    auth_owners: str = ""
    """YAML file of owners (identities of clients) with their permissions and limits. If set, every call must be
    authenticated.
    """
    auth_tokens: str = ""
    """File of static bearer tokens: one line per token, printed by `kvplane token`, with a digest instead of the token.
    """
    auth_jwks: str = ""
    """JWKS file of the public keys that the service verifies JSON Web Tokens with."""
    auth_jwt_issuer: str = ""
    """Issuer that JSON Web Tokens must state (claim `iss`)."""
    auth_jwt_audience: str = ""
    """Audience that JSON Web Tokens must state (claim `aud`)."""
    audit_log: str = ""
    """File to which changes and refused calls are logged, one JSON object per line; `-` = standard error; empty =
    disabled.
    """
    max_message_bytes: Annotated[int, Field(ge=1 << 16, le=2**31 - 1)] = 32 << 20
    """Largest message that the service accepts, in bytes."""
    max_rows_per_step: Count = 4096
    """Largest number of rows (one per request and kind of operation) in one step, summed over its parts."""
    max_tokens_per_message: Count = 1 << 20
    """Largest number of token ids in one message of a session. Long messages are hashed on a thread; hashing the
    default takes about 0.1 s.
    """
    max_steps_in_flight: Annotated[int, Field(ge=1, le=1024)] = 4
    """Largest number of steps of a session that are answered and not yet reported as executed. The service keeps the
    answers of this number of steps, so that a client can ask for them again.
    """
    max_replicas: Count = 1024
    """Largest number of replicas in this process."""
    replica_ttl_ms: Pause = 12 * 3600 * 1000
    """Time after which a replica expires that no engine, worker or changing call has used: its memory and its place in
    `max_replicas` are free again. A store keeps its keys for `store_ttl_ms`, and a registration with the same settings
    recovers them. 0 = never.
    """
    max_groups: Annotated[int, Field(ge=1, le=MAX_GROUPS)] = MAX_GROUPS
    """Largest number of KV cache groups per replica."""
    max_blocks: Annotated[int, Field(ge=2, le=MAX_BLOCKS)] = 1 << 22
    """Largest number of blocks per replica."""
    max_total_blocks: Annotated[int, Field(ge=2, le=2**40)] = 1 << 24
    """Largest number of blocks over all replicas; each block takes about 400 bytes of memory in this process
    once it is cached. Where it is not set, it follows from `memory_bytes`: the memory above `log_bytes` and 256 MiB, at
    450 bytes per block.
    """
    memory_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Memory that this process may use. `max_total_blocks` and `log_bytes` follow from it where they are not set.
    0 = the limit of its control group, or else half of the machine's memory.
    """
    eviction: Literal["lru", "window_tail", "turn_tail", "hazard"] = "lru"
    """Eviction policy of new replicas that are registered by a model or by layers and name none: lru; window_tail,
    which evicts the blocks first that left the window of a request; turn_tail, which also evicts states first that a
    later turn superseded; or hazard, which learns from the traffic what is least worth its place. A registered replica
    keeps its policy.
    """
    max_requests: Count = 65536
    """Largest number of open requests per replica that unary calls have created."""
    max_token_id: Annotated[int, Field(ge=0, le=2**32 - 1)] = 2**32 - 1
    """Largest token id that unary calls accept."""
    lease_ms: Millis = 10_000
    """Lease of a session: the session expires when no message arrives for this time."""
    mirror_max_lag_ms: Millis = 5000
    """Age above which the steps of a mirrored engine are too old: the replica's keys are hidden until the service has
    caught up.
    """
    worker_lease_ms: Millis = 10_000
    """Lease of a worker's registration: the registration ends when the worker does not renew it for this time."""
    op_window: Count = 4096
    """Number of recent answers that a replica keeps for unary calls with an op_id, so that a retried call is answered
    again and not executed twice.
    """
    op_window_bytes: Count = 64 << 20
    """Memory limit per replica for the answers of `op_window`; the oldest answers are dropped first."""
    events_resume: Count = 4096
    """Number of event batches that a replica keeps. The service ends a subscription that falls further behind."""
    max_subscribers: Count = 64
    """Largest number of event subscribers per replica."""
    decision_log_steps: Count = 4096
    """Largest number of entries in the decision log of a replica; an entry is a step, or one message of a step that was
    sent in several messages.
    """
    log_bytes: Annotated[int, Field(ge=MIN_LOG_BYTES, le=2**40)] = 256 << 20
    """Approximate memory budget of the decision logs and event logs of all replicas together. When the budget is used
    up, the longest log drops its oldest entries. Where it is not set, a 16th of `memory_bytes`, at most the default.
    """
    idle_check_ms: Pause = 10_000
    """Time without a change after which the state of a replica is checked, once until it changes; 0 = never."""
    hash_inline_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 8192
    """Number of tokens above which the content of a unary call is hashed on a thread instead of the event loop."""
    drain_delay_ms: Pause = 0
    """Delay between SIGTERM and the refusal of new sessions, so that load balancers can stop sending clients here."""
    drain_grace_ms: Pause = 20_000
    """Time after SIGTERM and `drain_delay_ms` in which open sessions may finish."""
    advertise: str = ""
    """Address at which clients and other services reach this service, and its name in a shared store; empty = `listen`.
    """
    store: str = "none"
    """Store in which registrations and cache keys survive a restart: none, memory, sqlite:PATH, redis://HOST:PORT[/DB],
    redis+cluster://HOST:PORT,..., redis+sentinel://HOST:PORT,.../NAME; use rediss instead of redis for TLS. Disabled by
    default, because the right store depends on the deployment.
    """
    store_key_file: str = ""
    """File of the keys that seal what the service stores, one per line, at least 32 bytes each (`openssl rand -hex
    32`); other users must not be able to read it. The first key seals, and a record that no key proves is not used.
    Services that share a store share the keys; the store must not have them. Empty = every process that can write to
    the store is trusted not to forge cached content.
    """
    store_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,64}$")] = "kvplane"
    """Prefix of every key that the service writes to Redis."""
    store_username: str = ""
    """User name for the access control lists (ACL) of Redis."""
    store_password: SecretStr = SecretStr("")
    """Password for Redis; set it by the environment variable, which does not show in the list of processes."""
    store_tls_ca: str = ""
    """PEM file of the certificate authorities that Redis is verified against; empty = those of the system."""
    store_tls_cert: str = ""
    """PEM file of the certificate that the service presents to Redis."""
    store_tls_key: str = ""
    """PEM file of the private key of `store_tls_cert`."""
    store_timeout_ms: Millis = 2000
    """Timeout of a call to the store; when it expires, the service considers the store unavailable."""
    store_load_ms: Millis = 60_000
    """Time after which a replica whose stored entries cannot be read begins without them."""
    store_ttl_ms: Millis = 24 * 3600 * 1000
    """Time after which a store deletes the keys of a replica that has expired, and Redis those that no service has
    renewed.
    """
    ownership: str = "store"
    """Where services agree which one owns a replica: store (hints in it), grants (in Redis), lease:NAME or etcd:URL."""
    ownership_ca: str = ""
    """PEM file of the authorities of the API server (empty = the pod's) or etcd (empty = those of the system)."""
    ownership_token: str = ""
    """File with the bearer token for the API server, read for each call; empty = that of the pod's service account."""
    ownership_cert: str = ""
    """PEM file of the certificate that the service presents to etcd."""
    ownership_key: str = ""
    """PEM file of the private key of `ownership_cert`."""
    peer_services: str = ""
    """Addresses of other services, separated by commas: replicas here with a tier of kind PEERS also load what replicas
    there hold in host memory. Let each service name all others. Empty = none.
    """
    peer_services_token: str = ""
    """File with the bearer token for `peer_services`, read for each call: of an owner there with the scope `worker` and
    `every_replica`. Owners need equal names in all these services. Empty = none.
    """
    peer_services_ca: str = ""
    """PEM file of the certificate authorities that `peer_services` are verified against; empty = they have no TLS.
    Where `tls_client_auth` is require, this service presents `tls_cert` to them.
    """
    owner_lease_ms: Millis = 5000
    """Lease of a service. When it expires, another service takes over a replica as soon as a client asks for it."""
    store_flush_ms: Millis = 100
    """Pause between two writes to the store; all changes within a pause are written together."""
    store_lag_entries: Count = 100_000
    """Largest number of changes that wait for the store. Beyond it the service drops the waiting changes, and writes
    all blocks again when the store recovers.
    """
    store_lag_ms: Millis = 5000
    """Age of the oldest unwritten change above which the service reports the store as degraded."""
    max_connections: Count = 4096
    """Largest number of connections; the service closes further ones."""
    keepalive_ms: Millis = 30_000
    """Interval between keepalive pings on an idle connection."""
    keepalive_timeout_ms: Millis = 10_000
    """Timeout of a keepalive ping; the service closes the connection when no answer arrives in this time."""
    reflection: Annotated[Literal["auto", "true", "false"], BeforeValidator(_as_word)] = "auto"
    """Whether to serve gRPC reflection (v1 and v1alpha): true, false, or auto, which means true unless `auth_owners` is
    set.
    """
    uvloop: bool = True
    """Whether to use the uvloop event loop instead of asyncio's own."""
    log_level: str = "INFO"
    """Least severe level of log lines that are printed: DEBUG, INFO, WARNING or ERROR."""

    @property
    def serves_reflection(self) -> bool:
        """True if the service serves gRPC reflection; the value `auto` disables reflection where calls must be
        authenticated.
        """
        return self.reflection == "true" or (self.reflection == "auto" and not self.auth_owners)

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value.startswith("unix:"):
            if len(value) == len("unix:"):
                raise ValueError("`unix:` must be followed by the path of a socket")
            return value
        if not _is_host_and_port(value):
            raise ValueError("it must be host:port with a port of 0 to 65535, or unix:PATH")
        return value

    @field_validator("session_socket")
    @classmethod
    def _socket_path(cls, value: str) -> str:
        if "\0" in value or len(value.encode()) > MAX_SOCKET_PATH or value.startswith("unix:"):
            raise ValueError(f"it must be a path of at most {MAX_SOCKET_PATH} bytes, without `unix:`, or empty")
        return value

    @field_validator("tls_client_auth")
    @classmethod
    def _client_auth(cls, value: str) -> str:
        if value == "optional":
            raise ValueError("gRPC's Python server does not support optional client certificates: use none or require")
        if value not in ("none", "require"):
            raise ValueError("it must be none or require")
        return value

    @field_validator("metrics_listen", "health_listen")
    @classmethod
    def _port_address(cls, value: str) -> str:
        if value and not _is_host_and_port(value):
            raise ValueError("it must be host:port with a port of 0 to 65535, or empty")
        return value

    @field_validator("log_level")
    @classmethod
    def _level(cls, value: str) -> str:
        if value.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("it must be DEBUG, INFO, WARNING or ERROR")
        return value.upper()


def _is_host_and_port(value: str) -> bool:
    host, colon, port = value.rpartition(":")
    return bool(colon and host and port.isdecimal() and int(port) <= 65535)


def is_open_to_all(config: Config) -> bool:
    """Return True if clients on other machines can call the service in plain text and without authentication."""
    return not (is_local(config.listen) or config.tls_cert or config.auth_owners)


def is_local(address: str) -> bool:
    """Return True if only clients on this machine reach the listen address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return address.startswith("unix:") or host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a host name, not an IP address
        return False


def is_store_trusted(config: Config) -> bool:
    """Return True if a process that can write to the store can make the service give wrong hits."""
    return config.store not in ("none", "memory") and not config.store_key_file


KEYS = tuple(Config.model_fields)


def defaults_for(memory_bytes: int) -> dict[str, int]:
    """Return the limits with which a process fits into this memory."""
    log_bytes = min(Config.model_fields["log_bytes"].default, max(MIN_LOG_BYTES, memory_bytes // 16))
    blocks = (memory_bytes - log_bytes - PROCESS_BYTES) // BYTES_PER_BLOCK
    return {"log_bytes": log_bytes, "max_total_blocks": max(MIN_TOTAL_BLOCKS, blocks)}


def reason_of(error: Mapping[str, Any]) -> str:
    """Return the reason of an error of pydantic, without the kind of exception that it puts before ours."""
    return str(error["msg"]).removeprefix("Value error, ")


def check_together(config: Config) -> None:
    """Raise InvalidArgument if two values contradict each other although each one is valid alone."""
    for is_wrong, key, what, remedy in _contradictions(config):
        if is_wrong:
            raise InvalidArgument(what, field=key, remedy=remedy)


def _contradictions(config: Config) -> Iterator[tuple[bool, str, str, str]]:
    """Yield for each rule: True if the configuration violates it, the key at fault, the problem, the remedy."""
    for cert, key in (
        ("tls_cert", "tls_key"),
        ("store_tls_cert", "store_tls_key"),
        ("ownership_cert", "ownership_key"),
    ):
        has_cert, has_key = bool(getattr(config, cert)), bool(getattr(config, key))
        empty = key if has_cert else cert
        what = f"it is empty, although {cert if empty == key else key} is set"
        yield has_cert != has_key, empty, what, f"set both {cert} and {key}, or neither"
    asks = config.tls_client_auth != "none"
    remedy = "set tls_cert and tls_key"
    yield asks and not config.tls_cert, "tls_client_auth", "it is `require`, which needs TLS, and TLS is off", remedy
    what, remedy = "it is empty, although tls_client_auth is `require`", "name a PEM file of certificate authorities"
    yield asks and not config.tls_client_ca, "tls_client_ca", what, remedy
    what = "it is `none`, so that tls_client_ca has no effect"
    remedy = "set it to require, or leave tls_client_ca empty"
    yield bool(config.tls_client_ca) and not asks, "tls_client_auth", what, remedy
    proofs = [key for key in ("auth_tokens", "auth_jwks") if getattr(config, key)]
    what, remedy = f"it is empty, although {' and '.join(proofs)} is set", "name the YAML file of owners"
    yield bool(proofs) and not config.auth_owners, "auth_owners", what, remedy
    what, remedy = "it is set without a method of authentication", "set auth_tokens, auth_jwks or tls_client_auth"
    yield bool(config.auth_owners) and not proofs and not asks, "auth_owners", what, remedy
    for key in ("auth_jwt_issuer", "auth_jwt_audience"):
        has = bool(getattr(config, key))
        what = "it is empty, so that every token signed with a key of auth_jwks would be accepted"
        yield not has and bool(config.auth_jwks), key, what, "set it to the value that your tokens state"
        yield has and not config.auth_jwks, "auth_jwks", f"it is empty, although {key} is set", "name a JWKS file"
    shared = {"store": ("",), "grants": ("redis",)}.get(config.ownership, ("redis", "memory"))
    what = f"services cannot share {config.store!r}"
    yield not config.store.startswith(shared), "ownership", what, "leave it `store`, or use Redis"
    what = "it is set, although metrics_listen is empty"
    is_unused = bool(config.metrics_token_file) and not config.metrics_listen
    yield is_unused, "metrics_token_file", what, "set metrics_listen, or leave metrics_token_file empty"
    for key in ("peer_services_token", "peer_services_ca"):
        what = "it is set, although peer_services is empty"
        remedy = f"set peer_services, or leave {key} empty"
        yield bool(getattr(config, key)) and not config.peer_services, key, what, remedy
    for key in ("metrics_listen", "health_listen"):
        value = getattr(config, key)
        is_taken = value == config.listen and not value.endswith(":0")
        yield is_taken, key, f"{value} is already the value of `listen`", "use a different port"
