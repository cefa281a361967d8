"""The Admin service (admin.proto)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import FailedPrecondition, InternalError, InvalidArgument, LimitExceeded
from kvplane.base.hashing import split_hashes
from kvplane.base.step import ExtraKeys
from kvplane.v1 import admin_pb2 as pb
from kvplane.v1 import allocation_pb2
from kvplane_core.face import loader
from kvplane_core.face.inspect import take_snapshot
from kvplane_core.face.state import export_hashed
from kvplane_service.auth.gate import CALL
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.decisions.log import Entry, Life
from kvplane_service.decisions.recording import header_of, message_of
from kvplane_service.explain.service import (
    Prompt,
    explain_block,
    explain_prompt,
    explain_request,
    reaches_registration,
)
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.rpc import decode, prices
from kvplane_service.rpc.about import About
from kvplane_service.rpc.encode import encode_changes, encode_explanation, encode_requests, encode_snapshot
from kvplane_service.rpc.reads import LongReads
from kvplane_service.runtime.executors import Executor, Offload
from kvplane_service.runtime.rota import Busy
from kvplane_service.runtime.slices import Turns
from kvplane_service.unary.calls import Content
from kvplane_service.unary.hashing import hash_tokens

NS_PER_MS = 1_000_000
MAX_UNRECORDED = 4096
MAX_EXPLANATIONS = 32  # calls that may wait
MAX_SNAPSHOTS = 4  # calls that may wait; an answer may have hundreds of megabytes
MAX_LISTS = 32  # calls that may wait
MAX_REQUESTS, DEFAULT_REQUESTS = 1000, 100  # of a list
_WITHOUT_ENGINE = "wait until its engine reconnects, or name a request to explain a past admission"
_LOOK_S = 0.5  # interval at which a recording checks that its replica still exists


class AdminServicer:
    """Serves the calls of operators: status, drain, snapshots, explanations, recordings."""

    def __init__(self, registry: VisibleReplicas, about: About) -> None:
        self._registry = registry
        self._about = about
        self._explaining = Turns("explanations", MAX_EXPLANATIONS)
        self._offload = Executor("explanations")
        self._snapshots = LongReads("snapshots", MAX_SNAPSHOTS)
        self._lists = LongReads("lists of requests", MAX_LISTS)

    async def Status(self, request: pb.StatusRequest, _: bytes) -> Message:  # noqa: N802
        """Return version, uptime and number of replicas by state."""
        (core, why), about, states = loader.chosen(), self._about, [entry.host.state for entry in self._registry]
        return pb.StatusResponse(
            version=about.version,
            now_unix_ms=about.wall_ns() // NS_PER_MS,
            uptime_ms=about.uptime_ns // NS_PER_MS,
            draining=about.draining,
            replicas=len(states),
            live_replicas=states.count(ReplicaState.LIVE),
            lapsed_replicas=states.count(ReplicaState.LAPSED),
            tracing=about.tracing,
            metrics_address=about.metrics_address,
            recovering_replicas=states.count(ReplicaState.RECOVERING),
            core=allocation_pb2.CoreStatus(name=core, reason=why),
        )

    async def Drain(self, request: pb.DrainRequest, _: bytes) -> Message:  # noqa: N802
        """Ask the process to drain; the call returns at once."""
        self._about.drain_asked.set()
        return pb.DrainResponse()

    async def Snapshot(self, request: pb.SnapshotRequest, _: bytes) -> bytes:  # noqa: N802
        """Return the whole allocator state of a replica, read and encoded on a thread. Takes seconds for a million
        blocks, in which the replica's engine waits, which is why only operators may call it. Raises Busy if too many
        calls wait.
        """
        host = self._registry.get(request.replica).host
        await host.idle()
        CALL.get().count(prices.BLOCK_BYTES * host.replica.spec.num_blocks)
        return await self._snapshots.run(host, lambda: partial(_snapshot, host, request.summary))

    async def ListRequests(self, request: pb.ListRequestsRequest, _: bytes) -> Message:  # noqa: N802
        """Return the requests that hold the most blocks. They are counted on a thread. Raises Busy if too many calls
        wait.
        """
        limit = request.limit or DEFAULT_REQUESTS
        if limit > MAX_REQUESTS:
            raise InvalidArgument(f"it is {limit}", field="limit", remedy=f"give at most {MAX_REQUESTS}")
        host = self._registry.get(request.replica).host
        await host.idle()
        return await self._lists.run(host, lambda: partial(encode_requests, host.replica, limit))

    async def Explain(self, request: pb.ExplainRequest, _: bytes) -> Message:  # noqa: N802
        """Explain why the hit of a prompt or a request is not longer. Raises Busy if too many calls wait."""
        with self._explaining.place():
            return await self._explain(request)

    async def _explain(self, request: pb.ExplainRequest) -> Message:
        entry = self._registry.get(request.replica)
        host, kind = entry.host, request.WhichOneof("what")
        if kind is None:
            what = "none of content, request_id and block is set"
            raise InvalidArgument(what, field="what", remedy="set exactly one of content, request_id and block")
        readings = 2 if kind == "content" else 1  # with the extra keys of others too
        CALL.get().count(readings * (prices.DECISION_BYTES * len(host.decisions) + host.decisions.num_bytes))
        if kind == "request_id":
            found = await explain_request(host, request.request_id, self._explaining, self._offload)
            return encode_explanation(host, found)
        if kind == "block":
            return encode_changes(host, await explain_block(host, request.block, self._explaining, self._offload))
        await host.idle()
        host.check_readable(_WITHOUT_ENGINE)
        content = await entry.unary.hash_content(decode.decode_content(request.content, host.scheme))
        async with self._explaining.turn(host.steps):
            host.check_readable(_WITHOUT_ENGINE)
            prompt = _prompt(host, content, request.content, self._offload)
            return encode_explanation(host, await explain_prompt(host, prompt, self._offload))

    async def Record(self, request: pb.RecordRequest) -> AsyncIterator[Message | bytes]:  # noqa: N802
        """Stream all decisions since the registration of a replica, or its state and the decisions from now on, and
        every new one until the replica is deregistered.

        Raises:
            Busy: too many calls wait for the state of a replica.
            FailedPrecondition: the decision log does not reach back to the registration, or the replica of which the
                divergence is asked for has not diverged.
            LimitExceeded: the client reads too slowly.
        """
        host = self._registry.get(request.replica).host
        log, size = host.decisions, host.scheme.digest.size
        if request.divergence:
            for message in _divergence_of(host):
                yield message
            return
        if request.from_now:
            async for encoded in self._record_from_now(host):
                yield encoded
            return
        if not reaches_registration(host):
            how = f"its decision log has dropped the first {log.num_lost} decisions"
            if not log.num_lost:
                how = "it was recovered from a store, which has no earlier decisions"
            raise FailedPrecondition(
                f"{host.name} cannot be recorded: {how}",
                field="replica",
                remedy="record from now on (--from-now), or raise decision_log_steps and log_bytes",
            )
        waiting = _Waiting()
        entries = iter(log)
        log.follow(waiting.put)
        try:
            yield header_of(host.name, host.replica.spec)
            for entry in entries:
                yield message_of(entry, size)
            async for message in _new_decisions(host, waiting):
                yield message
        finally:
            log.unfollow(waiting.put)

    async def _record_from_now(self, host: ReplicaHost) -> AsyncIterator[Message | bytes]:
        waiting = _Waiting()

        def encoded() -> bytes:
            """Return the message of a life that begins with the state: hundreds of megabytes, encoded on the thread."""
            life = Life(host.replica.epoch, (), (), 0, state=export_hashed(host.replica))
            return message_of(life, host.scheme.digest.size).SerializeToString()

        def begin() -> Callable[[], bytes]:
            if host.is_step_open:
                raise Busy(f"a step of {host.name} is open", field="replica", remedy="retry")
            # No decision is made before the state is read, so every later one reaches `waiting`.
            host.decisions.follow(waiting.put)
            return encoded

        await host.idle()
        CALL.get().count(prices.BLOCK_BYTES * host.replica.spec.num_blocks)
        try:
            state = await self._snapshots.run(host, begin)
            yield header_of(host.name, host.replica.spec)
            yield state
            async for message in _new_decisions(host, waiting):
                yield message
        finally:
            host.decisions.unfollow(waiting.put)


async def _new_decisions(host: ReplicaHost, waiting: _Waiting) -> AsyncIterator[Message]:
    while not (host.is_retired and waiting.is_empty):
        with contextlib.suppress(TimeoutError):
            yield message_of(await waiting.get(_LOOK_S), host.scheme.digest.size)


def _divergence_of(host: ReplicaHost) -> Iterator[Message]:
    last = host.mirror.last
    if last is None:
        raise FailedPrecondition(
            f"{host.name} has not diverged from an engine", field="divergence", remedy="see MirrorStatus.divergences"
        )
    yield header_of(host.name, host.replica.spec)
    yield from (message_of(entry, host.scheme.digest.size) for entry in last.entries())


class _Waiting:
    """The decisions that wait for the client of a recording, at most MAX_UNRECORDED.

    `put` checks the limit, because the stream of a client that does not read is blocked and cannot check it. Beyond the
    limit all waiting decisions are dropped, and `get` raises LimitExceeded when the stream continues.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Entry] = asyncio.Queue(MAX_UNRECORDED)
        self._is_over = False

    def __len__(self) -> int:
        return self._queue.qsize()

    @property
    def is_empty(self) -> bool:
        """Whether the client has got every decision."""
        return not self._is_over and self._queue.empty()

    def put(self, entry: Entry) -> None:
        """Append a decision, or drop all if too many wait."""
        if self._is_over:
            return
        self._is_over = self._queue.full()
        if self._is_over:
            self._queue = asyncio.Queue()
        else:
            self._queue.put_nowait(entry)

    async def get(self, timeout_s: float) -> Entry:
        """Remove and return the oldest decision.

        Raises:
            TimeoutError: there is none within `timeout_s` seconds.
            LimitExceeded: the decisions were dropped.
        """
        if self._is_over:
            what = f"more than {MAX_UNRECORDED} decisions wait for the client"
            raise LimitExceeded(what, remedy="read the stream faster")
        return await asyncio.wait_for(self._queue.get(), timeout_s)


def _snapshot(host: ReplicaHost, summary: bool) -> bytes:
    try:
        return encode_snapshot(take_snapshot(host.replica), summary)
    except AssertionError as error:
        raise InternalError(
            f"the state of {host.name} violates an invariant: {error}",
            remedy="report this bug, with the log of the service",
        ) from error


def _prompt(host: ReplicaHost, content: Content, message: allocation_pb2.RequestContent, offload: Offload) -> Prompt:
    """Return the prompt to explain: its hashed content, and a function that hashes its token ids with other extra keys
    (salt, adapter, multimodal items) on a thread, and counts them.
    """
    scheme, tokens = host.scheme, message.token_ids

    async def hash_with(keys: ExtraKeys) -> list[bytes]:
        CALL.get().count(prices.TOKEN_BYTES * len(tokens))
        hashed = await offload(lambda: hash_tokens(scheme, tokens, keys, None).hashes)
        return split_hashes(hashed, scheme.digest.size)

    return Prompt(
        digests=host.replica.digests_of(content.as_probe()),
        num_tokens=content.num_tokens,
        domain=content.domain,
        extra_keys=wire.decode_extra_keys(message.extra_keys),
        hash_with=hash_with if tokens else None,
    )
