"""The options that several commands have, each with one meaning.

Where the service is and how it is called may stand before and after a command: `root_command` has these options, and
`connection_options` gives them to a command. Sizes and durations have units.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import SavePolicy
from kvplane.base.units import parse_bytes, parse_duration
from kvplane.rpc.access import Access, Tls

if TYPE_CHECKING:
    from kvplane_service.config_loading import Loaded

# Exit codes: 0 done, 1 failed, 2 wrong use, 3 service or address unavailable, 130 after Ctrl-C.
FAILED, WRONG_USE, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 130

DEFAULT_SERVICE = "127.0.0.1:7070"
SERVICE_VARIABLE = "KVPLANE_SERVICE"
CA_VARIABLE = "KVPLANE_TLS_CA"
TOKEN_VARIABLE = "KVPLANE_TOKEN"
SYSTEM = "system"
POOL_BLOCKS = 65_536  # of a replay or a benchmark by default

# Names of earlier versions, read but not documented. They go with the next minor version.
_OLD_SERVICE_VARIABLE = "KVPLANE_ADDRESS"
_OLD_CA_VARIABLE = "KVPLANE_CA_FILE"


@dataclass(slots=True)
class Given:
    """What the connection options state, before the command or after it, which has precedence.

    Attributes:
        service: address of the service; "" = none is given.
        request_timeout: deadline of a call, in seconds; None = that of the command.
    """

    service: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: Path | str | None = None
    request_timeout: float | None = None

    @property
    def address(self) -> str:
        """The service, or the default one."""
        return self.service or DEFAULT_SERVICE

    def access(self) -> Access:
        """Return the credentials. Raises InvalidArgument for a certificate, key or server name without --tls-ca."""
        if not self.tls_ca and (self.tls_cert or self.tls_key or self.tls_server_name):
            raise InvalidArgument(
                "it is empty, although another --tls option is set",
                field="--tls-ca",
                remedy=f"name a PEM file of certificate authorities, or `{SYSTEM}`",
            )
        authorities = "" if self.tls_ca == SYSTEM else self.tls_ca
        tls = Tls(authorities, self.tls_cert, self.tls_key, self.tls_server_name) if self.tls_ca else None
        return Access(tls, Path(self.token_file) if self.token_file else os.environ.get(TOKEN_VARIABLE, ""))


_GIVEN: ContextVar[Given | None] = ContextVar("given", default=None)


def given() -> Given:
    """Return what the connection options of this command line state."""
    return _GIVEN.get() or Given()


def _note(context: typer.Context, param: typer.CallbackParam, value: Any) -> None:  # noqa: ANN401
    """Note the value of a connection option: those of the root are parsed first, and also its environment."""
    root = context.find_root()
    if root.obj is None:
        root.obj = Given()  # read by kvplane_worker.cli
        _GIVEN.set(root.obj)
    if value:
        setattr(root.obj, str(param.name), value)


def connection_options(root: Any, left_out: Iterable[str] = ()) -> Iterator[Any]:  # noqa: ANN401 - click's or typer's
    """Yield the connection options of the root as options of a command. The help of a command does not repeat them."""
    for option in root.params:
        if option.name in Given.__slots__ and option.name not in left_out:
            own = copy.copy(option)
            own.envvar, own.default, own.hidden = None, None, True
            yield own


class Format(StrEnum):
    """The formats in which a command prints an answer. WIDE is a table with more columns, NAME is only names, one on
    each line.
    """

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"
    JSONPATH = "jsonpath"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a command prints an answer: the format, and the path of `jsonpath`."""

    format: Format
    path: str = ""


TABLE = Shape(Format.TABLE)


def parse_shape(given: str | Shape) -> Shape:
    """Parse the option --output. Raises InvalidArgument."""
    if isinstance(given, Shape):
        return given
    name, _, path = given.partition("=")
    if name not in list(Format) or (name == Format.JSONPATH) != bool(path):
        raise InvalidArgument(f"{given!r} is not an output format", field="--output", remedy=f"use one of {_FORMATS}")
    return Shape(Format(name), path)


_FORMATS = "table, wide, name, json, yaml, jsonpath=PATH"


def _complete_replica(incomplete: str) -> list[str]:
    """Return the names of replicas for shell completion, or nothing if the service does not answer within a second."""
    from kvplane.base.errors import KvplaneError
    from kvplane.blocking.client import connect

    try:
        access = given().access()
        with connect(given().address, tls=access.tls, token=access.token, timeout_s=1.0) as client:
            return [one.replica for one in client.list_replicas() if one.replica.startswith(incomplete)]
    except KvplaneError:
        return []


def _length(least: float, most: float, unit: str, text: str | float) -> float:
    try:
        length = parse_duration(str(text), "", unit)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    if not least <= length <= most:
        raise typer.BadParameter(f"{text} is not from {least:g}{unit} to {most:g}{unit}")
    return length


def _num_bytes(text: str) -> int:
    try:
        return parse_bytes(text, "")
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def duration(name: str, *more: str, text: str, least: float = 0.0, most: float = 86_400.0, unit: str = "s") -> Any:  # noqa: ANN401
    """Return an option that is a duration such as 10s; its value, and a number without a unit, is in `unit`."""
    parse = partial(_length, least, most, unit)
    return typer.Option(name, *more, parser=parse, metavar="DURATION", help=text)


def size_of(name: str, text: str) -> Any:  # noqa: ANN401
    """Return an option that is a size such as 8GiB."""
    return typer.Option(name, parser=_num_bytes, metavar="SIZE", show_default=False, help=text)


Output: TypeAlias = Annotated[
    Shape,
    typer.Option(
        "-o", "--output", parser=parse_shape, metavar="FORMAT", show_default=False,
        help=f"{_FORMATS} (such as replicas[*].replica). wide and name: where there are more columns, or names.",
    ),
]  # fmt: skip
Watch: TypeAlias = Annotated[
    float | None, duration("--watch", "-w", least=0.1, text="Repeat at this interval, such as 2s, until Ctrl-C.")
]
Grpcurl: TypeAlias = Annotated[bool, typer.Option("--grpcurl", help="Print the equivalent grpcurl command and exit.")]
Replica: TypeAlias = Annotated[str, typer.Argument(autocompletion=_complete_replica, help="Name of the replica.")]
Wait: TypeAlias = Annotated[
    bool, typer.Option("--wait", help="Wait until it is possible and done: for a service, a step, an exit.")
]
Decisions: TypeAlias = Annotated[
    int | None,
    typer.Option("--decisions", min=1, help="Stop after this number. Default: at Ctrl-C, or when the replica ends."),
]
Limit: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Most requests that are listed or replayed.")]
Log: TypeAlias = Annotated[
    bool, typer.Option("--log", help="It is a recording of decisions (kvplane record), which needs no service.")
]
RequestName: TypeAlias = Annotated[str, typer.Option("--request", help="Name of a request of the replica.")]
ModelName: TypeAlias = Annotated[
    str, typer.Option("--model", help="Name of a model: one of `kvplane models`, or of a fleet.")
]
Ranks: TypeAlias = Annotated[int, typer.Option("--tensor-parallel", min=1, help="Tensor-parallel ranks of a replica.")]
PoolBlocks: TypeAlias = Annotated[
    int | None,
    typer.Option("--pool-blocks", min=2, help="Blocks of each pool. Default: of a recording its own, else 65,536."),
]
Once: TypeAlias = Annotated[bool, typer.Option("--once", help="Exit after the first table, or the last one of a demo.")]
Plot: TypeAlias = Annotated[Path | None, typer.Option("--plot", help="Also plot to this .png, .svg or .pdf file.")]
Svg: TypeAlias = Annotated[Path | None, typer.Option("--svg", hidden=True, help="Write a picture and exit.")]
_SAVE = "When blocks are copied to the {}: behind (before eviction), through (when computed), reuse (second use)."
_SIZE = "Size of the {}, such as 256GiB. A worker: at most; default: what is free."
HostSize: TypeAlias = Annotated[int | None, size_of("--host-size", _SIZE.format("host tier of one rank"))]
DiskSize: TypeAlias = Annotated[int | None, size_of("--disk-size", _SIZE.format("disk tier of one rank"))]
HostSave: TypeAlias = Annotated[SavePolicy, typer.Option("--host-save", help=_SAVE.format("host tier"))]
DiskSave: TypeAlias = Annotated[SavePolicy, typer.Option("--disk-save", help=_SAVE.format("disk tier"))]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVPLANE_CONFIG", help="YAML configuration file with lines `key: value`."),
]
Listen: TypeAlias = Annotated[
    str | None, typer.Option("--listen", help="Listen address: host:port (port 0 = a free port) or unix:PATH.")
]
Metrics: TypeAlias = Annotated[
    str | None, typer.Option("--metrics", help="host:port of the HTTP endpoint for Prometheus and the status page.")
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of `kvplane config`. May be repeated."),
]


def version_text() -> str:
    """Return the line that `--version` and `kvplane version` print."""
    from importlib.metadata import version

    return f"kvplane {version('kvplane')}\n"


def _print_version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(version_text())
        raise typer.Exit


def _connection(*names: str, **settings: Any) -> Any:  # noqa: ANN401
    return typer.Option(*names, callback=_note, expose_value=False, **settings)


def root_command(
    service: Annotated[
        str,
        _connection(
            "--service", envvar=[SERVICE_VARIABLE, _OLD_SERVICE_VARIABLE], show_envvar=False,
            help="Address of the service: host:port or unix:PATH; several by commas, then `*.SUFFIX` for hosts to "
            f"which they may redirect. Default: {DEFAULT_SERVICE}. (env: {SERVICE_VARIABLE})",
        ),
    ] = "",
    tls_ca: Annotated[
        str,
        _connection(
            "--tls-ca", envvar=[CA_VARIABLE, _OLD_CA_VARIABLE], show_envvar=False,
            help=f"Use TLS: PEM file of the trusted authorities, or `{SYSTEM}`. (env: {CA_VARIABLE})",
        ),
    ] = "",
    tls_cert: Annotated[
        str, _connection("--tls-cert", envvar="KVPLANE_CERT_FILE", help="PEM file of the client certificate.")
    ] = "",
    tls_key: Annotated[
        str, _connection("--tls-key", envvar="KVPLANE_KEY_FILE", help="PEM file of the certificate's private key.")
    ] = "",
    tls_server_name: Annotated[
        str, _connection("--tls-server-name", help="Host name expected in the service's certificate.")
    ] = "",
    token_file: Annotated[
        Path | None,
        _connection(
            "--token-file", envvar="KVPLANE_TOKEN_FILE", help=f"File with the bearer token. Default: ${TOKEN_VARIABLE}."
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        _connection(
            "--request-timeout", parser=partial(_length, 0.001, 86_400.0, "s"), metavar="DURATION",
            help="Deadline of each call, such as 30s. Default: 10s.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:  # fmt: skip
    """Declare the options of all commands; `given` has their values."""


def load_config(
    file: Path | None, listen: str | None, settings: list[str] | None, metrics: str | None = None
) -> Loaded:
    """Return the configuration; a flag has precedence over the environment, then the file, then the default. Raises
    InvalidArgument or NotFound as `config_loading.load`.
    """
    from kvplane_service import config_loading
    from kvplane_service.runtime.memory import available_memory

    flags = dict(config_loading.split_setting(text) for text in settings or ())
    flags |= {name: text for name, text in (("listen", listen), ("metrics_listen", metrics)) if text is not None}
    return config_loading.load(flags, os.environ, file, available_memory)
