"""The wrapper around every gRPC method: it takes and returns bytes, and turns errors into a status.

Handlers are built from the descriptor of a gRPC service. Every method is served as a stream of requests, since gRPC
reads the request of a unary handler before it calls the handler: here the gate first admits the call by its headers,
so that gRPC buffers nothing of a client that is refused. Handlers get the bytes of the request, which are hashed to
recognize retries and checked for values that a parser would truncate. A long request of a unary method is parsed on a
thread. Errors become a status only here, by the table `kvplane.rpc.status`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status import rpc_status

from kvplane.base.errors import DeadlineExceeded, InternalError, InvalidArgument, KvplaneError
from kvplane.rpc.status import encode_status
from kvplane.wire.parsing import parse, parse_long
from kvplane_service.auth.gate import CALL, Gate, Incoming
from kvplane_service.auth.identity import Proof
from kvplane_service.registry import UnknownReplica
from kvplane_service.rpc import prices
from kvplane_service.runtime.executors import Executor, Offload

LONG_MESSAGE_BYTES = 64 << 10  # a message of this size takes about a millisecond to parse
_MAX_WAITING = 64  # long requests that may wait for the parser; each keeps its bytes in memory
MESSAGE_TIMEOUT_S = 10.0  # for the request of a call, and the first message of a session, to arrive

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Unary: TypeAlias = Callable[[Any, bytes], Awaitable[Message | bytes]]
EnsureLocal: TypeAlias = Callable[[str], Awaitable[None]]
ServerStream: TypeAlias = Callable[[Any], AsyncGenerator[Message | bytes]]
Stream: TypeAlias = Callable[[Context], Awaitable[None]]
ServedStream: TypeAlias = Callable[[object, Context], Awaitable[None]]

_T = TypeVar("_T")
Work: TypeAlias = Callable[[], Awaitable[_T]]
_Answered: TypeAlias = Callable[..., Awaitable[Any]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallHooks:
    """What is called around every method.

    Attributes:
        ensure_local: lets this process adopt a replica that is not registered here; raises Moved if a live service owns
            it.
        gate: authenticates and authorizes calls; None without authentication.
        offload: runs the parser of long requests on a thread.
    """

    ensure_local: EnsureLocal
    gate: Gate | None = None
    offload: Offload = field(default_factory=lambda: Executor("parsing of long requests", max_waiting=_MAX_WAITING))


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """A unary method: how it is served, and its messages."""

    behaviour: Unary
    request_class: type[Message]
    answer_class: type[Message]

    async def answer(self, hooks: CallHooks, raw: bytes) -> bytes:
        """Return the encoded answer to an encoded request, whose reserved price the call has paid."""
        if len(raw) > LONG_MESSAGE_BYTES:
            request = await hooks.offload(partial(parse_long, self.request_class, raw))
        else:
            request = parse(self.request_class, raw)
        CALL.get().count(prices.price_of(request, len(raw)) - prices.reserve(len(raw)))
        answer = await self.behaviour(request, raw)
        encoded = answer if isinstance(answer, bytes) else answer.SerializeToString()
        CALL.get().count(len(encoded))
        return encoded


def unary_methods(service: ServiceDescriptor, servicer: object) -> dict[str, UnaryMethod]:
    """Return the unary methods of a gRPC service by full name."""
    return {
        f"{service.full_name}/{method.name}": _unary_method(method, servicer)
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }


def _unary_method(method: MethodDescriptor, servicer: object) -> UnaryMethod:
    classes = (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
    return UnaryMethod(getattr(servicer, method.name), *classes)


def service_handler(
    service: ServiceDescriptor, servicer: object, hooks: CallHooks, name: str = ""
) -> grpc.GenericRpcHandler:
    """Return the handlers of all methods of a gRPC service; the servicer has a method with the name of each.

    A unary method gets the message and its bytes, and returns the answer as a message or as bytes. A server-streaming
    method gets the message and yields such answers. A bidirectional method gets the context. `name` is that under which
    it is served, if another project's protocol has it.
    """
    name = name or service.full_name
    handlers = {method.name: _handler(name, method, servicer, hooks) for method in service.methods}
    return grpc.method_handlers_generic_handler(name, handlers)


def _handler(
    service: str, method: MethodDescriptor, servicer: object, hooks: CallHooks
) -> grpc.RpcMethodHandler[bytes, bytes]:
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(stream_method(service, method, servicer, hooks))
    behaviour = getattr(servicer, method.name)
    request_class = GetMessageClass(method.input_type)
    answered = partial(_answered, f"{service}/{method.name}", hooks.gate)
    if method.server_streaming:
        serve = _server_stream(behaviour, request_class, hooks.ensure_local, answered)
        return grpc.stream_stream_rpc_method_handler(serve)
    return grpc.stream_unary_rpc_method_handler(_unary(_unary_method(method, servicer), hooks, answered))


def _unary(method: UnaryMethod, hooks: CallHooks, answered: _Answered) -> Callable[[object, Context], Awaitable[bytes]]:
    async def work(context: Context) -> bytes:
        raw = await _request(context)
        return await with_replica(hooks.ensure_local, partial(method.answer, hooks, raw))

    async def call(_: object, context: Context) -> bytes:
        given: bytes = await answered(context, partial(work, context))
        return given

    return call


def _server_stream(
    behaviour: ServerStream, request_class: type[Message], ensure_local: EnsureLocal, answered: _Answered
) -> Callable[[object, Context], Awaitable[None]]:
    async def send(raw: bytes, context: Context) -> None:
        async with aclosing(behaviour(parse(request_class, raw))) as answers:
            async for answer in answers:
                await context.write(answer if isinstance(answer, bytes) else answer.SerializeToString())

    async def work(context: Context) -> None:
        raw = await _request(context)
        await with_replica(ensure_local, partial(send, raw, context))

    async def call(_: object, context: Context) -> None:
        await answered(context, partial(work, context))

    return call


async def timed(offload: Offload, work: Callable[[], _T]) -> _T:
    """Run `work`, whose cost its request does not show, on a thread, and count the time that it takes there."""
    took_ns = 0

    def timing() -> _T:
        nonlocal took_ns
        begun_ns = time.thread_time_ns()
        try:
            return work()
        finally:
            took_ns = time.thread_time_ns() - begun_ns

    try:
        return await offload(timing)
    finally:
        CALL.get().count(took_ns // prices.BYTE_NS)


async def _request(context: Context) -> bytes:
    """Return the request of a call that has one, and count the most that it can cost (`prices.reserve`). Raises
    InvalidArgument if the client sent none, QuotaExceeded if its owner has used up its bytes, and as `first_message`.
    """
    call = CALL.get()
    async with call.reading():
        call.pay(0)  # refused unread
        raw = await first_message(context)
        if raw is None:
            raise InvalidArgument("the call has no request", remedy="send one message")
        call.pay(prices.reserve(len(raw)))
        return raw


async def first_message(context: Context) -> bytes | None:
    """Return the first message of a call; None if it has none. Raises DeadlineExceeded after MESSAGE_TIMEOUT_S seconds,
    because a silent or slow call takes memory.
    """
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            return await next_message(context)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the first message did not arrive within {MESSAGE_TIMEOUT_S:g} s",
            remedy="send it as soon as the call begins; send large contents as hashes",
        ) from None


async def next_message(context: Context) -> bytes | None:
    """Return the next message of a call, or None at the end (for which gRPC returns EOF, an object that its types
    omit).
    """
    raw = cast(object, await context.read())
    return raw if isinstance(raw, bytes) else None


def stream_method(service: str, method: MethodDescriptor, servicer: object, hooks: CallHooks) -> ServedStream:
    """Return what serves a bidirectional method of the service of this full name, by the context of any transport."""
    behaviour: Stream = getattr(servicer, method.name)

    async def call(_: object, context: Context) -> None:
        await _answered(f"{service}/{method.name}", hooks.gate, context, partial(behaviour, context))

    return call


async def _answered(method: str, gate: Gate | None, context: Context, work: Work[_T]) -> _T:
    """Return the result of the work. A KvplaneError ends the call with the status of the error, another exception with
    INTERNAL.
    """
    try:
        return await (work() if gate is None else _let_in(gate, method, context, work))
    except KvplaneError as error:
        # A replica that was removed keeps its error, which must not keep the frames of the call.
        error.__traceback__ = error.__context__ = None
        await _abort(error, context)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # a write failed: the client has gone, which gRPC had not reported yet
    except Exception as error:
        _log.exception("unhandled exception in %s", method)
        name = type(error).__name__
        remedy = "report this bug, with the log of the service"
        await _abort(InternalError(f"the service raised an unexpected {name}", remedy=remedy), context)


async def _let_in(gate: Gate, method: str, context: Context, work: Work[_T]) -> _T:
    """Run the work if the gate admits the call. If the gate ends the call later, raise the gate's reason."""
    proof = Proof.of(context.invocation_metadata() or (), context.auth_context())
    call = None
    try:
        with gate.passing(Incoming(method, context.peer(), proof)) as call:
            return await work()
    except asyncio.CancelledError:
        if call is None or call.ended is None:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        raise call.ended from None


async def with_replica(ensure_local: EnsureLocal, work: Work[_T]) -> _T:
    """Return the result of the work. If the work raises UnknownReplica, let this process adopt the replica, and run the
    work once more.
    """
    try:
        return await work()
    except UnknownReplica as error:
        field, name = error.field, error.replica
    try:
        await ensure_local(name)
    except KvplaneError as error:
        error.field = field
        raise
    return await work()


async def _abort(error: KvplaneError, context: Context) -> NoReturn:
    try:
        await context.abort_with_status(rpc_status.to_status(encode_status(error)))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # the client has cancelled the call; gRPC would log every such error
    raise AssertionError("abort returned")
