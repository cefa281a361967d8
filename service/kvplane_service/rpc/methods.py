"""One wrapper around every method: bytes in, bytes out, refusals as rich status.

Handlers are built from the service's descriptor with the bytes of the request at hand: they are the
fingerprint of a call and show what a parser would hide. Every refusal becomes a status here and nowhere else;
the table is `kvplane.status`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status import rpc_status

from kvplane.base.errors import InternalError, KvplaneError, Moved
from kvplane.status import encode_status
from kvplane.wire.parsing import parse
from kvplane_service.registry import UnknownReplica

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Unary: TypeAlias = Callable[[Any, bytes], Awaitable[Message | bytes]]
FindOwner: TypeAlias = Callable[[str], Awaitable[str]]
ServerStream: TypeAlias = Callable[[Any], AsyncIterator[Message]]
Stream: TypeAlias = Callable[[Context], Awaitable[None]]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def service_handler(
    service: ServiceDescriptor, servicer: object, find_owner: FindOwner
) -> grpc.GenericRpcHandler:
    """Handlers for every method of a service; the servicer has a method of each name.

    `find_owner` is asked for the address of the service that owns a replica which this one does not know.

    A unary one gets the message and its bytes and returns the answer, as a message or as bytes; one that
    streams answers gets the message and yields messages; one that streams both ways gets the context.
    """
    handlers = {method.name: _handler(method, servicer, find_owner) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(
    method: MethodDescriptor, servicer: object, find_owner: FindOwner
) -> grpc.RpcMethodHandler[bytes, bytes]:
    behaviour = getattr(servicer, method.name)
    request_class = GetMessageClass(method.input_type)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_stream(behaviour, find_owner))
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_server_stream(behaviour, request_class, find_owner))
    return grpc.unary_unary_rpc_method_handler(_unary(behaviour, request_class, find_owner))


def _unary(
    behaviour: Unary, request_class: type[Message], find_owner: FindOwner
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def answer(raw: bytes) -> bytes:
        answer = await behaviour(parse(request_class, raw), raw)
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    async def call(raw: bytes, context: Context) -> bytes:
        return await _answered(answer(raw), context, find_owner)

    return call


def _server_stream(
    behaviour: ServerStream, request_class: type[Message], find_owner: FindOwner
) -> Callable[[bytes, Context], Awaitable[None]]:
    async def answers(raw: bytes, context: Context) -> None:
        async for answer in behaviour(parse(request_class, raw)):
            await context.write(answer.SerializeToString())

    async def call(raw: bytes, context: Context) -> None:
        await _answered(answers(raw, context), context, find_owner)

    return call


def _stream(behaviour: Stream, find_owner: FindOwner) -> Callable[[object, Context], Awaitable[None]]:
    async def call(_: object, context: Context) -> None:
        await _answered(behaviour(context), context, find_owner)

    return call


async def _answered(work: Awaitable[_T], context: Context, find_owner: FindOwner) -> _T:
    """What the work returns; a refusal ends the call with its status, a bug with INTERNAL."""
    try:
        return await work
    except UnknownReplica as error:
        await _abort(await _moved(error, find_owner), context)
    except KvplaneError as error:
        await _abort(error, context)
    except Exception as error:
        _log.exception("a bug in the service")
        name = type(error).__name__
        await _abort(InternalError(f"{name}: a bug, the log of the service says more"), context)


async def _moved(error: UnknownReplica, find_owner: FindOwner) -> KvplaneError:
    """Who else has the replica, if somebody said so."""
    address = await find_owner(error.replica)
    if not address:
        return error
    return Moved(
        f"{error.replica} is owned by the service at {address}",
        field=error.field,
        remedy="call there",
        metadata={"address": address},
    )


async def _abort(error: KvplaneError, context: Context) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(encode_status(error)))
    raise AssertionError("abort returned")
