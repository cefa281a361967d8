"""The one place where configuration is read: flag > environment > file > default, into one frozen type.

Keys are flat, units last. The environment variable of a key is KVPLANE_ and the key in capitals; the file is
YAML.
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
    """YAML's true and false, and Python's, as the words that they are written with."""
    return str(value).lower() if isinstance(value, bool | str) else value


class Config(BaseModel):
    """Everything that can be set. Limits are inclusive: the value itself is still accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    listen: str = "127.0.0.1:7070"
    """Address: host:port (port 0 = a free one, which is printed) or unix:PATH."""
    metrics_listen: str = ""
    """Address of the HTTP port for Prometheus, host:port; empty = none."""
    health_listen: str = ""
    """Address of a plaintext port with gRPC Health alone, for probes that cannot do TLS, host:port; empty = none."""
    tls_cert: str = ""
    """PEM file of the service's certificate chain; with it `listen` speaks TLS. Read again when it changes."""
    tls_key: str = ""
    """PEM file of its private key, without a passphrase."""
    tls_client_ca: str = ""
    """PEM file of the authorities that clients' certificates are checked against."""
    tls_client_auth: str = "none"
    """Client certificates: none, or require."""
    auth_owners: str = ""
    """YAML file of owners: what each may, and its limits. With it, every caller must say who it is."""
    auth_tokens: str = ""
    """File of static bearer tokens, by their digests: lines that `kvplane token` prints."""
    auth_jwks: str = ""
    """JWKS file of the public keys that JSON Web Tokens are checked against."""
    auth_jwt_issuer: str = ""
    """Who must have issued them (`iss`)."""
    auth_jwt_audience: str = ""
    """For whom they must be (`aud`)."""
    audit_log: str = ""
    """File that is told who changed what and who was refused, a JSON object a line; `-` = standard
    error; empty = none.
    """
    max_message_bytes: Annotated[int, Field(ge=1 << 16, le=2**31 - 1)] = 32 << 20
    """Largest message that the service accepts."""
    max_rows_per_step: Count = 4096
    """Rows of one step, all its parts together."""
    max_tokens_per_message: Count = 1 << 20
    """Token ids that one message of a session may bring; many are hashed beside the event loop, 0.1 s for so many."""
    max_steps_in_flight: Annotated[int, Field(ge=1, le=1024)] = 4
    """Steps of a session that are not known to be executed; so many answers are kept for a client that asks
    again.
    """
    max_replicas: Count = 1024
    """Replicas in this process."""
    max_groups: Annotated[int, Field(ge=1, le=MAX_GROUPS)] = MAX_GROUPS
    """KV cache groups of a replica."""
    max_blocks: Annotated[int, Field(ge=2, le=MAX_BLOCKS)] = 1 << 22
    """Blocks of a replica's pool."""
    max_total_blocks: Annotated[int, Field(ge=2, le=2**40)] = 1 << 24
    """Blocks of all pools together; each costs this process some 200 bytes."""
    max_requests: Count = 65536
    """Requests that a replica knows through unary calls."""
    max_token_id: Annotated[int, Field(ge=0, le=2**32 - 1)] = 2**32 - 1
    """Greatest token id that unary calls accept."""
    lease_ms: Millis = 10_000
    """A session that is silent for longer counts as gone."""
    worker_lease_ms: Millis = 10_000
    """A worker that is silent for longer is forgotten."""
    op_window: Count = 4096
    """Answers of unary calls with an op_id that a replica keeps for repeats."""
    op_window_bytes: Count = 64 << 20
    """Bytes that these answers may take; the oldest go first."""
    events_resume: Count = 4096
    """Event batches that a replica keeps at most; a subscriber that falls further behind is ended."""
    max_subscribers: Count = 64
    """Event subscribers of a replica."""
    decision_log_steps: Count = 4096
    """Decisions that a replica keeps at most for explanations: steps, or pieces of steps."""
    log_bytes: Annotated[int, Field(ge=1 << 20, le=2**40)] = 256 << 20
    """Bytes that decisions and event batches of all replicas may take together, about; the longest log pays first, with
    its oldest entries.
    """
    hash_inline_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 8192
    """Longer contents of unary calls are hashed beside the event loop."""
    drain_delay_ms: Pause = 0
    """After SIGTERM, wait so long before refusing new sessions, until load balancers have noticed."""
    drain_grace_ms: Pause = 20_000
    """After SIGTERM, sessions have so long to finish."""
    advertise: str = ""
    """Address under which clients and other services reach this one, and its name in a shared store; empty = that of
    `listen`.
    """
    store: str = "none"
    """Where published entries outlive this process: none, memory, sqlite:PATH, redis://HOST:PORT[/DB],
    redis+cluster://HOST:PORT,..., redis+sentinel://HOST:PORT,.../NAME; rediss for TLS. None by default: where a
    file may lie, and whether services share a store, is not ours to guess.
    """
    store_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,64}$")] = "kvplane"
    """First part of every key in Redis."""
    store_username: str = ""
    """User of Redis's ACL."""
    store_password: SecretStr = SecretStr("")
    """Password for Redis; best given by the environment."""
    store_tls_ca: str = ""
    """PEM file of the authorities that Redis's certificate is checked against; empty = the system's."""
    store_tls_cert: str = ""
    """PEM file of our certificate, where Redis asks for one."""
    store_tls_key: str = ""
    """PEM file of its key."""
    store_timeout_ms: Millis = 2000
    """A store that does not answer for so long counts as gone."""
    store_ttl_ms: Millis = 24 * 3600 * 1000
    """Redis forgets what no service has renewed for so long."""
    owner_lease_ms: Millis = 5000
    """A service that shared its store and is silent there for longer counts as gone: another one that is asked for its
    replicas takes them over.
    """
    store_flush_ms: Millis = 100
    """What changed is written so long afterwards, together."""
    store_lag_entries: Count = 100_000
    """So many changes may wait for the store; then they are shed, and all is told anew when it is back."""
    store_lag_ms: Millis = 5000
    """Changes that wait for longer make the service say that it is degraded."""
    keepalive_ms: Millis = 30_000
    """Ping a silent connection so often."""
    keepalive_timeout_ms: Millis = 10_000
    """A connection whose ping is not answered for so long is closed."""
    reflection: Annotated[Literal["auto", "true", "false"], BeforeValidator(_as_word)] = "auto"
    """Serve gRPC reflection (v1 and v1alpha): true, false, or auto, which is true unless callers must
    say who they are.
    """
    uvloop: bool = True
    """Run on uvloop in place of asyncio's own event loop."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    @property
    def serves_reflection(self) -> bool:
        """Who may not call need not know what could be called, unless it was asked for."""
        return self.reflection == "true" or (self.reflection == "auto" and not self.auth_owners)

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value.startswith("unix:"):
            if len(value) == len("unix:"):
                raise ValueError("unix: needs a path behind it")
            return value
        if not _is_host_and_port(value):
            raise ValueError("give host:port with a port of 0 to 65535, or unix:PATH")
        return value

    @field_validator("tls_client_auth")
    @classmethod
    def _client_auth(cls, value: str) -> str:
        if value == "optional":
            raise ValueError("gRPC's Python server cannot ask for a certificate and go without: use none or require")
        if value not in ("none", "require"):
            raise ValueError("use none or require")
        return value

    @field_validator("metrics_listen", "health_listen")
    @classmethod
    def _port_address(cls, value: str) -> str:
        if value and not _is_host_and_port(value):
            raise ValueError("give host:port with a port of 0 to 65535, or nothing")
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
    """Whether other machines may call, in plain text and without saying who they are."""
    host = config.listen.rpartition(":")[0].strip("[]")
    try:
        is_local = config.listen.startswith("unix:") or host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        is_local = False
    return not (is_local or config.tls_cert or config.auth_owners)


KEYS = tuple(Config.model_fields)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where each value came from: "flag", the variable's name, the file's path, or
    "default".
    """

    config: Config
    sources: Mapping[str, str]

    def as_yaml(self) -> str:
        """The configuration as a file that says the same, each line with the source of its value."""
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
        InvalidArgument: an unknown key, with the nearest known one in the remedy, a value that the key cannot have, or
        values that contradict each other.
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
    """Raise InvalidArgument for values that are possible one by one and contradict each other."""
    for is_wrong, key, what, remedy in _contradictions(config):
        if is_wrong:
            raise InvalidArgument(what, field=key, remedy=remedy)


def _contradictions(config: Config) -> Iterator[tuple[bool, str, str, str]]:
    """Whether it is so, the key to name, what is wrong, what to do."""
    for cert, key in (("tls_cert", "tls_key"), ("store_tls_cert", "store_tls_key")):
        has_cert, has_key = bool(getattr(config, cert)), bool(getattr(config, key))
        yield has_cert != has_key, key if has_cert else cert, "half a pair: it is empty", "set both, or none"
    asks = config.tls_client_auth != "none"
    remedy = "set tls_cert and tls_key"
    yield asks and not config.tls_cert, "tls_client_auth", "clients show certificates in TLS only", remedy
    remedy = "name a PEM file of authorities"
    yield asks and not config.tls_client_ca, "tls_client_ca", "nothing to check clients' certificates against", remedy
    remedy = "set it to require"
    yield bool(config.tls_client_ca) and not asks, "tls_client_auth", "tls_client_ca is set and not used", remedy
    proofs = [key for key in ("auth_tokens", "auth_jwks") if getattr(config, key)]
    what, remedy = f"{' and '.join(proofs)} without owners", "name the file that says what each owner may"
    yield bool(proofs) and not config.auth_owners, "auth_owners", what, remedy
    what, remedy = "nobody can show who it is", "set auth_tokens, auth_jwks or tls_client_auth"
    yield bool(config.auth_owners) and not proofs and not asks, "auth_owners", what, remedy
    for key in ("auth_jwt_issuer", "auth_jwt_audience"):
        has = bool(getattr(config, key))
        yield not has and bool(config.auth_jwks), key, "it is empty: any token of these keys would do", "set it"
        yield has and not config.auth_jwks, "auth_jwks", f"{key} is set and there are no keys", "name a JWKS file"
    for key in ("metrics_listen", "health_listen"):
        value = getattr(config, key)
        is_taken = value == config.listen and not value.endswith(":0")
        yield is_taken, key, f"{value} is `listen` too", "give it a port of its own"


def split_setting(text: str) -> tuple[str, str]:
    """KEY=VALUE of a command line as its two halves; raises InvalidArgument."""
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

    One that nearly names a key is refused as a slip of the pen. Others are not ours to judge: Kubernetes
    gives every pod KVPLANE_SERVICE_HOST and the like when a Service is called kvplane.
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
        raise InvalidArgument(f"{path} holds no mapping", field="--config", remedy="write lines of `key: value`")
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
        f"there is no key {what}",
        field="configuration",
        remedy=f"the nearest is {', '.join(nearest)}; `kvplane config` prints all",
    )
