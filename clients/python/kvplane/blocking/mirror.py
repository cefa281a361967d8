"""Sends the steps of an engine that decides in its own process to the service that mirrors it, on a thread of its own.

The engine never waits: `submit` appends to a log. While the service is away, the log grows up to its limit; later the
service gets an image of the engine's state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import cast

import grpc

from kvplane.base.errors import (
    DeadlineExceeded,
    InternalError,
    KvplaneError,
    LimitExceeded,
    Moved,
    NotFound,
    OtherWriter,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvplane.base.groups import HashAlgorithm, ReplicaSpec
from kvplane.base.hashing.algorithms import block_digest
from kvplane.base.session import OPEN_TIMEOUT_S, CacheRequest, Opened, OpenRequest, Progress
from kvplane.base.step import Step, StepResult
from kvplane.blocking.client import Client
from kvplane.blocking.registering import EngineInfo, register_engine
from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import open_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.mirror_log import ClosedStep, Iteration, MirrorLog, Piece
from kvplane.session.options import draw_nonce
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.wire.mirror import (
    Mirrored,
    answer_digest,
    decode_cache_request,
    decode_progress,
    mirrored_message,
    slice_message,
)
from kvplane.wire.stream import close_message, heartbeat_message, open_message, opened_of

NO_INFO = EngineInfo()
MOST_ITERATIONS = 1024  # that wait for the service
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
_BEATS_PER_LEASE = 3
CORE_VERSION_FIELD = "open.mirror.core_version"
# What may end without a change of the engine. Credentials are read for each call.
_TRIES_AGAIN = (
    Unavailable,
    DeadlineExceeded,
    InternalError,
    Moved,
    NotFound,
    OtherWriter,
    LimitExceeded,
    Unauthenticated,
    PermissionDenied,
)

_log = logging.getLogger("kvplane.mirror")


@dataclass(frozen=True, slots=True)
class MirrorState:
    """How far the service is, for the engine's operators.

    Attributes:
        newest, applied_through: last step of the engine, and the last one that the service has applied.
        waiting: iterations that the service has not applied.
        images: images that the service has needed.
        divergences: how often the service's answers differed from the engine's.
        problem: why the service does not follow now; None if it does.
    """

    newest: int
    applied_through: int
    waiting: int
    images: int
    divergences: int
    problem: KvplaneError | None


class MirrorSender:
    """Keeps the service of one replica up to date with an engine that decides itself.

    Attributes:
        ended: why the replica is not mirrored any more; None while the sender tries to.
        waiting_requests: number of requests that wait for admission in the engine, for the service's metrics; the
            engine sets it, None = not reported.
        num_submitted: iterations submitted.
    """

    def __init__(
        self,
        address: str,
        request: OpenRequest,
        spec: ReplicaSpec,
        export: Callable[[], tuple[int, Iterator[bytes]]],
        access: Access = PLAIN,
        info: EngineInfo = NO_INFO,
    ) -> None:
        """Begin to connect, without waiting.

        Args:
            address: of the service.
            request: how to attach; each stream gets a nonce of its own.
            spec: with which the replica is registered if the service does not know it.
            export: returns the number of the engine's last step and the engine's state in slices. Called now and within
                `submit`; the slices are read on the sender's thread.
            access: TLS and token.
            info: with which the replica is registered.
        """
        self._address, self._access = address, access
        self._request, self._spec, self._export = request, spec, export
        self._info = info
        self._changed = threading.Condition()
        self._logged = MirrorLog(MOST_ITERATIONS)
        self._logged.begin_image(*export())
        self._stop = False
        self._requests: dict[int, CacheRequest] = {}  # that the engine has not taken
        self._divergences = 0
        self._problem: KvplaneError | None = Unavailable("the service has not been reached yet")
        self.ended: KvplaneError | None = None
        self.num_submitted = 0
        self.waiting_requests: int | None = None
        self._reported_s = 0.0  # when it was last sent on this stream
        self._thread = threading.Thread(target=self._run, name=f"kvplane-mirror-{request.replica}", daemon=True)
        self._thread.start()

    def submit(
        self, steps: Sequence[tuple[Step | ClosedStep, StepResult]], cache_requests: Mapping[int, int] | None = None
    ) -> None:
        """Send the steps of one iteration; call it between two steps. Never waits for the service. The rows of a
        ClosedStep are taken on the sender's thread.

        `cache_requests`: by number of a step, the number of the CacheRequest that it carries out.
        """
        if not steps or self.ended is not None:
            return
        self.num_submitted += 1
        with self._changed:
            self._logged.add(Iteration(tuple(steps), time.monotonic_ns(), cache_requests or {}))
            if self._logged.image_wanted:
                self._logged.begin_image(*self._export())
            self._changed.notify_all()

    def take_cache_requests(self) -> list[CacheRequest]:
        """Return the changes of the cache that callers of the service ask for, for the engine to carry out, each in a
        step of its own.
        """
        if not self._requests:
            return []
        with self._changed:
            taken, self._requests = list(self._requests.values()), {}
        return taken

    @property
    def state(self) -> MirrorState:
        """How far the service is."""
        with self._changed:
            log = self._logged
            counts = log.newest, log.applied_through, len(log), log.num_images, self._divergences
            return MirrorState(*counts, self._problem)

    def wait_applied(self, timeout_s: float) -> bool:
        """Wait until the service has applied all steps; returns whether it has. For tests and a clean end.

        Returns at once when the replica is not mirrored any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self._is_applied(), timeout_s)
            return self._is_applied()

    def _is_applied(self) -> bool:
        log = self._logged
        return self._problem is None and not log.image_wanted and log.applied_through == log.newest

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread, after it has notified the service."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop:
            try:
                with open_channel(self._address, self._access) as channel:
                    self._follow(channel)
                return
            except KvplaneError as error:
                pause_s = FIRST_PAUSE_S if self._problem is None else min(2 * pause_s, LONGEST_PAUSE_S)
                self._note(error)
                if isinstance(error, Moved):
                    self._address = error.metadata.get("address", self._address)
                # A service of other rules may be replaced: one of two that are upgraded is the first.
                if not isinstance(error, _TRIES_AGAIN) and error.field != CORE_VERSION_FIELD:
                    _log.error("%s is not mirrored any more: %s", self._request.replica, error)
                    with self._changed:
                        self.ended = error
                        self._changed.notify_all()
                    return
            with self._changed:
                self._changed.wait_for(lambda: self._stop, pause_s)

    def _note(self, problem: KvplaneError | None) -> None:
        with self._changed:
            before, self._problem = self._problem, problem
            self._changed.notify_all()
        if problem is not None and (before is None or before.reason != problem.reason):
            _log.warning("%s is not mirrored now: %s", self._request.replica, problem)

    def _follow(self, channel: grpc.Channel) -> None:
        """Register, attach, and send until the stream ends, which raises, or `close` is called."""
        stub = AllocationStub(channel)
        client = Client(channel, timeout_s=OPEN_TIMEOUT_S, retry=RetryPolicy(attempts=1))
        register_engine(client, self._request.replica, self._spec, self._info)
        open_request = replace(self._request, nonce=draw_nonce())
        stream = _MirrorStream(stub, open_request, self._changed, self._take, self._spec.hash_algorithm)
        try:
            opened = stream.opened()
            with self._changed:
                self._logged.opened(opened.seq, opened.image_wanted, opened.mirror_window)
            self._note(None)
            self._reported_s = 0.0
            while self._send_next(stream, opened.lease_ms / 1000 / _BEATS_PER_LEASE):
                pass
            stream.finish()
        finally:
            stream.cut()

    def _send_next(self, stream: _MirrorStream, beat_s: float) -> bool:
        """Send one message, or a heartbeat when there is none for a while. Returns False after `close`."""
        if self.waiting_requests is not None and time.monotonic() - self._reported_s >= beat_s:
            stream.send(heartbeat_message(self.waiting_requests))
            self._reported_s = time.monotonic()
        with self._changed:
            message = None
            self._changed.wait_for(lambda: self._stop or stream.error or self._logged.has_message, beat_s)
            if stream.error is not None:
                raise stream.error
            if not self._stop or self._logged.has_message:
                message = self._logged.next_message()
            newest = self._logged.newest
        if message is None:
            if self._stop:
                return False
            stream.send(heartbeat_message())
        elif isinstance(message, Piece):
            stream.send(slice_message(message.data, message.first, message.last))
        else:
            age_ms = (time.monotonic_ns() - message.at_ns) // 1_000_000
            asked = message.cache_requests
            recorded = message.recorded()
            steps = [Mirrored(step, answer_digest(result), asked.get(step.seq, 0)) for step, result in recorded]
            stream.send(mirrored_message(steps, newest, min(age_ms, 2**32 - 1)))
        return True

    def _take(self, message: Progress | CacheRequest) -> None:
        """Process a message of the service; called with the lock held, on the reader's thread."""
        if isinstance(message, CacheRequest):
            self._requests[message.number] = message
        else:
            self._answered(message)

    def _answered(self, progress: Progress) -> None:
        self._divergences += progress.reason == "DIVERGED" and not self._logged.image_wanted
        self._logged.answered(progress)


class _MirrorStream:
    """One stream of the mirror. A thread reads its answers."""

    def __init__(
        self,
        stub: AllocationStub,
        request: OpenRequest,
        changed: threading.Condition,
        taken: Callable[[Progress | CacheRequest], None],
        hashes: HashAlgorithm,
    ) -> None:
        self.error: KvplaneError | None = None
        self._changed, self._taken, self._hashes = changed, taken, hashes
        self._opened: Opened | None = None
        self._is_closed = False
        self._requests: SimpleQueue[SessionRequest | None] = SimpleQueue()
        self._call = stub.Session(iter(self._requests.get, None))
        self._requests.put(open_message(request))
        threading.Thread(target=self._read, name="kvplane-mirror-answers", daemon=True).start()

    def opened(self) -> Opened:
        """Wait for the answer to the open. Raises the refusal, or DeadlineExceeded."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened or self.error, OPEN_TIMEOUT_S)
            if self._opened is None:
                raise self.error or DeadlineExceeded(f"no answer within {OPEN_TIMEOUT_S} s", remedy="try again")
            return self._opened

    def send(self, message: SessionRequest) -> None:
        """Put a message into the queue from which gRPC sends."""
        self._requests.put(message)

    def finish(self) -> None:
        """Close the session, and wait briefly until the service has done so."""
        self.send(close_message())
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self.error, FIRST_PAUSE_S * 10)

    def cut(self) -> None:
        """Cancel the stream."""
        self._call.cancel()
        self._requests.put(None)

    def _read(self) -> None:
        error: KvplaneError = Unavailable("the service ended the stream")
        try:
            for response in self._call:
                with self._changed:
                    self._take(response)
                    self._changed.notify_all()
        except grpc.RpcError as ended:
            error = error_of_rpc(cast(RpcOutcome, ended))
        except KvplaneError as ended:
            error = ended
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _take(self, response: SessionResponse) -> None:
        kind = response.WhichOneof("kind")
        if self._opened is None:
            self._opened = opened_of(response)
        elif kind == "progress":
            self._taken(decode_progress(response.progress))
        elif kind == "cache_request":
            size = block_digest(self._hashes).size if response.cache_request.HasField("rows") else 0
            self._taken(decode_cache_request(response.cache_request, size))
        elif kind == "closed":
            self._is_closed = True
