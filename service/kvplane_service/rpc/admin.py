"""The Admin service."""

from __future__ import annotations

from google.protobuf.message import Message

from kvplane.base.errors import InternalError
from kvplane.v1 import admin_pb2 as pb
from kvplane_service.core.inspect import take_snapshot
from kvplane_service.registry import Registry
from kvplane_service.rpc.encode import encode_snapshot


class AdminServicer:
    """Looks inside replicas."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Snapshot(self, request: pb.SnapshotRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. Works on the event loop, since the state must not change meanwhile."""
        replica = self._registry.get(request.replica).host.replica
        try:
            snapshot = take_snapshot(replica)
        except AssertionError as error:
            raise InternalError(
                f"an invariant of {request.replica} does not hold: {error}",
                remedy="report it, with the replica's log",
            ) from error
        return encode_snapshot(snapshot, request.summary)
