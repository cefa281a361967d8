"""What commands share to call a service: a client with the given credentials, errors that mention options, and the
equivalent grpcurl command.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvplane.base.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    KvplaneError,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from kvplane_tools.cli.options import DEFAULT_SERVICE, SERVICE_VARIABLE, TOKEN_VARIABLE, given

if TYPE_CHECKING:
    from kvplane import Client
    from kvplane.unary import calls as calls
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaSummary
else:

    class _Imported:
        def __getattr__(self, name: str) -> object:
            return getattr(importlib.import_module("kvplane.unary.calls"), name)

    calls = _Imported()  # when a command needs it, not for the help


@contextmanager
def client_of(with_retries: bool = False) -> Iterator[Client]:
    """Yield a client of the given service. By default it retries a failed call once, without a pause, so that the
    operator sees the failure soon.
    """
    from kvplane.blocking.client import connect
    from kvplane.sansio.retry import RetryPolicy
    from kvplane.unary.retrying import TIMEOUT_S

    access, retry = given().access(), RetryPolicy() if with_retries else RetryPolicy(attempts=1)
    timeout_s = given().request_timeout or TIMEOUT_S
    with (
        remedies(),
        connect(given().address, tls=access.tls, token=access.token, timeout_s=timeout_s, retry=retry) as one,
    ):
        try:
            yield one
        except NotFound as error:
            error.remedy = _nearest(one, error) or error.remedy
            raise


def _nearest(client: Client, error: NotFound) -> str:
    """Return the replica that an unknown name may mean, as a remedy; "" if no name is similar."""
    wrong = re.search(r"no replica '([^']+)'", error.message)
    if wrong is None:
        return ""
    with suppress(KvplaneError):
        near = get_close_matches(wrong[1], [one.replica for one in client.list_replicas()], n=1)
        return "".join(f"did you mean {name}? `kvplane replicas` lists all" for name in near)
    return ""


@contextmanager
def remedies(address: str = "--service", variable: str = SERVICE_VARIABLE) -> Iterator[None]:
    """Add a remedy to an error of a call that names none, in the options of the command line; `address` and `variable`
    name the option and the environment variable of what is called.
    """
    try:
        yield
    except DeadlineExceeded as error:
        error.remedy = "give more time by --request-timeout, such as 60s"
        raise
    except Unauthenticated as error:
        error.remedy = f"give --token-file, or set {TOKEN_VARIABLE}; `kvplane token` makes one"
        raise
    except Unavailable as error:
        error.remedy = error.remedy or _how_to_reach(error.message, address, variable)
        raise
    except InternalError as error:
        if error.metadata.get("code") != "UNIMPLEMENTED":
            raise
        what = "what answers there does not have this call: it may be a router, or an older kvplane"
        remedy = f"name the address of a service by --service ({DEFAULT_SERVICE}), of a router by --router"
        raise FailedPrecondition(what, field=address, remedy=remedy) from None


_IS_OTHER_PROTOCOL = ("Socket closed", "recvmsg", "Connection reset", "FRAME_SIZE_ERROR", "wrong version number")


def _how_to_reach(message: str, address: str, variable: str) -> str:
    if "CERTIFICATE" in message.upper() or "handshake" in message.lower():
        return "check --tls-ca and --tls-server-name; leave them out if the service has no TLS"
    if any(text in message for text in _IS_OTHER_PROTOCOL) and given().access().tls is None:
        return f"the service may expect TLS: give --tls-ca; or check that it runs at {address}"
    return f"check that it runs, or name its address by {address} or {variable}"


def described(client: Client, replicas: Iterable[ReplicaSummary]) -> Iterator[DescribeReplicaResponse]:
    """Yield the description of each replica; a replica that was deregistered since it was listed is skipped."""
    for one in replicas:
        with suppress(NotFound):
            yield client.describe_replica(one.replica)


def print_call(grpcurl: bool, call: calls.Call[Any]) -> None:
    """With `grpcurl`, print the grpcurl command line that makes the call at the given service, and end the command."""
    if not grpcurl:
        return
    from google.protobuf.json_format import MessageToDict

    from kvplane.sansio.owners import Addresses

    body = json.dumps(MessageToDict(call.request, preserving_proto_field_name=True))
    service = Addresses(given().address).services[0]
    target = f"-unix {service.removeprefix('unix:')}" if service.startswith("unix:") else service
    print(f"grpcurl {_grpcurl_access()} -d {shlex.quote(body)} {target} {call.path.lstrip('/')}")
    raise typer.Exit


def _grpcurl_access() -> str:
    """Return the flags of grpcurl for TLS and the token. They name the token's file or variable, never the token
    itself.
    """
    access = given().access()
    flags = ["-plaintext"]
    if access.tls is not None:
        named = {"-cacert": access.tls.ca, "-cert": access.tls.cert, "-key": access.tls.key}
        flags = [f"{flag} {shlex.quote(value)}" for flag, value in named.items() if value]
    if access.token:
        source = f"$(cat {shlex.quote(str(access.token))})" if isinstance(access.token, Path) else f"${TOKEN_VARIABLE}"
        flags.append(f'-H "authorization: Bearer {source}"')
    return " ".join(flags)
