"""The gRPC handlers of a servicer's methods. Only this module turns KvplaneErrors into gRPC statuses with details."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvplane.base.errors import InternalError, KvplaneError
from kvplane.rpc.status import DETAILS_KEY, encode_status, status_code
from kvplane.wire.parsing import parse
from kvplane_worker.lending.writer import ProcessName
from kvplane_worker.rpc.callers import Caller

Context: TypeAlias = grpc.ServicerContext
_log = logging.getLogger(__name__)


def service_handler(
    service: ServiceDescriptor, servicer: object, process_of: Callable[[str], ProcessName]
) -> grpc.GenericRpcHandler:
    """Return the handlers of a service.

    Args:
        service: the service.
        servicer: has a method per RPC that takes the request and a `Caller`, and returns the response.
        process_of: finds the process that calls, given what gRPC shows of it (`Callers.process_of`).
    """
    handlers = {method.name: _handler(method, getattr(servicer, method.name), process_of) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(
    method: MethodDescriptor, behaviour: Callable[[Any, Caller], Message], process_of: Callable[[str], ProcessName]
) -> Any:  # noqa: ANN401
    request_class = GetMessageClass(method.input_type)

    def call(raw: bytes, context: Context) -> bytes:
        try:
            return behaviour(parse(request_class, raw), partial(process_of, context.peer())).SerializeToString()
        except KvplaneError as error:
            _abort(error, context)
        except Exception as error:
            _log.exception("unhandled exception in %s", method.full_name)
            _abort(InternalError(f"{type(error).__name__} in {method.name}; see the log of the worker"), context)

    return grpc.unary_unary_rpc_method_handler(call)


def _abort(error: KvplaneError, context: Context) -> NoReturn:
    context.set_trailing_metadata(((DETAILS_KEY, encode_status(error).SerializeToString()),))
    context.abort(status_code(error), str(error))
    raise AssertionError("abort returned")
