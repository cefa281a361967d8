"""Create server spans for unary calls, by OpenTelemetry's conventions for RPC (1.4x).

Sampling is decided before the tracing library is called, so untraced calls cost nothing. Streams have no span, because
they last for hours; the steps on them have (`kvplane_service.telemetry.tracing`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from opentelemetry.trace import SpanKind, Status, StatusCode

from kvplane.base.trace import TraceContext
from kvplane_service.replicas.trace_context import CURRENT, UNTRACED
from kvplane_service.rpc.methods import Context
from kvplane_service.telemetry.tracing import Tracing, context_of

Unary = Callable[[object, Context], Awaitable[bytes]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

# Status codes that OpenTelemetry's conventions consider errors of the server.
_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Creates a span around each sampled unary call; the span of the call's step is its child."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        """Wrap the handler of a unary call (see grpc.aio.ServerInterceptor)."""
        handler = await continuation(details)
        if handler is None or handler.stream_unary is None:
            return handler
        given = next((value for key, value in details.invocation_metadata if key == "traceparent"), "")
        traceparent = given if isinstance(given, str) else ""
        call = handler.stream_unary
        is_traced = self._tracing.sampling.takes(traceparent)
        call = self._traced(call, details.method, traceparent) if is_traced else _untraced(call)
        return grpc.stream_unary_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    def _traced(self, call: Unary, method: str, traceparent: str) -> Unary:
        async def traced(requests: object, context: Context) -> bytes:
            name = method.lstrip("/")
            span = self._tracing.tracer.start_span(
                name,
                context=context_of(traceparent),
                kind=SpanKind.SERVER,
                attributes={"rpc.system.name": "grpc", "rpc.method": name},
            )
            here = span.get_span_context()
            token = CURRENT.set(str(TraceContext(here.trace_id, here.span_id, int(here.trace_flags))))
            try:
                return await call(requests, context)
            finally:
                CURRENT.reset(token)
                code = _code_of(context)
                span.set_attribute("rpc.response.status_code", code)
                if code in _FAULTS:
                    span.set_attribute("error.type", code)
                    span.set_status(Status(StatusCode.ERROR))
                span.end()

        return traced


def _untraced(call: Unary) -> Unary:
    async def untraced(requests: object, context: Context) -> bytes:
        token = CURRENT.set(UNTRACED)
        try:
            return await call(requests, context)
        finally:
            CURRENT.reset(token)

    return untraced


def _code_of(context: Context) -> str:
    """Return the name of the call's status. In contrast to its type hints, grpc.aio returns a number, which is 0 until
    a status is set.
    """
    code = cast(object, context.code())
    return next((one.name for one in grpc.StatusCode if code in (one, one.value[0])), "OK")
