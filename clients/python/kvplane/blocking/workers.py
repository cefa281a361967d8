"""The client that a worker uses: it registers for a rank, gets the rank's memory layout, and renews its lease."""

from __future__ import annotations

from kvplane import wire
from kvplane.base.worker import Assignment, Renewal, WorkerInfo
from kvplane.blocking.client import Client
from kvplane.unary.calls import Call
from kvplane.v1 import plan_pb2 as pb

WORKERS = "kvplane.v1.Workers"


class WorkersClient(Client):
    """A client that can also register workers. Its methods raise the errors that Client names."""

    def register_worker(self, replica: str, worker: WorkerInfo) -> Assignment:
        """Register as the worker of a rank and return the rank's memory layout and the lease. May be repeated.

        Raises:
            WorkerExists: another worker has the rank, and its lease has not expired.
            NoPlan: the replica was registered with explicit groups, so there is no memory layout.
        """
        request = pb.RegisterWorkerRequest(replica=replica, worker=wire.encode_worker(worker))
        answer = self._do(Call(f"/{WORKERS}/RegisterWorker", request, pb.RegisterWorkerResponse))
        return wire.decode_assignment(answer)

    def renew_worker(self, replica: str, worker: WorkerInfo) -> Renewal:
        """Renew the worker's lease; returns its length, and the peers that the worker may read. Raises NotFound if the
        worker must register again.
        """
        request = pb.RenewWorkerRequest(replica=replica, worker=wire.encode_worker(worker))
        call = Call(f"/{WORKERS}/RenewWorker", request, pb.RenewWorkerResponse)
        return wire.decode_renewal(self._do(call))

    def deregister_worker(self, replica: str, worker_id: int) -> None:
        """Remove the worker's registration, so that another worker may register for the rank."""
        request = pb.DeregisterWorkerRequest(replica=replica, worker_id=worker_id)
        self._do(Call(f"/{WORKERS}/DeregisterWorker", request, pb.DeregisterWorkerResponse))
