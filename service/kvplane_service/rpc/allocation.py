"""The Allocation service."""

from __future__ import annotations

import contextlib
from functools import partial

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import InvalidArgument, NotFound, Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.core.lookup import Hit
from kvplane_service.registry import Entry, Registration, UnknownReplica
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.rpc import decode, encode
from kvplane_service.rpc.methods import Context
from kvplane_service.rpc.session import SessionStreams
from kvplane_service.rpc.sources import Planned, plan_source
from kvplane_service.runtime.executors import Executor
from kvplane_service.store.ownership import Durable, OwnerUnknown
from kvplane_service.unary.calls import EvictCall, Hashes, ResetCall

MAX_PAGE = 1000
DEFAULT_PAGE = 100


class AllocationServicer:
    """Decodes requests, calls the registry, hosts and unary calls, and encodes the answers."""

    def __init__(self, registry: VisibleReplicas, streams: SessionStreams, durable: Durable) -> None:
        self._registry = registry
        self._streams = streams
        self._keeper = durable.keeper
        self._draining = False
        self._offload = Executor("new replicas")

    def refuse_new(self) -> None:
        """Register no further replicas."""
        self._draining = True

    # ---- replicas

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. The pool is built on a thread."""
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
            await self._keeper.flush(request.replica)
        return _registered(planned, entry)

    async def _look_elsewhere(self, name: str) -> None:
        """Raise Moved when another service has the replica. An unavailable store does not prevent a registration."""
        if name not in self._registry:
            with contextlib.suppress(UnknownReplica, OwnerUnknown):
                await self._registry.ensure_local(name)

    async def DeregisterReplica(self, request: pb.DeregisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        self._registry.remove(request.replica, request.epoch if request.HasField("epoch") else None)
        return pb.DeregisterReplicaResponse()

    async def DescribeReplica(self, request: pb.DescribeReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        entry = self._registry.get(request.replica)
        await entry.host.idle()
        return encode.encode_description(entry, self._keeper.report(entry))

    async def ListReplicas(self, request: pb.ListReplicasRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract. The token of a page is the last name on it."""
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidArgument(f"{size} entries", field="page_size", remedy=f"give at most {MAX_PAGE}")
        if request.page_token and not self._registry.is_name(request.page_token):
            raise InvalidArgument("not a page token", field="page_token", remedy="send a next_page_token")
        page = self._registry.page(request.page_token, size + 1)
        answer = pb.ListReplicasResponse(replicas=[encode.encode_summary(one.host) for one in page[:size]])
        if len(page) > size:
            answer.next_page_token = page[size - 1].host.name
        return answer

    # ---- requests

    async def FindCacheHit(self, request: pb.FindCacheHitRequest, _: bytes) -> Message:  # noqa: N802
        """See the contract."""
        entry = self._registry.get(request.replica)
        host = entry.host
        await host.idle()
        host.check_readable()
        kind = request.WhichOneof("what")
        if kind is None:
            raise InvalidArgument("neither content nor request_id is given", field="what", remedy="give one of them")
        if kind == "request_id":
            return _hit_of_request(host, request)
        content = await entry.unary.hash_content(decode.decode_content(request.content, host.scheme))
        await host.idle()
        host.check_readable()
        replica = host.replica
        digests = replica.digests_of(content.as_probe())
        most = 1 if content.skip_reading else content.num_tokens  # of which the last is never hit
        hit = replica.lookup(digests, content.domain, most)
        return _found(hit, content.num_tokens, _hashes(digests), request.with_blocks)

    async def AllocateSlots(self, request: pb.AllocateSlotsRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""
        entry = self._entry(request.header)
        call = decode.decode_allocate(request, entry.host.scheme)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_allocated)

    async def CommitBlocks(self, request: pb.CommitBlocksRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""
        entry = self._entry(request.header)
        call = decode.decode_commit(request, entry.host.scheme)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_committed)

    async def Free(self, request: pb.FreeRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""
        entry, call = self._entry(request.header), decode.decode_free(request)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_freed)

    async def EvictBlocks(self, request: pb.EvictBlocksRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""
        entry, call = self._entry(request.header), EvictCall(tuple(request.block_ids))
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_evicted)

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, raw: bytes) -> bytes:  # noqa: N802
        """See the contract."""
        entry = self._entry(request.header)
        return await entry.unary.do(decode.decode_header(request.header, raw), ResetCall(), encode.encode_reset)

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
        single_group_hit=hit.single_group_hit,
        num_tokens=num_tokens,
        num_hashes=hashes.count,
        last_hash=hashes.last,
        blocks=encode.encode_groups(hit.blocks) if with_blocks else (),
    )
