"""The gRPC server of a worker: kvplane.v1.Worker on the worker's Unix socket, with gRPC health for probes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kvplane.base.errors import InternalError, KvplaneError
from kvplane.rpc.status import DETAILS_KEY, encode_status, status_code
from kvplane.v1 import worker_pb2 as pb
from kvplane.wire.parsing import parse
from kvplane_worker.lending.rundir import GRPC_SOCKET, SOCKET
from kvplane_worker.lending.writer import ProcessName
from kvplane_worker.memory import use_device
from kvplane_worker.rpc.callers import Caller, Callers
from kvplane_worker.rpc.servicer import MAX_THREADS, WorkerServicer

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


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # a library without types
    """Answers Health.Check with one status for all names.

    The servicer holds no lock and does not serve Health.Watch, so no client can delay a change of the status. (The
    servicer of grpcio-health-checking sends under a lock that its `set` and its `Check` wait for.)

    Attributes:
        is_serving: the status; the worker sets it.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.is_serving = False

    def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802
        """Return the status of a service. The call ends with NOT_FOUND if the name is unknown."""
        if request.service not in self._names:
            context.abort(grpc.StatusCode.NOT_FOUND, "")
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING
        )

    def Watch(self, request: HealthCheckRequest, context: Context) -> NoReturn:  # noqa: N802
        """Refuse with UNIMPLEMENTED, as the protocol allows: each watch would hold a thread of the server."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "call Health.Check: a worker does not serve Health.Watch")
        raise AssertionError("abort returned")


MAX_MESSAGE_BYTES = 32 << 20
_WORKER = pb.DESCRIPTOR.services_by_name["Worker"]


class WorkerServer:
    """A gRPC server for one rank, on the socket in the worker's directory."""

    def __init__(self, servicer: WorkerServicer, run_dir: Path) -> None:
        """Bind the socket. Calls are answered after `start`."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1)]
        threads = ThreadPoolExecutor(MAX_THREADS, "kvplane-worker", use_device, (servicer.device,))
        self._server = grpc.server(threads, options=options)
        self._callers = Callers(run_dir / SOCKET, run_dir / GRPC_SOCKET)
        self._server.add_generic_rpc_handlers((service_handler(_WORKER, servicer, self._callers.process_of),))
        self._health = HealthServicer(("", _WORKER.full_name))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_insecure_port(f"unix:{run_dir / GRPC_SOCKET}")

    def start(self) -> None:
        """Start to answer calls, and set health to SERVING."""
        self._server.start()
        self._callers.start()
        self._health.is_serving = True

    def leaving(self) -> None:
        """Set health to NOT_SERVING, because the worker shuts down."""
        self._health.is_serving = False

    def stop(self, grace_s: float) -> None:
        """Stop the server. Running calls may take another `grace_s` seconds."""
        self._callers.close()
        self._server.stop(grace_s).wait()
