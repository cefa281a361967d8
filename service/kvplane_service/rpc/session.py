"""The bidirectional stream of an engine: steps come in and answers go out, in order, without a task or a queue per
message.

A long message is parsed, and a long step applied, on a thread; the stream reads its next message after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from kvplane import wire
from kvplane.base.errors import (
    InternalError,
    InvalidArgument,
    KvplaneError,
    OtherWriter,
    PermissionDenied,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.session import NEW_EPOCH, CacheRequest, OpenRequest, Progress
from kvplane.base.step import Part, Step
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.mirror import Mirrored, cache_request_message, decode_mirrored, progress_message
from kvplane.wire.parsing import parse, parse_long
from kvplane.wire.stream import result_message
from kvplane_core.face.interface import HAS_KEYS
from kvplane_service.auth.gate import CALL
from kvplane_service.auth.owners import ALL
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.decisions.sent import SentResult, SentStep
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.replicas.mirror import Mirror
from kvplane_service.replicas.peer_watch import LOOK_S
from kvplane_service.replicas.step_order import check_parts
from kvplane_service.rpc import prices
from kvplane_service.rpc.claims import Claim, claim_worker, claimed
from kvplane_service.rpc.decode import fingerprint
from kvplane_service.rpc.methods import LONG_MESSAGE_BYTES, Context, first_message, next_message
from kvplane_service.runtime.executors import Executor, Offload
from kvplane_service.store.ownership import Ownership

_MAX_WAITING = 64  # long first messages of an owner that wait for the parser
_PROOFS_AT_ONCE = 4  # recoveries whose stored keys are verified concurrently; each takes memory and time
_MIRRORED = 4  # messages of mirrors may have this multiple of the parts of a step, each of which takes a kilobyte
_ENDS_STREAM = (OtherWriter, StaleEpoch, InternalError)


@dataclass(slots=True)
class _Message:
    """A parsed message of an open session.

    Attributes:
        kind: "step", "heartbeat", "close", "mirrored_steps" or "image"; "" for a message without a kind.
        step: the decoded step, or the error for which it cannot be decoded; None for another kind.
        sent: the message of a mirror.
        mirrored: the decoded steps of a mirror.
        waiting_requests: as in a heartbeat.
        num_bytes: length of a message with steps.
        seq, part: step number and part index, as sent.
        fingerprint: digest of the message, by which a retried step is recognized.
    """

    kind: str
    step: Step | KvplaneError | None = None
    seq: int = 0
    part: int = 0
    fingerprint: bytes = b""
    sent: pb.SessionRequest | None = None
    mirrored: Sequence[Mirrored] = ()
    waiting_requests: int | None = None
    num_bytes: int = 0


class SessionStreams:
    """The open session streams of this process."""

    def __init__(self, registry: VisibleReplicas, ownership: Ownership, claim: Claim = claim_worker) -> None:
        """`claim` claims the pages of a worker for an engine life (the time of one epoch, in which one engine owns the
        pages); a simulation replaces it.
        """
        self._claim = claim
        self._registry = registry
        self._ownership = ownership
        self._open: dict[_Stream, None] = {}  # a dict as an ordered set, so that a simulation is reproducible
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._draining = False
        self._offload = Executor("parsing of first messages", max_waiting=_MAX_WAITING)
        self._prove = Executor("verification of stored entries", threads=_PROOFS_AT_ONCE)

    async def serve(self, context: Context) -> None:
        """Serve one stream until it ends."""
        async with CALL.get().reading():
            raw, stamps = wire.split_stamps(await first_message(context) or b"")
        CALL.get().owe(len(raw) + len(stamps))
        first = await self._parsed(raw)
        if first.WhichOneof("kind") != "open":
            kind = first.WhichOneof("kind") or "empty"
            raise InvalidArgument(f"the first message is {kind}", field="kind", remedy="send `open` first")
        self._check_stays()
        request = wire.decode_open(first.open, stamps)
        if request.replica not in self._registry:
            await self._registry.ensure_local(request.replica)
        entry = self._registry.get(request.replica)
        await entry.host.idle()
        epoch = request.epoch
        if epoch == NEW_EPOCH:
            await self._ownership.ensure_granted(request.replica)
        if request.mirror is None:
            if entry.host.recovering is not None:
                await entry.host.prove_ahead(request, self._prove)
            request, epoch = await claimed(entry, request, self._claim)
        self._check_stays()  # again: it was awaited
        stream = _Stream(entry.host, request, context, self._left, entry.offload)
        self._open[stream] = None
        self._all_closed.clear()
        try:
            await stream.run(epoch)
        finally:
            self._open.pop(stream, None)
            if not self._open:
                self._all_closed.set()

    async def _parsed(self, raw: bytes) -> pb.SessionRequest:
        """Parse a first message, a long one on a thread."""
        if len(raw) <= LONG_MESSAGE_BYTES:
            return parse(pb.SessionRequest, raw)
        return await self._offload(partial(parse_long, pb.SessionRequest, raw))

    def _check_stays(self) -> None:
        if self._draining:
            raise Unavailable("the service is draining", remedy="connect to another service")

    def refuse_new(self) -> None:
        """Refuse to open further sessions, because the service drains."""
        self._draining = True

    def replicas(self) -> set[str]:
        """Return the names of the replicas that have an open stream."""
        return {stream.replica for stream in self._open}

    async def _left(self, replica: str) -> None:
        """Handle the close of a session. While the service drains, release the replica to other services before the
        engine gets the answer, so that the engine can connect to another service at once.
        """
        if self._draining:
            await self._ownership.release(replica)

    async def drain(self, grace_ms: int) -> None:
        """Notify every engine, and wait at most `grace_ms` until all sessions are closed; then end the remaining
        streams.
        """
        notice = pb.SessionResponse(draining=pb.Draining(grace_ms=grace_ms)).SerializeToString()
        # Not awaited: a stream may be broken, or its client may not be reading.
        notices = asyncio.gather(*(stream.write(notice) for stream in self._open), return_exceptions=True)
        try:
            await asyncio.wait_for(self._all_closed.wait(), grace_ms / 1000)
        except TimeoutError:
            for stream in self._open:
                what = f"the service has drained: the session was not closed within {grace_ms} ms"
                stream.end(Unavailable(what, remedy="connect to another service"))
        notices.cancel()


class _Stream:
    """One open stream of an engine on one replica."""

    def __init__(
        self,
        host: ReplicaHost,
        request: OpenRequest,
        context: Context,
        left: Callable[[str], Awaitable[None]],
        offload: Offload,
    ) -> None:
        """`left` is awaited after the engine closed its session; `offload` runs long work on a thread."""
        self.replica = host.name
        self._host = host
        self._left = left
        self._offload = offload
        self._request = request
        self._context = context
        self._is_mirror = request.mirror is not None
        self._call = CALL.get()
        self._may_use_all_domains = ALL in self._call.owner.domains
        self._writing = asyncio.Lock()
        self._task = asyncio.current_task()
        self._sending: set[asyncio.Task[None]] = set()  # requests to a mirror's engine
        self._ended: KvplaneError | None = None
        self._is_open = False

    async def run(self, epoch: int) -> None:
        """Serve the session until it ends. Unless the engine closed the session, the replica lapses when its lease is
        not renewed in time.

        `epoch` is the number of the engine life for which the workers' pages were claimed, NEW_EPOCH if none were.
        """
        offers: asyncio.Task[None] | None = None
        try:
            await self._open(epoch)
            if self._is_mirror and self._host.peers is not None:
                offers = asyncio.create_task(self._offer_news())
            await self._messages()
        except asyncio.CancelledError:
            self._raise_end()
        finally:
            if offers is not None:
                offers.cancel()
            if self._host.mirror.requests.send == self._send_cache_request:
                self._host.mirror.requests.send = None
            self._host.lost(self._request.nonce)
            if self._is_open:
                self._call.record("session_closed", self._ended.reason if self._ended else "OK")

    async def _open(self, epoch: int) -> None:
        async with self._writing:  # the answer to open is the first message, before any drain notice
            if self._is_mirror:
                opened = self._host.attach(self._request, self.end)
                self._host.mirror.requests.send = self._send_cache_request
                self._host.mirror.requests.send_again()
            else:
                opened = await self._host.open_in_slices(self._request, self.end, epoch)
            self._is_open = True
            self._call.record("session_opened", "OK")
            await self._context.write(pb.SessionResponse(opened=wire.encode_opened(opened)).SerializeToString())

    async def write(self, raw: bytes) -> None:
        """Send a message. Concurrent calls write one after the other."""
        async with self._writing:
            await self._context.write(raw)

    async def _messages(self) -> None:
        nonce, host = self._request.nonce, self._host
        while True:
            raw = await next_message(self._context)
            if raw is None:
                return
            if wait_ms := self._call.owe(len(raw)):
                with host.holding(nonce):
                    await asyncio.sleep(wait_ms / 1000)
            if len(raw) > LONG_MESSAGE_BYTES:
                with host.holding(nonce):  # heartbeats behind it are not read while it waits for the thread
                    message = await self._offload(partial(_understand, raw, host, parse_long))
            else:
                message = _understand(raw, host)
            kind = message.kind
            if self._is_mirror and message.sent is not None:
                with host.holding(nonce):
                    progress = await self._mirror(message, message.sent)
                if progress is not None:
                    await self.write(progress_message(progress).SerializeToString())
            elif kind == "step" and not self._is_mirror:
                await self.write(await self._step(message))
            elif kind == "heartbeat":
                host.heartbeat(nonce, message.waiting_requests)
            elif kind == "close":
                await host.close_aside(nonce, self._offload)
                await self._left(self.replica)
                await self.write(pb.SessionResponse(closed=pb.SessionClosed()).SerializeToString())
                return
            else:
                raise InvalidArgument(
                    f"the message is {kind or 'empty'}",
                    field="kind",
                    remedy="send a step, a heartbeat or a close after `open`",
                )

    async def _step(self, message: _Message) -> bytes:
        """Apply a step and return the serialized answer. A refusal is an answer too, except for errors that end the
        session, which are raised.
        """
        try:
            step = message.step
            assert step is not None, message.kind
            if not isinstance(step, Step):
                raise step
            if not self._may_use_all_domains:
                self._check_domains(step)
            effort_ns = await self._paid([step], message.num_bytes)
            result = await self._host.step_aside(
                self._request.nonce, step, message.fingerprint, self._offload, effort_ns
            )
        except _ENDS_STREAM:
            raise
        except KvplaneError as error:
            if isinstance(error, PermissionDenied):
                self._call.record("refused", error.reason)
            refusal = wire.encode_step_error(message.seq, message.part, error)
            return pb.SessionResponse(error=refusal).SerializeToString()
        return result.message if isinstance(result, SentResult) else result_message(result)

    async def _paid(self, steps: Sequence[Step], num_bytes: int) -> int:
        """Count the work of a message beyond its bytes, and wait while the owner has used up its allowance. Returns the
        effort of the steps, in nanoseconds.
        """
        effort_ns = sum(map(self._host.steps.effort, steps))
        more = effort_ns // prices.BYTE_NS - num_bytes
        if more > 0 and (wait_ms := self._call.owe(more)):
            with self._host.holding(self._request.nonce):
                await asyncio.sleep(wait_ms / 1000)
        return effort_ns

    async def _mirror(self, message: _Message, sent: pb.SessionRequest) -> Progress | None:
        """Apply the steps of a mirrored engine, or take a piece of its image. Returns the answer, if there is one."""
        mirror: Mirror = self._host.mirror
        if message.kind == "image":
            piece = sent.image
            return await mirror.add_piece(piece.data, piece.first, piece.last, self._offload)
        if not self._may_use_all_domains:
            try:
                for one in message.mirrored:
                    self._check_domains(one.step)
            except PermissionDenied as error:
                raise mirror.cut_off(error) from None
        await self._paid([one.step for one in message.mirrored], message.num_bytes)
        steps = sent.mirrored_steps
        return await mirror.apply(message.mirrored, steps.newest, steps.age_ms, self._offload)

    async def _offer_news(self) -> None:
        """Let a mirror's engine know what peers have, until the session ends."""
        while True:
            self._host.mirror.offer_news()
            await asyncio.sleep(LOOK_S)

    def _send_cache_request(self, request: CacheRequest) -> None:
        """Send a change of the cache to the engine, after what is being sent. Does not wait."""
        task = asyncio.ensure_future(self.write(cache_request_message(request).SerializeToString()))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # a broken stream: the request is sent again on the next one

    def _check_domains(self, step: Step) -> None:
        for at, domains in step.domains if isinstance(step, SentStep) else _domains_of(step):
            for domain in domains:
                self._call.check_domain(domain, f"parts[{at}].news.domain")

    def end(self, reason: KvplaneError) -> None:
        """End the stream with the error `reason`, even while it waits for a message or a step."""
        self._ended = reason
        if self._task is not None:
            self._task.cancel()

    def _raise_end(self) -> NoReturn:
        """Raise the error with which `end` ended the stream; raise any other cancellation again."""
        if self._ended is None:
            raise asyncio.CancelledError
        if self._task is not None:
            self._task.uncancel()
        raise self._ended


def _domains_of(step: Step) -> Iterator[tuple[int, Collection[str]]]:
    """Yield the cache domains of new requests, by the number of their part."""
    for at, part in enumerate(step.parts):
        if part.news.slot:
            yield at, {*part.news.domain} or {""}


def _understand(raw: bytes, host: ReplicaHost, parser: Callable[..., pb.SessionRequest] = parse) -> _Message:
    """Read a message. For a step that cannot be read, the returned message has the error, because such a step does not
    end the stream. Raises InvalidArgument if the message cannot be parsed.
    """
    digest_size = host.scheme.digest.size
    step = host.steps.read(raw, partial(_parts_of, digest_size))
    if step is not None and not step.kinds & HAS_KEYS:  # which the core does not read
        return _Message("step", step, step.seq, step.part, fingerprint(raw), num_bytes=len(raw))
    message = parser(pb.SessionRequest, raw)
    kind, sent = message.WhichOneof("kind") or "", message.step
    if kind == "mirrored_steps":
        num_parts = sum(len(one.step.parts) for one in message.mirrored_steps.steps)
        check_parts(num_parts + len(message.mirrored_steps.steps), _MIRRORED * host.max_rows)
        mirrored = decode_mirrored(message.mirrored_steps, digest_size)
        return _Message(kind, sent=message, mirrored=mirrored, num_bytes=len(raw))
    if kind == "image":
        return _Message(kind, sent=message)
    if kind == "heartbeat" and message.heartbeat.HasField("waiting_requests"):
        return _Message(kind, waiting_requests=message.heartbeat.waiting_requests)
    if kind != "step":
        return _Message(kind)
    decoded: Step | KvplaneError
    try:
        check_parts(len(sent.parts), host.max_rows)  # a part is an object of a kilobyte
        decoded = wire.decode_step(sent, digest_size)
        decoded = decoded if step is None else step.of(decoded.parts)
    except KvplaneError as error:
        decoded = error
    return _Message(kind, decoded, sent.seq, sent.part, fingerprint(raw), num_bytes=len(raw))


def _parts_of(digest_size: int, raw: bytes) -> list[Part]:
    return wire.decode_step(parse(pb.SessionRequest, raw).step, digest_size).parts
