"""The gRPC handlers of a servicer's methods. Only this module turns KvplaneErrors into gRPC statuses with details."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvplane.base.errors import InternalError, KvplaneError
from kvplane.rpc.status import DETAILS_KEY, encode_status, status_code
from kvplane.wire.parsing import parse

Context: TypeAlias = grpc.ServicerContext
_log = logging.getLogger(__name__)


def service_handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Return the handlers of a service. `servicer` has a method per RPC that takes the request and returns the
    response.
    """
    handlers = {method.name: _handler(method, getattr(servicer, method.name)) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(method: MethodDescriptor, behaviour: Callable[[Any], Message]) -> Any:  # noqa: ANN401
    request_class = GetMessageClass(method.input_type)

    def call(raw: bytes, context: Context) -> bytes:
        try:
            return behaviour(parse(request_class, raw)).SerializeToString()
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
