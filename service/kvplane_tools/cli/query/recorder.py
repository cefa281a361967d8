"""Write the messages that Admin.Record streams to a file, one frame per message."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import BinaryIO, cast

import grpc

from kvplane.base.errors import AlreadyExists, LimitExceeded, NotFound, Unavailable
from kvplane.rpc.channel import open_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.v1.admin_pb2 import RecordRequest, RecordResponse
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_service.decisions.recording import MAGIC, write_frame
from kvplane_tools.cli.options import given

_RETRY_S = 1.0


def record(
    service: str,
    request: RecordRequest,
    path: Path,
    decisions: int | None,
    until: tuple[int, int] = (1 << 64, 0),
) -> int:
    """Record decisions of a replica until `decisions` decisions are written, that of the epoch and step `until` is, the
    stream of `request` ends, or Ctrl-C is pressed; return how many were written.

    Raises:
        AlreadyExists: the file exists.
        NotFound: the file cannot be written.
        KvplaneError: the service refused or ended the call. Frames written before stay in the file; if none arrived, no
            file is created.
    """
    count = 0
    channel = open_channel(service, given().access())
    with channel, contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        file = None
        for message in _messages(channel, request):
            if file is None:
                file = stack.enter_context(_new(path))
            write_frame(file, message)
            file.flush()
            count += message.HasField("decision")
            step = message.decision.step
            if count == decisions or max((step.epoch, step.seq), (message.life.epoch, 0)) >= until:
                break
    return count


class Rotation:
    """Records a replica from now on to files `path`.1, `path`.2, ...; at most `keep` of them remain.

    Every file begins with the state of the replica. The stream of the next file is opened before that of the current
    one is left: the current file ends before the first decision that the next one has, so that none is missing and none
    is in both.
    """

    def __init__(self, service: str, replica: str, path: Path, most_bytes: int, keep: int) -> None:
        self._request = RecordRequest(replica=replica, from_now=True)
        self._service, self._path, self._most_bytes, self._keep = service, path, most_bytes, keep
        self._number = 0

    def run(self) -> None:
        """Record until the replica is deregistered, or Ctrl-C is pressed. Raises as `record`, except for a service that
        is away for a while.
        """
        with open_channel(self._service, given().access()) as channel, contextlib.suppress(KeyboardInterrupt):
            while True:
                try:
                    self._record(channel)
                    return
                except (Unavailable, LimitExceeded) as error:
                    if not self._number:
                        raise
                    print(f"kvplane: {error}; continuing with a new file", file=sys.stderr, flush=True)
                    time.sleep(_RETRY_S)

    def _record(self, channel: grpc.Channel) -> None:
        stream = _messages(channel, self._request)
        head = list(islice(stream, 2))
        while head:
            with self._next_file() as file:
                for message in head:
                    write_frame(file, message)
                stream, head = self._fill(file, stream, channel)

    def _fill(
        self, file: BinaryIO, stream: Iterator[RecordResponse], channel: grpc.Channel
    ) -> tuple[Iterator[RecordResponse], list[RecordResponse]]:
        """Write the stream to the file. Returns the stream of the next file and its first messages, none at the end."""
        num_bytes = 0  # of decisions: a large state does not make each file as short as one decision
        for message in stream:
            write_frame(file, message)
            file.flush()
            num_bytes += message.ByteSize()
            if num_bytes >= self._most_bytes:
                following = _messages(channel, self._request)
                try:
                    head = list(islice(following, 3))  # the third is the first decision
                except NotFound:  # the replica was deregistered: what is left of its decisions ends this file
                    head = []
                for missing in takewhile(partial(_differ, head[2:]), stream):
                    write_frame(file, missing)
                return following, head
        return stream, []

    def _next_file(self) -> BinaryIO:
        self._number += 1
        file = _new(self._path.with_name(f"{self._path.name}.{self._number}"))
        self._path.with_name(f"{self._path.name}.{self._number - self._keep}").unlink(missing_ok=True)
        print(file.name, flush=True)
        return file


def _differ(first: list[RecordResponse], message: RecordResponse) -> bool:
    return first != [message]


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
