"""The gRPC server of a worker: kvplane.v1.Worker on the worker's Unix socket, with gRPC health."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc

from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.lending.rundir import GRPC_SOCKET, SOCKET
from kvplane_worker.memory import use_device
from kvplane_worker.rpc.callers import Callers
from kvplane_worker.rpc.handlers import service_handler
from kvplane_worker.rpc.health import HealthServicer
from kvplane_worker.rpc.servicer import MAX_THREADS, WorkerServicer

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
