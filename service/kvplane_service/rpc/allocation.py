"""The Allocation service."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import InvalidArgument, NotFound, Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.core.lookup import Hit
from kvplane_service.registry import Entry, Registration, UnknownReplica
from kvplane_service.replicas.host import ReplicaHost, UnaryStep, new_replica
from kvplane_service.rpc import decode, encode
from kvplane_service.rpc.methods import Context
from kvplane_service.rpc.session import SessionStreams, fingerprint
from kvplane_service.rpc.sources import Planned, plan_source
from kvplane_service.runtime.executors import Executor
from kvplane_service.store.ownership import Durable, OwnerUnknown
from kvplane_service.unary.hashing import ContentHasher
from kvplane_service.unary.service import Appended, Hashes

Act: TypeAlias = Callable[[], Message]

MAX_PAGE = 1000
DEFAULT_PAGE = 100


class AllocationServicer:
    """Adapters from requests to the registry, hosts and unary calls."""

    def __init__(
        self, registry: VisibleReplicas, streams: SessionStreams, hasher: ContentHasher, durable: Durable
    ) -> None:
        self._registry = registry
        self._streams = streams
        self._hasher = hasher
        self._keeper = durable.keeper
        self._draining = False
        self._offload = Executor("new replicas")

    def refuse_new(self) -> None:
        """Register no further replicas."""
        self._draining = True

    # ---- replicas

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. Large pools are built beside the event loop."""
        if self._draining:
            raise Unavailable("the service is going away", remedy="register elsewhere")
        self._registry.check_name(request.replica)
        planned = await self._offload(partial(plan_source, request))
        registration = Registration(planned.spec, request.num_ranks or 1, request.namespace_digest, planned.plans)
        await self._look_elsewhere(request.replica)
        entry = self._registry.find_equal(request.replica, registration)
        if entry is None:
            replica = await self._offload(partial(new_replica, planned.spec))
            entry = self._registry.add(request.replica, registration, replica)
            await self._keeper.settle(request.replica)
        return _registered(planned, entry)

    async def _look_elsewhere(self, name: str) -> None:
        """Raise Moved when another service has the replica; a store that is away keeps nobody from registering one."""
        if name not in self._registry:
            with contextlib.suppress(UnknownReplica, OwnerUnknown):
                await self._registry.bring(name)

    async def DeregisterReplica(self, request: pb.DeregisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        self._registry.remove(request.replica, request.epoch if request.HasField("epoch") else None)
        return pb.DeregisterReplicaResponse()

    async def DescribeReplica(self, request: pb.DescribeReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        entry = self._registry.get(request.replica)
        await entry.host.settled()
        return encode.encode_description(entry, self._keeper.report(entry))

    async def ListReplicas(self, request: pb.ListReplicasRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. The token of a page is the name that it ends with."""
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidArgument(f"{size} entries", field="page_size", remedy=f"ask for at most {MAX_PAGE}")
        if request.page_token and not self._registry.is_name(request.page_token):
            raise InvalidArgument("no page ends there", field="page_token", remedy="send next_page_token of an answer")
        page = self._registry.page(request.page_token, size + 1)
        answer = pb.ListReplicasResponse(replicas=[encode.encode_summary(one.host) for one in page[:size]])
        if len(page) > size:
            answer.next_page_token = page[size - 1].host.name
        return answer

    # ---- requests

    async def FindCacheHit(self, request: pb.FindCacheHitRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        host = self._registry.get(request.replica).host
        await host.settled()
        host.check_readable()
        kind = request.WhichOneof("what")
        if kind is None:
            raise InvalidArgument("nothing to look up", field="what", remedy="give content or request_id")
        if kind == "request_id":
            return _hit_of_request(host, request)
        content = await decode.decode_content(request.content, host, self._hasher)
        await host.settled()
        host.check_readable()
        replica = host.replica
        digests = replica.digests_of(decode.as_probe(content))
        most = 1 if content.skip_reading else content.num_tokens  # of which the last is never hit
        hit = replica.lookup(digests, content.domain, most)
        return _found(hit, content.num_tokens, _hashes(digests), request.with_blocks)

    async def AllocateSlots(self, request: pb.AllocateSlotsRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""

        async def prepare(entry: Entry, at: UnaryStep) -> Act:
            content, appended = None, Appended()
            if request.HasField("content") and request.HasField("appended"):
                raise InvalidArgument("a new request has none", field="appended", remedy="put all tokens into content")
            if request.HasField("content"):
                content = await decode.decode_content(request.content, entry.host, self._hasher)
            if request.HasField("appended"):
                appended = await self._appended(entry, request.request_id, request.appended)
            call = decode.decode_allocate(request, content, appended)
            return lambda: encode.encode_allocated(entry.unary.allocate(at, call))

        return await self._mutate(request.header, raw, prepare)

    async def CommitBlocks(self, request: pb.CommitBlocksRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""

        async def prepare(entry: Entry, at: UnaryStep) -> Act:
            appended = Appended()
            if request.HasField("appended"):
                appended = await self._appended(entry, request.request_id, request.appended)
            call = decode.decode_commit(request, appended)
            return lambda: encode.encode_committed(*entry.unary.commit(at, call))

        return await self._mutate(request.header, raw, prepare)

    async def Free(self, request: pb.FreeRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""

        async def prepare(entry: Entry, at: UnaryStep) -> Act:
            end = decode.decode_end(request.end)
            return lambda: pb.FreeResponse(
                result=encode.encode_mutation(entry.unary.free(at, request.request_id, end, request.fence_seq))
            )

        return await self._mutate(request.header, raw, prepare)

    async def EvictBlocks(self, request: pb.EvictBlocksRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""

        async def prepare(entry: Entry, at: UnaryStep) -> Act:
            blocks = list(request.block_ids)
            return lambda: pb.EvictBlocksResponse(result=encode.encode_mutation(entry.unary.evict(at, blocks)))

        return await self._mutate(request.header, raw, prepare)

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""

        async def prepare(entry: Entry, at: UnaryStep) -> Act:
            return lambda: encode.encode_reset(entry.unary.reset(at))

        return await self._mutate(request.header, raw, prepare)

    async def Session(self, context: Context) -> None:  # noqa: N802
        """See the contract."""
        await self._streams.serve(context)

    # ---- inside

    async def _mutate(
        self, header: pb.MutationHeader, raw: bytes, prepare: Callable[[Entry, UnaryStep], Awaitable[Act]]
    ) -> bytes:
        """The answer of a mutation; when the call has an op_id, the answer that its first call got.

        `prepare` may wait (for hashes); the act that it returns is one uninterrupted piece.
        """
        entry, at = self._entry(header), decode.decode_header(header)
        await entry.host.settled()
        entry.host.check_unary(at)
        bytes_of_call = fingerprint(raw) if header.op_id else b""
        answer = entry.unary.ops.find(header.op_id, bytes_of_call)
        if answer is None:
            act = await prepare(entry, at)
            answer = entry.unary.ops.find(header.op_id, bytes_of_call)
            if answer is None:
                answer = act().SerializeToString()
                entry.unary.ops.keep(header.op_id, bytes_of_call, answer)
        return answer

    def _entry(self, header: pb.MutationHeader) -> Entry:
        try:
            return self._registry.get(header.replica)
        except NotFound as error:
            error.field = "header.replica"
            raise

    async def _appended(self, entry: Entry, name: str, message: pb.AppendedTokens) -> Appended:
        known = entry.unary.known(name)
        return await decode.decode_appended(message, known, entry.host.scheme, self._hasher)


def _registered(planned: Planned, entry: Entry) -> pb.RegisterReplicaResponse:
    return pb.RegisterReplicaResponse(
        spec=wire.encode_spec(planned.spec),
        bytes_per_block=planned.bytes_per_block,
        max_concurrency=planned.max_concurrency,
        warnings=planned.warnings,
        epoch=entry.host.epoch,
    )


def _hit_of_request(host: ReplicaHost, request: pb.FindCacheHitRequest) -> pb.FindCacheHitResponse:
    requests = host.replica.requests
    names = ((slot, requests.request_id[slot]) for slot in requests.slots())
    slot = next((slot for slot, name in names if name == request.request_id and name), None)
    if slot is None:
        raise NotFound(
            f"there is no request {request.request_id[:140]!r}", field="request_id", remedy="give its content"
        )
    hit = host.replica.peek_slot(slot)
    digests = requests.content[slot].digests
    return _found(hit, requests.num_tokens[slot], _hashes(digests), request.with_blocks)


def _hashes(digests: list[bytes]) -> Hashes:
    return Hashes(len(digests), digests[-1]) if digests else Hashes()


def _found(hit: Hit, num_tokens: int, hashes: Hashes, with_blocks: bool) -> pb.FindCacheHitResponse:
    return pb.FindCacheHitResponse(
        hit_tokens=hit.num_tokens,
        junction=hit.junction,
        num_tokens=num_tokens,
        num_hashes=hashes.count,
        last_hash=hashes.last,
        blocks=encode.encode_groups(hit.blocks) if with_blocks else (),
    )
