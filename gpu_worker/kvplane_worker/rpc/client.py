"""A client of the gRPC API kvplane.v1.Worker on a worker's Unix socket."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import Message

from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from kvplane.unary.calls import Answer, Call
from kvplane_worker.lending.rundir import SOCKET

WORKER = "kvplane.v1.Worker"
MAX_MESSAGE_BYTES = 1 << 30  # 2^27 blocks with 8 bytes of stamp each


class WorkerClient(Client):
    """A client of the worker that uses a given directory. It connects to the Unix socket in that directory and raises
    the errors of `kvplane.Client`.
    """

    def __init__(self, run_dir: Path, timeout_s: float = 10.0) -> None:
        channel = open_channel(f"unix:{run_dir / SOCKET}", max_message_bytes=MAX_MESSAGE_BYTES)
        super().__init__(channel, timeout_s=timeout_s, max_message_bytes=MAX_MESSAGE_BYTES)

    def call(self, method: str, request: Message, answer_type: type[Answer]) -> Answer:
        """Call a method and return its answer. Retries while the worker cannot be reached."""
        return self._do(Call(f"/{WORKER}/{method}", request, answer_type))
