"""Configuration: one frozen type, from flags, the environment, a YAML file and defaults, in this order of precedence.

Keys are flat and end with their unit. The environment variable of a key is KVPLANE_ followed by the key in capitals.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import MAX_BLOCKS, MAX_GROUPS

ENV_PREFIX = "KVPLANE_"
DEFAULT_SOURCE = "default"

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Millis = Annotated[int, Field(ge=1, le=24 * 3600 * 1000)]
Pause = Annotated[int, Field(ge=0, le=24 * 3600 * 1000)]


def _as_word(value: object) -> object:
    """Booleans of YAML and of Python as the words true and false; other values unchanged."""
    return str(value).lower() if isinstance(value, bool | str) else value


class Config(BaseModel):
    """All configuration keys. Limits are inclusive."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    listen: str = "127.0.0.1:7070"
    """Listen address: host:port (port 0 selects a free port, which is printed) or unix:PATH."""
    metrics_listen: str = ""
    """Listen address of the HTTP endpoint for Prometheus, host:port; empty = disabled."""
    health_listen: str = ""
    """Listen address of a plaintext port that serves only gRPC Health, for probes without TLS, host:port; empty =
    disabled.
    """
    tls_cert: str = ""
    """PEM file of the service's certificate chain; enables TLS on `listen`. Reloaded when it changes."""
    tls_key: str = ""
    """PEM file of the private key of `tls_cert`, without a passphrase."""
    tls_client_ca: str = ""
    """PEM file of the authorities that client certificates are verified against."""
    tls_client_auth: str = "none"
    """Client certificates: none or require."""
    auth_owners: str = ""
    """YAML file of owners with their permissions and limits. When set, every call must be authenticated."""
    auth_tokens: str = ""
    """File of static bearer tokens, stored as digests: lines printed by `kvplane token`."""
    auth_jwks: str = ""
    """JWKS file of the public keys that JSON Web Tokens are verified with."""
    auth_jwt_issuer: str = ""
    """Required issuer of JSON Web Tokens (`iss`)."""
    auth_jwt_audience: str = ""
    """Required audience of JSON Web Tokens (`aud`)."""
    audit_log: str = ""
    """Audit log of changes and refused calls, one JSON object per line; `-` = standard error; empty = disabled."""
    max_message_bytes: Annotated[int, Field(ge=1 << 16, le=2**31 - 1)] = 32 << 20
    """Largest message that the service accepts, in bytes."""
    max_rows_per_step: Count = 4096
    """Rows of a step, summed over its parts."""
    max_tokens_per_message: Count = 1 << 20
    """Token ids in one message of a session. Long messages are hashed on a thread; the default takes about 0.1 s."""
    max_steps_in_flight: Annotated[int, Field(ge=1, le=1024)] = 4
    """Steps of a session that may be in flight, not yet reported as executed. The answers of that many steps are
    kept for retries.
    """
    max_replicas: Count = 1024
    """Replicas of this process."""
    max_groups: Annotated[int, Field(ge=1, le=MAX_GROUPS)] = MAX_GROUPS
    """KV cache groups of a replica."""
    max_blocks: Annotated[int, Field(ge=2, le=MAX_BLOCKS)] = 1 << 22
    """Blocks of a replica's pool."""
    max_total_blocks: Annotated[int, Field(ge=2, le=2**40)] = 1 << 24
    """Blocks of all pools together; each takes about 200 bytes of this process."""
    max_requests: Count = 65536
    """Requests per replica that were created by unary calls."""
    max_token_id: Annotated[int, Field(ge=0, le=2**32 - 1)] = 2**32 - 1
    """Largest token id that unary calls accept."""
    lease_ms: Millis = 10_000
    """Lease of a session; it expires when no message arrives for this long."""
    worker_lease_ms: Millis = 10_000
    """Lease of a worker registration; it expires when the worker does not renew it for this long."""
    op_window: Count = 4096
    """Answers of unary calls with an op_id that a replica keeps for retries."""
    op_window_bytes: Count = 64 << 20
    """Bytes that these answers may take; the oldest are dropped first."""
    events_resume: Count = 4096
    """Event batches that a replica keeps. A subscription that falls further behind is ended."""
    max_subscribers: Count = 64
    """Event subscribers per replica."""
    decision_log_steps: Count = 4096
    """Entries of the decision log that a replica keeps: steps, or pieces of steps."""
    log_bytes: Annotated[int, Field(ge=1 << 20, le=2**40)] = 256 << 20
    """Approximate memory budget of the decision logs and event logs of all replicas together. When it is used up, the
    longest log loses its oldest entries first.
    """
    hash_inline_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 8192
    """Contents of unary calls with more tokens than this are hashed on a thread."""
    drain_delay_ms: Pause = 0
    """Delay between SIGTERM and refusing new sessions, so that load balancers can react."""
    drain_grace_ms: Pause = 20_000
    """Time that open sessions have to finish after SIGTERM."""
    advertise: str = ""
    """Address at which clients and other services reach this one, and its name in a shared store; empty = `listen`."""
    store: str = "none"
    """Store of published entries: none, memory, sqlite:PATH, redis://HOST:PORT[/DB], redis+cluster://HOST:PORT,...,
    redis+sentinel://HOST:PORT,.../NAME; rediss for TLS. Disabled by default: the right store depends on the deployment.
    """
    store_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,64}$")] = "kvplane"
    """Prefix of every key in Redis."""
    store_username: str = ""
    """User name for Redis ACLs."""
    store_password: SecretStr = SecretStr("")
    """Password for Redis; preferably set in the environment."""
    store_tls_ca: str = ""
    """PEM file of the authorities that the certificate of Redis is verified against; empty = those of the system."""
    store_tls_cert: str = ""
    """PEM file of the client certificate for Redis."""
    store_tls_key: str = ""
    """PEM file of the private key of `store_tls_cert`."""
    store_timeout_ms: Millis = 2000
    """Timeout of store calls; after it the store counts as unavailable."""
    store_ttl_ms: Millis = 24 * 3600 * 1000
    """Time to live of keys in Redis that no service renews."""
    owner_lease_ms: Millis = 5000
    """Lease of a service in a shared store. When it expires, another service adopts its replicas on request."""
    store_flush_ms: Millis = 100
    """Delay before changes are written to the store; changes within it are written together."""
    store_lag_entries: Count = 100_000
    """Changes that may wait for the store. Beyond this the backlog is dropped, and a full resync runs when the store
    recovers.
    """
    store_lag_ms: Millis = 5000
    """Age of the oldest unwritten change above which the store is reported as degraded."""
    keepalive_ms: Millis = 30_000
    """Interval of keepalive pings on an idle connection."""
    keepalive_timeout_ms: Millis = 10_000
    """Timeout of a keepalive ping; the connection is closed when it expires."""
    reflection: Annotated[Literal["auto", "true", "false"], BeforeValidator(_as_word)] = "auto"
    """Serve gRPC reflection (v1 and v1alpha): true, false, or auto, which is true unless `auth_owners` is set."""
    uvloop: bool = True
    """Use the uvloop event loop instead of that of asyncio."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    @property
    def serves_reflection(self) -> bool:
        """Whether to serve reflection; `auto` hides the methods where calls are authenticated."""
        return self.reflection == "true" or (self.reflection == "auto" and not self.auth_owners)

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value.startswith("unix:"):
            if len(value) == len("unix:"):
                raise ValueError("unix: must be followed by a path")
            return value
        if not _is_host_and_port(value):
            raise ValueError("give host:port with a port of 0 to 65535, or unix:PATH")
        return value

    @field_validator("tls_client_auth")
    @classmethod
    def _client_auth(cls, value: str) -> str:
        if value == "optional":
            raise ValueError("gRPC's Python server does not support optional client certificates: use none or require")
        if value not in ("none", "require"):
            raise ValueError("use none or require")
        return value

    @field_validator("metrics_listen", "health_listen")
    @classmethod
    def _port_address(cls, value: str) -> str:
        if value and not _is_host_and_port(value):
            raise ValueError("give host:port with a port of 0 to 65535, or leave it empty")
        return value

    @field_validator("log_level")
    @classmethod
    def _level(cls, value: str) -> str:
        if value.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("use DEBUG, INFO, WARNING or ERROR")
        return value.upper()


def _is_host_and_port(value: str) -> bool:
    host, colon, port = value.rpartition(":")
    return bool(colon and host and port.isdecimal() and int(port) <= 65535)


def is_open_to_all(config: Config) -> bool:
    """Whether other machines can call in plain text without authentication."""
    host = config.listen.rpartition(":")[0].strip("[]")
    try:
        is_local = config.listen.startswith("unix:") or host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        is_local = False
    return not (is_local or config.tls_cert or config.auth_owners)


KEYS = tuple(Config.model_fields)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and the source of each value: "flag", an environment variable, a file path, or "default"."""

    config: Config
    sources: Mapping[str, str]

    def as_yaml(self) -> str:
        """An equivalent YAML file; each line has the source of its value as a comment."""
        lines = []
        for key in KEYS:
            value = getattr(self.config, key)
            shown = str(value) if isinstance(value, SecretStr) else value
            text = yaml.safe_dump({key: shown}, width=1000).rstrip()
            lines.append(f"{text}  # {self.sources[key]}\n")
        return "".join(lines)


def load(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Loaded:
    """Merge the sources.

    Raises:
        InvalidArgument: an unknown key (the remedy names the nearest known one), an invalid value, or contradictory
            values.
        NotFound: the file does not exist.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(KEYS, DEFAULT_SOURCE)
    for layer in (_from_file(file) if file else {}, _from_environment(environment), _from_flags(flags)):
        for key, (value, source) in layer.items():
            values[key] = value
            sources[key] = source
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise InvalidArgument(
            f"{first['input']!r} from {sources[key]}: {first['msg']}",
            field=key,
            remedy=f"its default is {Config.model_fields[key].default!r}",
        ) from None
    check_together(config)
    return Loaded(config, sources)


def check_together(config: Config) -> None:
    """Raise InvalidArgument for values that are valid one by one and contradict each other."""
    for is_wrong, key, what, remedy in _contradictions(config):
        if is_wrong:
            raise InvalidArgument(what, field=key, remedy=remedy)


def _contradictions(config: Config) -> Iterator[tuple[bool, str, str, str]]:
    """For each rule: whether it is violated, the key at fault, the problem, the remedy."""
    for cert, key in (("tls_cert", "tls_key"), ("store_tls_cert", "store_tls_key")):
        has_cert, has_key = bool(getattr(config, cert)), bool(getattr(config, key))
        empty = key if has_cert else cert
        yield has_cert != has_key, empty, "it is empty, and its counterpart is set", "set both, or none"
    asks = config.tls_client_auth != "none"
    remedy = "set tls_cert and tls_key"
    yield asks and not config.tls_cert, "tls_client_auth", "client certificates need TLS", remedy
    remedy = "name a PEM file of authorities"
    yield asks and not config.tls_client_ca, "tls_client_ca", "no authorities to verify clients against", remedy
    remedy = "set it to require"
    yield bool(config.tls_client_ca) and not asks, "tls_client_auth", "tls_client_ca is set and would be unused", remedy
    proofs = [key for key in ("auth_tokens", "auth_jwks") if getattr(config, key)]
    what, remedy = f"{' and '.join(proofs)} without owners", "set it to the file of owners and their permissions"
    yield bool(proofs) and not config.auth_owners, "auth_owners", what, remedy
    what, remedy = "no method of authentication is configured", "set auth_tokens, auth_jwks or tls_client_auth"
    yield bool(config.auth_owners) and not proofs and not asks, "auth_owners", what, remedy
    for key in ("auth_jwt_issuer", "auth_jwt_audience"):
        has = bool(getattr(config, key))
        what = "it is empty: every token signed by these keys would be accepted"
        yield not has and bool(config.auth_jwks), key, what, "set it"
        yield has and not config.auth_jwks, "auth_jwks", f"{key} is set and there are no keys", "set it to a JWKS file"
    for key in ("metrics_listen", "health_listen"):
        value = getattr(config, key)
        is_taken = value == config.listen and not value.endswith(":0")
        yield is_taken, key, f"{value} is also the address of `listen`", "use a different port"


def split_setting(text: str) -> tuple[str, str]:
    """Split KEY=VALUE of a command line. Raises InvalidArgument."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"{text!r} has no '='", field="--set", remedy="write --set KEY=VALUE")
    return key.strip(), value.strip()


_Layer = dict[str, tuple[Any, str]]


def _from_flags(flags: Mapping[str, Any]) -> _Layer:
    for key in flags:
        _check_key(key, "flag")
    return {key: (value, "flag") for key, value in flags.items()}


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    """Variables that begin with KVPLANE_ and name a key.

    A name close to a key is refused as a typo. Others are ignored: Kubernetes sets KVPLANE_SERVICE_HOST and similar
    variables in every pod when a Service is called kvplane.
    """
    layer: _Layer = {}
    for name, value in environment.items():
        key = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX):
            continue
        if key in KEYS:
            layer[key] = (value, name)
        elif _nearest(key, 0.8):
            raise _unknown(name, (f"{ENV_PREFIX}{key.upper()}" for key in _nearest(key, 0.8)))
    return layer


def _from_file(path: Path) -> _Layer:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field="--config", remedy="name a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not YAML: {error}", field="--config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} is not a mapping", field="--config", remedy="write lines of `key: value`")
    for key in content:
        _check_key(str(key), str(path))
    return {str(key): (value, str(path)) for key, value in content.items()}


def _check_key(key: str, source: str) -> None:
    if key not in KEYS:
        raise _unknown(f"{key} from {source}", _nearest(key, 0.0))


def _nearest(key: str, cutoff: float) -> list[str]:
    return difflib.get_close_matches(key, KEYS, n=1, cutoff=cutoff)


def _unknown(what: str, nearest: Iterable[str]) -> InvalidArgument:
    return InvalidArgument(
        f"unknown key {what}",
        field="configuration",
        remedy=f"the nearest is {', '.join(nearest)}; `kvplane config` prints all",
    )
