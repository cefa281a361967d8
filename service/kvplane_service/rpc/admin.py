"""The Admin service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import FailedPrecondition, InternalError, InvalidArgument, LimitExceeded
from kvplane.base.hashing import split_hashes
from kvplane.base.step import ExtraKeys
from kvplane.v1 import admin_pb2 as pb
from kvplane.v1 import allocation_pb2
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.core.inspect import take_snapshot
from kvplane_service.decisions.log import Entry
from kvplane_service.decisions.recording import header_of, message_of
from kvplane_service.explain.service import Prompt, explain_prompt, explain_request, reaches_registration
from kvplane_service.replicas.host import ReplicaHost, ReplicaState
from kvplane_service.rpc import decode
from kvplane_service.rpc.about import About
from kvplane_service.rpc.encode import encode_explanation, encode_snapshot
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns
from kvplane_service.unary.calls import Content
from kvplane_service.unary.hashing import hash_tokens

NS_PER_MS = 1_000_000
MAX_UNRECORDED = 4096
MAX_EXPLANATIONS = 32  # waiting calls
_WITHOUT_ENGINE = "its pages cannot be hit until the engine reconnects; name a request to explain a past admission"
_LOOK_S = 0.5  # interval at which a recording checks that its replica still exists


class AdminServicer:
    """Operator calls: status, drain, snapshots, explanations, recordings."""

    def __init__(self, registry: VisibleReplicas, about: About) -> None:
        self._registry = registry
        self._about = about
        self._explaining = Turns("explanations", MAX_EXPLANATIONS)
        self._offload = Executor("explanations")

    async def Status(self, request: pb.StatusRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        del request
        about, states = self._about, [entry.host.state for entry in self._registry]
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
        )

    async def Drain(self, request: pb.DrainRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        del request
        self._about.drain_asked.set()
        return pb.DrainResponse()

    async def Snapshot(self, request: pb.SnapshotRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. Runs on the event loop, because the state must not change: takes seconds for a million
        blocks, which is why only operators may call it.
        """
        host = self._registry.get(request.replica).host
        await host.idle()
        try:
            snapshot = take_snapshot(host.replica)
        except AssertionError as error:
            raise InternalError(
                f"an invariant of {request.replica} is violated: {error}",
                remedy="report it, with the log of the replica",
            ) from error
        return encode_snapshot(snapshot, request.summary)

    async def Explain(self, request: pb.ExplainRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        async with self._explaining.take():
            return await self._explain(request)

    async def _explain(self, request: pb.ExplainRequest) -> Message:
        entry = self._registry.get(request.replica)
        host, kind = entry.host, request.WhichOneof("what")
        if kind is None:
            raise InvalidArgument("nothing to explain", field="what", remedy="give content or request_id")
        if kind == "request_id":
            return encode_explanation(host, await explain_request(host, request.request_id, self._offload))
        await host.idle()
        host.check_readable(_WITHOUT_ENGINE)
        content = await entry.unary.hash_content(decode.decode_content(request.content, host.scheme))
        await host.idle()
        host.check_readable(_WITHOUT_ENGINE)
        prompt = _prompt(host, content, request.content)
        return encode_explanation(host, await explain_prompt(host, prompt, self._offload))

    async def Record(self, request: pb.RecordRequest) -> AsyncIterator[Message]:  # noqa: N802
        """See the contract."""
        host = self._registry.get(request.replica).host
        log, size = host.decisions, host.scheme.digest.size
        if not reaches_registration(host):
            how = f"{log.num_lost} decisions since its registration are no longer kept"
            if not log.num_lost:
                how = "its decisions before it was recovered from a store are unknown"
            raise FailedPrecondition(
                f"{host.name} cannot be recorded: {how}",
                field="replica",
                remedy="start recording right after registration, or raise decision_log_steps and log_bytes",
            )
        queue: asyncio.Queue[Entry] = asyncio.Queue()
        entries = iter(log)
        log.follow(queue.put_nowait)
        try:
            yield header_of(host.name, host.replica.spec)
            for entry in entries:
                yield message_of(entry, size)
            while not (host.is_retired and queue.empty()):
                if queue.qsize() > MAX_UNRECORDED:
                    raise LimitExceeded(f"{queue.qsize()} decisions wait to be recorded", remedy="read faster")
                with contextlib.suppress(TimeoutError):
                    yield message_of(await asyncio.wait_for(queue.get(), _LOOK_S), size)
        finally:
            log.unfollow(queue.put_nowait)


def _prompt(host: ReplicaHost, content: Content, message: allocation_pb2.RequestContent) -> Prompt:
    """The prompt to explain: hashed content, and a function that hashes its token ids with other extra keys."""
    scheme, tokens = host.scheme, message.token_ids

    def hash_with(keys: ExtraKeys) -> list[bytes]:
        return split_hashes(hash_tokens(scheme, tokens, keys, None).hashes, scheme.digest.size)

    return Prompt(
        digests=host.replica.digests_of(content.as_probe()),
        num_tokens=content.num_tokens,
        domain=content.domain,
        extra_keys=wire.decode_extra_keys(message.extra_keys),
        hash_with=hash_with if tokens else None,
    )
