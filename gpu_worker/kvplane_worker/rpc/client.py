"""A client of the gRPC API kvplane.v1.Worker on a worker's Unix socket."""

from __future__ import annotations

import time
from pathlib import Path

from google.protobuf.message import Message

from kvplane.base.errors import Unavailable
from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from kvplane.rpc.peers import check_listener
from kvplane.unary.calls import Answer, Call
from kvplane_worker.lending.rundir import SOCKET

WORKER = "kvplane.v1.Worker"
MAX_MESSAGE_BYTES = 1 << 30  # 2^27 blocks with 8 bytes of stamp each
RETRY_S = 0.02  # between looks for a process that listens


class WorkerClient(Client):
    """A client of the worker that uses a given directory. It connects to the Unix socket in that directory and raises
    the errors of `kvplane.Client`.
    """

    def __init__(self, run_dir: Path, timeout_s: float = 10.0) -> None:
        """Wait until a process listens at the socket.

        Raises:
            PermissionDenied: a process of another user listens there.
            Unavailable: no process listens there within `timeout_s` seconds.
        """
        _wait_for_listener(str(run_dir / SOCKET), timeout_s)
        channel = open_channel(f"unix:{run_dir / SOCKET}", max_message_bytes=MAX_MESSAGE_BYTES)
        super().__init__(channel, timeout_s=timeout_s, max_message_bytes=MAX_MESSAGE_BYTES)

    def call(self, method: str, request: Message, answer_type: type[Answer]) -> Answer:
        """Call a method and return its answer. Retries while the worker cannot be reached."""
        return self._do(Call(f"/{WORKER}/{method}", request, answer_type))


def _wait_for_listener(path: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return check_listener(path, path)
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(RETRY_S)
