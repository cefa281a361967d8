"""What commands share to call a service: a client with the given credentials, errors that mention `--service`, and the
equivalent grpcurl command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import NotFound, Unavailable
from kvplane_tools.cli.options import SERVICE_VARIABLE, TOKEN_VARIABLE, given_access

if TYPE_CHECKING:
    from kvplane import Client
    from kvplane.unary.calls import Call
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaSummary


@contextmanager
def client_of(service: str, with_retries: bool = False) -> Iterator[Client]:
    """Yield a client of the service. By default it retries a failed call once, without a pause, so that the operator
    sees the failure soon.
    """
    from kvplane.blocking.client import connect
    from kvplane.sansio.retry import RetryPolicy

    access, retry = given_access(), RetryPolicy() if with_retries else RetryPolicy(attempts=1)
    with address_remedy(), connect(service, tls=access.tls, token=access.token, retry=retry) as client:
        yield client


@contextmanager
def address_remedy() -> Iterator[None]:
    """Add a remedy to an Unavailable error that has none: how to name another address of the service."""
    try:
        yield
    except Unavailable as error:
        error.remedy = error.remedy or f"check that it runs, or name its address by --service or {SERVICE_VARIABLE}"
        raise


def described(client: Client, replicas: Iterable[ReplicaSummary]) -> Iterator[DescribeReplicaResponse]:
    """Yield the description of each replica; a replica that was deregistered since it was listed is skipped."""
    for one in replicas:
        with suppress(NotFound):
            yield client.describe_replica(one.replica)


def grpcurl_line(service: str, call: Call[Any]) -> str:
    """Return the grpcurl command line that makes the given call at the service."""
    from google.protobuf.json_format import MessageToDict

    from kvplane.sansio.owners import Addresses

    body = json.dumps(MessageToDict(call.request, preserving_proto_field_name=True))
    service = Addresses(service).services[0]
    target = f"-unix {service.removeprefix('unix:')}" if service.startswith("unix:") else service
    return f"grpcurl {_grpcurl_access()} -d {shlex.quote(body)} {target} {call.path.lstrip('/')}"


def _grpcurl_access() -> str:
    """Return the flags of grpcurl for TLS and the token. They name the token's file or variable, never the token
    itself.
    """
    access = given_access()
    flags = ["-plaintext"]
    if access.tls is not None:
        named = {"-cacert": access.tls.ca, "-cert": access.tls.cert, "-key": access.tls.key}
        flags = [f"{flag} {shlex.quote(value)}" for flag, value in named.items() if value]
    if access.token:
        source = f"$(cat {shlex.quote(str(access.token))})" if isinstance(access.token, Path) else f"${TOKEN_VARIABLE}"
        flags.append(f'-H "authorization: Bearer {source}"')
    return " ".join(flags)
