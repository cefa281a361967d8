"""Claim the page memory of every rank for a new engine life (the time of one epoch, in which one engine owns the
pages), by raising the owner epoch in the rank's stamp table. A stamp is the version number of a page's content.

    claim, rank 0 first -> every rank refuses orders of the old life -> read the stamps -> verify the cached keys

The service can claim through a worker whose directory it may access: same host and same user. The engine itself claims
the other ranks once its session is open; until then the stamps that the engine sent are used. Owner epochs never
decrease, so a claim is never undone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from kvplane.base.errors import KvplaneError, StaleEpoch, Unavailable
from kvplane.base.session import NEW_EPOCH, OpenRequest
from kvplane.base.stamp_table import StampReading
from kvplane.base.stamps import MAX_EPOCH
from kvplane.base.worker import UNIX, WorkerInfo, WorkerState, is_socket_path
from kvplane.rpc.peers import check_listener
from kvplane.rpc.status import error_of_rpc
from kvplane.v1 import worker_pb2 as pb
from kvplane.wire.columns import U32, unpack
from kvplane_service.registry import Entry
from kvplane_service.replicas.stamps import confirmed

CLAIM_TIMEOUT_S = 1.0
MAX_ATTEMPTS = 4
_SERVICE = "/kvplane.v1.Worker"
_TOKEN = "token"
_TOKEN_BYTES = 4096
_OPTIONS = (
    ("grpc.max_receive_message_length", 1 << 30),  # room for the stamps of 2^27 blocks
    # No connection of an earlier claim is reused: a descriptor in the target names another directory each time.
    ("grpc.use_local_subchannel_pool", 1),
)


class ClaimedPages(NamedTuple):
    """The state of a worker's pages after a claim, which raises the owner epoch of the pages.

    Attributes:
        reading: contents of the worker's stamp table, with the version number of each page's content.
        busy: blocks that a transfer of an earlier engine life may still write. No such transfer can begin after the
            claim.
    """

    reading: StampReading
    busy: Sequence[int] = ()


Claim = Callable[[WorkerInfo, int], Awaitable[ClaimedPages]]

_Answer = TypeVar("_Answer", bound=Message)

_log = logging.getLogger(__name__)


async def claimed(entry: Entry, request: OpenRequest, claim: Claim) -> tuple[OpenRequest, int]:
    """Claim the pages of all workers for the engine life (the time of one epoch, in which one engine owns the pages)
    that a session begins.

    Returns the request with the stamps and the busy blocks (which old transfers may still write) that were read after
    the claim, and the epoch to pass to `ReplicaHost.open` before the caller waits for anything; NEW_EPOCH if nothing
    was claimed.

    Workers that the service cannot reach, or that do not answer, are not claimed: the engine claims them itself.

    Raises:
        KvplaneError: the session cannot be opened, as `ReplicaHost.check_open` raises; no worker was claimed then.
        Unavailable: other sessions began engine lives during MAX_ATTEMPTS attempts.
    """
    host = entry.host
    for _ in range(MAX_ATTEMPTS):
        host.check_open(request)
        workers = [worker for worker in entry.workers.alive() if worker.state is not WorkerState.STARTING]
        if request.epoch != NEW_EPOCH or not workers:
            return request, NEW_EPOCH
        epoch = host.next_epoch(request)
        try:
            pages = await _claim_all(workers, epoch, claim)
        except StaleEpoch as error:
            host.observe_owner_epoch(_owner_of(error))
            continue
        stamps = await _proven(request.stamp_table, [one.reading for one in pages])
        await host.idle()
        if epoch > host.epoch:  # no other session has begun this engine life meanwhile
            busy = _busy(request, pages, host.replica.spec.num_blocks)
            return replace(request, stamp_table=stamps, busy_blocks=busy), epoch
    raise Unavailable(
        f"another epoch of {host.name} began during each of {MAX_ATTEMPTS} attempts to claim its workers",
        field="replica",
        remedy="check that only one engine uses the replica, and try again",
    )


async def _claim_all(workers: Sequence[WorkerInfo], epoch: int, claim: Claim) -> list[ClaimedPages]:
    """Claim the workers, rank 0 first, and return the pages of those that answered. Raises StaleEpoch if a worker
    already belongs to a newer engine life.
    """
    first, *others = workers
    answers = [*await _answers([first], epoch, claim), *await _answers(others, epoch, claim)]
    claimed_pages = []
    for worker, answer in zip(workers, answers, strict=True):
        if isinstance(answer, ClaimedPages):
            claimed_pages.append(answer)
        elif isinstance(answer, StaleEpoch):
            raise answer
        else:
            _log.info("cannot claim the worker of rank %d; its engine claims it: %s", worker.rank, answer)
    return claimed_pages


async def _answers(workers: Sequence[WorkerInfo], epoch: int, claim: Claim) -> list[ClaimedPages | KvplaneError]:
    async def ask(worker: WorkerInfo) -> ClaimedPages | KvplaneError:
        try:
            return await claim(worker, epoch)
        except KvplaneError as error:
            return error

    return list(await asyncio.gather(*map(ask, workers)))


def _owner_of(error: StaleEpoch) -> int:
    """Return the owner epoch that a worker reported when it refused a claim; 0 if the reported number is invalid."""
    text = error.metadata.get("epoch", "")
    return int(text) if text.isdecimal() and int(text) < MAX_EPOCH else 0


async def _proven(shown: Sequence[int], readings: Sequence[StampReading]) -> Sequence[int]:
    """Return the stamps that the engine sent, with 0 for each block that has another stamp in the table of a claimed
    worker.
    """
    for reading in readings if shown else ():
        shown = confirmed(shown, reading)
        await asyncio.sleep(0)  # a large table takes several milliseconds
    return shown


def _busy(request: OpenRequest, pages: Sequence[ClaimedPages], num_blocks: int) -> tuple[int, ...]:
    """Return the blocks that a load of an earlier engine life may still write, as reported by the engine and its
    workers.
    """
    listed = {block for one in pages for block in one.busy if 0 < block < num_blocks}
    return tuple(sorted(listed.union(request.busy_blocks)))


async def claim_worker(worker: WorkerInfo, epoch: int) -> ClaimedPages:
    """Claim the pages of a worker on this host for the engine life with the number `epoch`.

    Raises:
        StaleEpoch: a newer engine life owns the pages.
        Unavailable: the address is not a socket in a private directory of this user; the worker cannot be reached or
            does not answer within CLAIM_TIMEOUT_S. All this is checked because any client with the scope `worker` may
            register any address.
        PermissionDenied: a process of another user listens at the address.
        KvplaneError: the worker refuses, for instance because it is not the registered one.
    """
    with _directory_of(worker.address) as (directory, socket):
        token = _token_in(directory, worker.address)
        # The socket and the token are those of one directory, whatever its path names by now.
        path = f"/proc/self/fd/{directory}/{socket}"
        check_listener(path, worker.address)
        async with grpc.aio.insecure_channel(f"{UNIX}{path}", _OPTIONS) as channel:
            request = pb.ClaimRequest(token=token, epoch=epoch, worker_id=worker.worker_id)
            answer = await _ask(channel, "Claim", request, pb.ClaimResponse)
    busy = unpack(answer.busy, U32, "claim", "busy")
    return ClaimedPages(StampReading(answer.incarnation, _unpack(answer.stamps)), busy)


async def _ask(channel: grpc.aio.Channel, method: str, request: Message, answer_type: type[_Answer]) -> _Answer:
    call = channel.unary_unary(
        f"{_SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer_type.FromString,
    )
    try:
        return await call(request, timeout=CLAIM_TIMEOUT_S)
    except grpc.aio.AioRpcError as outcome:
        raise error_of_rpc(outcome) from None


@contextmanager
def _directory_of(address: str) -> Iterator[tuple[int, str]]:
    """Open the directory of the worker's socket; yield its descriptor and the name of the socket.

    Raises:
        Unavailable: the address is not the path of a socket in a directory that this user alone can access.
    """
    path = address.removeprefix(UNIX)
    if not address.startswith(UNIX) or not is_socket_path(path):
        raise Unavailable(f"{address} is not unix:PATH with an absolute path")
    parent, name = posixpath.split(path)
    try:
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"the directory of the worker at {address} cannot be opened: {error}") from None
    try:
        found = os.fstat(directory)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise Unavailable(f"{address} is not a socket in a directory that only user {os.getuid()} can access")
        if not stat.S_ISSOCK(_mode_of(name, directory)):
            raise Unavailable(f"{address} is not a socket")
        yield directory, name
    finally:
        os.close(directory)


def _mode_of(name: str, directory: int) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:
        return 0


def _token_in(directory: int, address: str) -> str:
    """Return the token in the file next to the worker's socket."""
    try:
        file = os.open(_TOKEN, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(file) as token:
            return token.read(_TOKEN_BYTES)
    except (OSError, ValueError) as error:
        raise Unavailable(f"the token of the worker at {address} cannot be read: {error}") from None


def _unpack(stamps: bytes) -> Sequence[int]:
    """Return the stamps as 64-bit words. The worker runs on this host, so it has the same byte order."""
    return memoryview(stamps[: len(stamps) // 8 * 8]).cast("Q")
