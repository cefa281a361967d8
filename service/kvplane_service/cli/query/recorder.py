"""Write the messages that Admin.Record streams to a file, one frame per message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import grpc

from kvplane.base.errors import AlreadyExists, NotFound
from kvplane.rpc.channel import open_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.v1.admin_pb2 import RecordRequest, RecordResponse
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_service.cli.options import given_access
from kvplane_service.decisions.recording import MAGIC, write_frame


def record(service: str, replica: str, path: Path, decisions: int | None, divergence: bool = False) -> int:
    """Record decisions of a replica until `decisions` decisions are written, the replica is deregistered, or Ctrl-C is
    pressed; return how many were written. With `divergence`: those up to the last divergence of a mirror.

    Raises:
        AlreadyExists: the file exists.
        NotFound: the file cannot be written.
        KvplaneError: the service refused or ended the call. Frames written before stay in the file; if none arrived, no
            file is created.
    """
    count = 0
    channel = open_channel(service, given_access())
    with channel, contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        file = None
        for message in _messages(channel, RecordRequest(replica=replica, divergence=divergence)):
            if file is None:
                file = stack.enter_context(_new(path))
            write_frame(file, message)
            file.flush()
            count += message.HasField("decision")
            if count == decisions:
                break
    return count


def _messages(channel: grpc.Channel, request: RecordRequest) -> Iterator[RecordResponse]:
    stream = AdminStub(channel).Record(request)
    try:
        yield from stream
    except grpc.RpcError:
        raise error_of_rpc(cast(RpcOutcome, stream)) from None
    finally:
        stream.cancel()


def _new(path: Path) -> BinaryIO:
    try:
        file = path.open("xb")
    except FileExistsError:
        raise AlreadyExists(f"{path} already exists", field="file", remedy="name another file, or remove it") from None
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}"
        raise NotFound(what, field="file", remedy="name a writable path") from None
    file.write(MAGIC)
    return file
