"""The Allocation service (allocation.proto)."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from functools import partial

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import InvalidArgument, NotFound, Unavailable
from kvplane.base.step import Cache, Part, Step
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.counters import GroupCounters
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.auth.gate import CALL
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.registry import Entry, Registration, Registry, UnknownReplica
from kvplane_service.replicas.host import new_replica
from kvplane_service.replicas.recent import INTERVAL_MS, Recent
from kvplane_service.rpc import decode, encode, lookups, prices
from kvplane_service.rpc.methods import Context, timed
from kvplane_service.rpc.reads import LongReads
from kvplane_service.rpc.session import SessionStreams
from kvplane_service.rpc.sources import Planned, names_policy, plan_source
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns
from kvplane_service.store.keeper import Keeper
from kvplane_service.store.owners import OwnerUnknown
from kvplane_service.store.ownership import Ownership
from kvplane_service.unary.calls import EvictCall, PrefetchCall, ResetCall, RetainCall

MAX_PAGE = 1000
DEFAULT_PAGE = 100
_AFTER = "after:"  # no name has a colon, so that no name is a page token
MAX_COUNTS = 64  # calls that may wait
MAX_REGISTRATIONS = 1024  # calls that may wait: after a restart the engines of all replicas may register at once


class AllocationServicer:
    """Serves registrations, look-ups and allocations: decodes each request, calls the replica, and encodes the
    answer.
    """

    def __init__(
        self, registry: VisibleReplicas, streams: SessionStreams, keeper: Keeper, ownership: Ownership
    ) -> None:
        self._registry = registry
        self._streams = streams
        self._keeper, self._ownership = keeper, ownership
        self._draining = False
        self._offload = Executor("new replicas")
        self._building = Turns("new replicas", MAX_REGISTRATIONS)
        self._lookups = lookups.LookUps()
        self._counts = LongReads("counts of blocks", MAX_COUNTS)

    def refuse_new(self) -> None:
        """Refuse further registrations of replicas, because the service drains."""
        self._draining = True

    # ---- replicas

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """Register a replica, or return the replica that is already registered under this name with equal settings. The
        block pool is built on a thread.
        """
        self._check_stays()
        self._registry.check_name(request.replica)
        planned = await timed(self._offload, partial(plan_source, request))
        await self._look_elsewhere(request.replica)
        if not names_policy(request):
            planned = planned.with_policy(self._registry.default_policy(request.replica))
        registration = Registration(
            planned.spec,
            request.num_ranks or 1,
            request.namespace_digest,
            planned.plans,
            registered_by=CALL.get().owner.name,
            model_name=request.model_name or request.model.model,
        )
        entry = self._registry.find_equal(request.replica, registration)
        if entry is None:
            async with self._building.take():  # limits count the replicas that were built before
                if self._registry.find_equal(request.replica, registration) is None:
                    CALL.get().count(prices.BLOCK_BYTES * planned.spec.num_blocks)
                    await self._resume_expired(request.replica, registration)
                entry = self._registry.find_equal(request.replica, registration)
                if entry is None:
                    replica = await self._offload(partial(new_replica, planned.spec))
                    self._check_stays()
                    entry = self._registry.add(request.replica, registration, replica)
            with contextlib.suppress(Unavailable):  # the first epoch needs the grant, a registration does not
                await self._ownership.ensure_granted(request.replica)
            await self._keeper.flush(request.replica)
        return _registered(planned, entry)

    def _check_stays(self) -> None:
        if self._draining:
            raise Unavailable("the service is draining", remedy="register the replica at another service")

    async def _look_elsewhere(self, name: str) -> None:
        """Raise Moved if another service has the replica; otherwise let this process take over a stored replica. Does
        nothing if the store is unavailable, so that a registration does not depend on the store.
        """
        if name not in self._registry:
            with contextlib.suppress(UnknownReplica, OwnerUnknown):
                await self._registry.ensure_local(name)

    async def _resume_expired(self, name: str, registration: Registration) -> None:
        """Let a stored replica that has expired come back, if this registration equals its own. Does nothing if the
        store is unavailable.
        """
        with contextlib.suppress(OwnerUnknown):
            await self._ownership.resume(name, registration)

    async def DeregisterReplica(self, request: pb.DeregisterReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """Remove a replica and delete it from the store. One that an engine uses only for an operator."""
        _check_operator(self._registry.get(request.replica))
        self._registry.remove(request.replica, request.epoch if request.HasField("epoch") else None)
        return pb.DeregisterReplicaResponse()

    async def DescribeReplica(self, request: pb.DescribeReplicaRequest, _: bytes) -> Message:  # noqa: N802
        """Return the state and the counters of a replica, and on request what the status page draws of it."""
        check_cells(request.map_cells)
        entry = self._registry.get(request.replica)

        def count() -> tuple[Sequence[GroupCounters], pb.PoolMap | None]:
            """Pass over the pool and the tables of all requests."""
            replica, cells = entry.host.replica, request.map_cells
            return replica.group_counters(), encode_map(replica, cells) if cells else None

        if request.map_cells:
            CALL.get().count(prices.BLOCK_BYTES * entry.host.replica.spec.num_blocks)
        groups, pool_map = await timed(lambda work: self._counts.run(entry.host, lambda: work), count)
        answer = encode.encode_description(entry, self._keeper.report(entry), groups)
        if pool_map is not None:
            answer.pool_map.CopyFrom(pool_map)
        if request.with_history:
            answer.history.CopyFrom(encode_history(entry.recent))
        return answer

    async def ListReplicas(self, request: pb.ListReplicasRequest, _: bytes) -> Message:  # noqa: N802
        """Return a page of the replicas that the caller may see, by name. The token of the next page has the last name
        on this one.
        """
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidArgument(f"it is {size}", field="page_size", remedy=f"give at most {MAX_PAGE}")
        after = request.page_token.removeprefix(_AFTER)
        if request.page_token and (after == request.page_token or not Registry.is_name(after)):
            what = f"{request.page_token[:140]!r} is not a page token"
            raise InvalidArgument(what, field="page_token", remedy="send the next_page_token of an earlier answer")
        page = self._registry.page(after, size + 1)
        answer = pb.ListReplicasResponse(replicas=[encode.encode_summary(one) for one in page[:size]])
        if len(page) > size:
            answer.next_page_token = _AFTER + page[size - 1].host.name
        return answer

    # ---- requests

    async def FindCacheHit(self, request: pb.FindCacheHitRequest, _: bytes) -> Message:  # noqa: N802
        """Return how many leading tokens of a prompt or of a request are cached. Changes nothing."""
        entry = self._registry.get(request.replica)
        host, kind = entry.host, request.WhichOneof("what")
        if kind is None:
            what = "neither content nor request_id is set"
            raise InvalidArgument(what, field="what", remedy="set exactly one of content and request_id")
        if kind == "request_id":
            return await self._lookups.find(host, partial(lookups.of_request, request.request_id, request.with_blocks))
        content = await entry.unary.hash_content(decode.decode_content(request.content, host.scheme))
        return await self._lookups.find(host, partial(lookups.of_content, content, request.with_blocks))

    async def AllocateSlots(self, request: pb.AllocateSlotsRequest, raw: bytes) -> bytes:  # noqa: N802
        """Create a request or extend it, and allocate blocks for the request's next tokens."""
        entry = self._entry(request.header)
        call = decode.decode_allocate(request, entry.host.scheme)
        await entry.host.idle()
        CALL.get().count(prices.HASH_BYTES * entry.unary.num_waiting_hashes(call))
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_allocated)

    async def CommitBlocks(self, request: pb.CommitBlocksRequest, raw: bytes) -> bytes:  # noqa: N802
        """Report computed tokens of a request, whose full blocks then get keys (hashes under which look-ups find them)
        in the prefix cache.
        """
        entry = self._entry(request.header)
        call = decode.decode_commit(request, entry.host.scheme)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_committed)

    async def Free(self, request: pb.FreeRequest, raw: bytes) -> bytes:  # noqa: N802
        """End or preempt a request, or release the blocks of an ended one."""
        entry, call = self._entry(request.header), decode.decode_free(request)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_freed)

    async def EvictBlocks(self, request: pb.EvictBlocksRequest, raw: bytes) -> bytes:  # noqa: N802
        """Remove the listed blocks from the prefix cache, so that look-ups no longer find them."""
        entry, call = self._entry(request.header), EvictCall(tuple(request.block_ids))
        await entry.host.idle()
        _check_operator(entry)
        step = Step(0, 1, [Part(cache=Cache(evicted=list(call.blocks)))])
        CALL.get().count(entry.host.steps.effort(step) // prices.BYTE_NS)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_evicted)

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, raw: bytes) -> bytes:  # noqa: N802
        """Remove all blocks from the prefix cache, if no request holds a block."""
        entry = self._entry(request.header)
        _check_operator(entry)
        CALL.get().count(prices.BLOCK_BYTES * entry.host.replica.spec.num_blocks)
        return await entry.unary.do(decode.decode_header(request.header, raw), ResetCall(), encode.encode_reset)

    async def Prefetch(self, request: pb.PrefetchRequest, raw: bytes) -> bytes:  # noqa: N802
        """Copy what only the disk has of a prompt's longest hit to the host tier."""
        entry = self._entry(request.header)
        content = decode.decode_content(request.content, entry.host.scheme)
        call = PrefetchCall(content, request.within_ms * 1_000_000)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_prefetched)

    async def Retain(self, request: pb.RetainRequest, raw: bytes) -> bytes:  # noqa: N802
        """Retain the cached prefix of a prompt for a time, or release it."""
        entry, owner = self._entry(request.header), CALL.get().owner
        content = decode.decode_content(request.content, entry.host.scheme)
        share = owner.limits.retained_percent
        call = RetainCall(content, request.ttl_ms * 1_000_000, request.priority, owner.name, share)
        return await entry.unary.do(decode.decode_header(request.header, raw), call, encode.encode_retained)

    async def Session(self, context: Context) -> None:  # noqa: N802
        """Serve the bidirectional stream on which an engine sends its steps and gets the answers."""
        await self._streams.serve(context)

    # ---- inside

    def _entry(self, header: pb.MutationHeader) -> Entry:
        try:
            return self._registry.get(header.replica)
        except NotFound as error:
            error.field = "header.replica"
            raise


def _check_operator(entry: Entry) -> None:
    """Raise PermissionDenied if an engine uses the replica and the caller is no operator: an engine changes its own
    cache in its steps, and closes its session before it deregisters.
    """
    if entry.host.is_in_use:
        CALL.get().check_operator(f"a change of {entry.host.name} while an engine uses it")


def _registered(planned: Planned, entry: Entry) -> pb.RegisterReplicaResponse:
    return pb.RegisterReplicaResponse(
        spec=wire.encode_spec(planned.spec),
        bytes_per_block=planned.bytes_per_block,
        max_concurrency=planned.max_concurrency,
        warnings=planned.warnings,
        epoch=entry.host.epoch,
    )


MAX_CELLS = 4096
MAX_NUMBERS = 1 << 16  # of a map, whatever the number of groups


def check_cells(cells: int) -> None:
    """Raise InvalidArgument if a map may not have this many cells."""
    if cells > MAX_CELLS:
        raise InvalidArgument(f"it is {cells}", field="map_cells", remedy=f"give at most {MAX_CELLS}")


def encode_map(core: ReplicaCore, wanted: int) -> pb.PoolMap:
    """Return the blocks in at most `wanted` cells. Passes over the pool: a few milliseconds per million blocks."""
    cells = min(wanted, core.spec.num_blocks, MAX_NUMBERS // (2 * len(core.spec.groups) + 1))
    *of_groups, other = (array("I", counts).tobytes() for counts in core.block_map(cells))
    pairs = zip(of_groups[::2], of_groups[1::2], strict=True)
    groups = [pb.GroupMap(held=held, cached=cached) for held, cached in pairs]
    return pb.PoolMap(cells=cells, groups=groups, other=other)


def encode_history(recent: Recent) -> pb.ReplicaHistory:
    """Return the samples of a replica."""
    return pb.ReplicaHistory(
        interval_ms=INTERVAL_MS,
        held=recent.held,
        hit=recent.hit,
        running=recent.running,
        waiting=recent.waiting,
        steps_per_s=recent.steps_per_s,
    )
