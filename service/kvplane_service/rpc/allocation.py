"""The Allocation service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import InvalidArgument, NotFound, Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.contents import ContentHasher
from kvplane_service.core.lookup import Hit
from kvplane_service.core.replica import Replica
from kvplane_service.host import ReplicaHost
from kvplane_service.registry import Entry, Registration, Registry
from kvplane_service.rpc import decode, encode
from kvplane_service.rpc.methods import Context
from kvplane_service.rpc.session import SessionStreams, fingerprint
from kvplane_service.sources import Planned, plan_source
from kvplane_service.unary import Appended, Hashes

MAX_PAGE = 1000
DEFAULT_PAGE = 100


class AllocationServicer:
    """Adapters from requests to the registry, hosts and unary calls."""

    def __init__(self, registry: Registry, streams: SessionStreams, hasher: ContentHasher) -> None:
        self._registry = registry
        self._streams = streams
        self._hasher = hasher
        self._draining = False

    def refuse_new(self) -> None:
        """Register no further replicas."""
        self._draining = True

    # ---- replicas

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. Large pools are built beside the event loop."""
        if self._draining:
            raise Unavailable("the service is going away", remedy="register elsewhere")
        planned = plan_source(request)
        registration = Registration(planned.spec, request.num_ranks or 1, request.namespace_digest)
        entry = self._registry.find_equal(request.replica, registration)
        if entry is None:
            replica = await asyncio.to_thread(Replica, planned.spec)
            entry = self._registry.add(request.replica, registration, replica)
        return _registered(planned, entry)

    async def DeregisterReplica(self, request: pb.DeregisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        self._registry.remove(request.replica, request.epoch if request.HasField("epoch") else None)
        return pb.DeregisterReplicaResponse()

    async def DescribeReplica(self, request: pb.DescribeReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        return encode.encode_description(self._registry.get(request.replica))

    async def ListReplicas(self, request: pb.ListReplicasRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. The token of a page is the name that it ends with."""
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidArgument(f"{size} entries", field="page_size", remedy=f"ask for at most {MAX_PAGE}")
        if request.page_token and not self._registry.is_name(request.page_token):
            raise InvalidArgument(
                "no page ends there", field="page_token", remedy="send next_page_token of an answer"
            )
        page = self._registry.page(request.page_token, size + 1)
        answer = pb.ListReplicasResponse(replicas=[encode.encode_summary(one.host) for one in page[:size]])
        if len(page) > size:
            answer.next_page_token = page[size - 1].host.name
        return answer

    # ---- requests

    async def FindCacheHit(self, request: pb.FindCacheHitRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        host = self._registry.get(request.replica).host
        host.check_readable()
        kind = request.WhichOneof("what")
        if kind is None:
            raise InvalidArgument("nothing to look up", field="what", remedy="give content or request_id")
        if kind == "request_id":
            return _hit_of_request(host, request)
        content = await decode.decode_content(request.content, host.scheme, self._hasher)
        host.check_readable()
        replica = host.replica
        digests = replica.digests_of(decode.as_probe(content))
        hit = replica.lookup(digests, content.domain, content.num_tokens)
        return _found(hit, content.num_tokens, _hashes(digests), request.with_blocks)

    async def AllocateSlots(self, request: pb.AllocateSlotsRequest, raw: bytes) -> Message | bytes:  # noqa: N802
        """See the contract."""
        entry, at = self._entry(request.header), decode.decode_header(request.header)
        content, appended = None, Appended()
        if request.HasField("content"):
            content = await decode.decode_content(request.content, entry.host.scheme, self._hasher)
        if request.HasField("appended"):
            appended = await self._appended(entry, request.request_id, request.appended, content is not None)
        call = decode.decode_allocate(request, content, appended)
        return self._once(
            entry, request.header, raw, lambda: encode.encode_allocated(entry.unary.allocate(at, call))
        )

    async def CommitBlocks(self, request: pb.CommitBlocksRequest, raw: bytes) -> Message | bytes:  # noqa: N802
        """See the contract."""
        entry, at = self._entry(request.header), decode.decode_header(request.header)
        computed, commit = decode.decode_commit(request)
        appended = Appended()
        if request.HasField("appended"):
            appended = await self._appended(entry, request.request_id, request.appended, False)

        def commit_now() -> Message:
            step, hashes = entry.unary.commit(at, request.request_id, computed, appended, commit)
            return pb.CommitBlocksResponse(
                num_hashes=hashes.count, last_hash=hashes.last, result=encode.encode_mutation(step)
            )

        return self._once(entry, request.header, raw, commit_now)

    async def Free(self, request: pb.FreeRequest, raw: bytes) -> Message | bytes:  # noqa: N802
        """See the contract."""
        entry, at = self._entry(request.header), decode.decode_header(request.header)
        end = decode.decode_end(request.end)

        def free_now() -> Message:
            step = entry.unary.free(at, request.request_id, end, request.fence_seq)
            return pb.FreeResponse(result=encode.encode_mutation(step))

        return self._once(entry, request.header, raw, free_now)

    async def EvictBlocks(self, request: pb.EvictBlocksRequest, raw: bytes) -> Message | bytes:  # noqa: N802
        """See the contract."""
        entry, at = self._entry(request.header), decode.decode_header(request.header)

        def evict_now() -> Message:
            step = entry.unary.evict(at, list(request.block_ids))
            return pb.EvictBlocksResponse(result=encode.encode_mutation(step))

        return self._once(entry, request.header, raw, evict_now)

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, raw: bytes) -> Message | bytes:  # noqa: N802
        """See the contract."""
        entry, at = self._entry(request.header), decode.decode_header(request.header)

        def reset_now() -> Message:
            step = entry.unary.reset(at)
            return pb.ResetPrefixCacheResponse(
                done=step.parts[0].reset_done, result=encode.encode_mutation(step)
            )

        return self._once(entry, request.header, raw, reset_now)

    async def Session(self, context: Context) -> None:  # noqa: N802
        """See the contract."""
        await self._streams.serve(context)

    # ---- inside

    def _entry(self, header: pb.MutationHeader) -> Entry:
        try:
            return self._registry.get(header.replica)
        except NotFound as error:
            error.field = "header.replica"
            raise

    async def _appended(
        self, entry: Entry, name: str, message: pb.AppendedTokens, is_new: bool
    ) -> Appended:
        if is_new:
            raise InvalidArgument("a new request has none", field="appended", remedy="put all tokens into content")
        return await decode.decode_appended(message, entry.unary.known(name), entry.host.scheme, self._hasher)

    @staticmethod
    def _once(entry: Entry, header: pb.MutationHeader, raw: bytes, compute: Callable[[], Message]) -> Message | bytes:
        """The answer; when the call has an op_id, the answer that its first call got."""
        if not header.op_id:
            return compute()
        entry.host.check_unary(decode.decode_header(header))
        return entry.unary.ops.answer(
            header.op_id, fingerprint(raw), lambda: compute().SerializeToString()
        )


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
