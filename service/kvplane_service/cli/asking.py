"""What commands that ask a running service share: where it is, how to show the answer, the equivalent grpcurl call."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kvplane_service.cli.access import TOKEN_VARIABLE, given_access

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvplane import Client
    from kvplane.calls import Call
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaSummary

DEFAULT_SERVICE = "127.0.0.1:7070"


class Form(StrEnum):
    """How an answer is shown."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def _complete_replica(context: typer.Context, incomplete: str) -> list[str]:
    """Names of replicas for the shell; none when the service does not answer at once."""
    from kvplane import KvplaneError, connect

    try:
        address, access = context.params.get("service") or DEFAULT_SERVICE, given_access()
        with connect(address, tls=access.tls, token=access.token, timeout_s=1.0) as client:
            return [one.replica for one in client.list_replicas() if one.replica.startswith(incomplete)]
    except KvplaneError:
        return []


Service: TypeAlias = Annotated[
    str, typer.Option("--service", envvar="KVPLANE_ADDRESS", help="Address of the service: host:port or unix:PATH.")
]
Output: TypeAlias = Annotated[Form, typer.Option("-o", "--output", help="How the answer is shown.")]
Grpcurl: TypeAlias = Annotated[
    bool, typer.Option("--grpcurl", help="Print the equivalent grpcurl call in place of doing it.")
]
Replica: TypeAlias = Annotated[str, typer.Argument(autocompletion=_complete_replica, help="Name of the replica.")]


@contextmanager
def client_of(service: str, is_patient: bool = False) -> Iterator[Client]:
    """A client that does not try again, unless it is patient: who waits at a terminal wants to know."""
    from kvplane import connect
    from kvplane.retry import RetryPolicy

    access, retry = given_access(), RetryPolicy() if is_patient else RetryPolicy(attempts=1)
    with naming_the_service(), connect(service, tls=access.tls, token=access.token, retry=retry) as client:
        yield client


@contextmanager
def naming_the_service() -> Iterator[None]:
    """Whoever finds no service is told how to name one."""
    from kvplane import Unavailable

    try:
        yield
    except Unavailable as error:
        error.remedy = error.remedy or "is it running there? --service or KVPLANE_ADDRESS names another address"
        raise


def described(client: Client, replicas: Iterable[ReplicaSummary]) -> Iterator[DescribeReplicaResponse]:
    """Each replica in full; who was deregistered meanwhile is passed over."""
    from kvplane import NotFound

    for one in replicas:
        with suppress(NotFound):
            yield client.describe_replica(one.replica)


def grpcurl_line(service: str, call: Call[Any]) -> str:
    """The command that makes the same call."""
    from google.protobuf.json_format import MessageToDict

    body = json.dumps(MessageToDict(call.request, preserving_proto_field_name=True))
    target = f"-unix {service.removeprefix('unix:')}" if service.startswith("unix:") else service
    return f"grpcurl {_grpcurl_access()} -d {shlex.quote(body)} {target} {call.path.lstrip('/')}"


def _grpcurl_access() -> str:
    """Flags of grpcurl for TLS and token; the token stays in its file or variable."""
    access = given_access()
    flags = ["-plaintext"]
    if access.tls is not None:
        named = {"-cacert": access.tls.ca, "-cert": access.tls.cert, "-key": access.tls.key}
        flags = [f"{flag} {shlex.quote(value)}" for flag, value in named.items() if value]
    if access.token:
        source = f"$(cat {shlex.quote(str(access.token))})" if isinstance(access.token, Path) else f"${TOKEN_VARIABLE}"
        flags.append(f'-H "authorization: Bearer {source}"')
    return " ".join(flags)


def show(answer: Message, form: Form, table: Callable[[], str]) -> None:
    """Print an answer; `table` makes the text for people."""
    print(table() if form is Form.TABLE else text_of(answer, form))


def text_of(answer: Message, form: Form) -> str:
    """The whole message as JSON or YAML."""
    from google.protobuf.json_format import MessageToDict

    told = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return plain_text(_in_order(told, answer.DESCRIPTOR), form)


def _in_order(told: Any, kind: Any) -> Any:  # noqa: ANN401 - JSON, and a descriptor of either implementation
    """The fields as the contract lists them: protobuf puts the empty ones last."""
    if isinstance(told, list):
        return [_in_order(one, kind) for one in told]
    if kind is None or kind.GetOptions().map_entry:
        return told
    return {field.name: _in_order(told[field.name], field.message_type) for field in kind.fields if field.name in told}


def plain_text(value: object, form: Form) -> str:
    """Plain data as JSON or YAML."""
    if form is Form.JSON:
        return json.dumps(value, indent=2)
    import yaml

    return yaml.safe_dump(value, sort_keys=False).rstrip()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text; the first one is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def word(enum_name: str, prefix: str) -> str:
    """REPLICA_STATE_LIVE -> live."""
    return enum_name.removeprefix(prefix).lower()


def by_reason(counts: Mapping[str, int]) -> str:
    """Like "12 evicted, 3 out of blocks"; "none" when nothing was counted."""
    told = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(counts.items()) if count)
    return ", ".join(told) or "none"


def age(milliseconds: int) -> str:
    """Like "3.2 s" or "2 h 5 min"."""
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
