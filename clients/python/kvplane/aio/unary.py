"""The calls of a service that need no session, as coroutines.

`kvplane/blocking/unary.py` is generated from this file: `python scripts/gen_blocking.py` after a change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import HERE, Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.unary import calls
from kvplane.unary.calls import Call
from kvplane.v1 import admin_pb2, allocation_pb2

Answer = TypeVar("Answer", bound=Message)


class UnaryCalls(ABC):
    """The calls of a service that need no session. Each raises the errors that `kvplane.Client` names."""

    @abstractmethod
    async def _do(self, call: Call[Answer]) -> Answer:
        """Send a call, as often as it takes, and return its answer."""

    async def register_replica(
        self,
        replica: str,
        source: ReplicaSpec | ModelSource | LayerSource,
        *,
        num_ranks: int = 1,
        namespace_digest: bytes = b"",
        model_name: str = "",
    ) -> allocation_pb2.RegisterReplicaResponse:
        """Create a replica. A repeated call with equal arguments returns the existing replica.

        Args:
            replica: name, 1 to 128 characters of [a-zA-Z0-9._/-].
            source: the KV cache groups, or a model or layers from which the service computes them.
            num_ranks: ranks of the engine; all have the same memory layout.
            namespace_digest: digest of everything else that cached bytes depend on, such as the weights.
            model_name: name of the model, for operators; "" = that of a ModelSource.

        Raises:
            AlreadyExists: a replica of this name has other arguments.
            FailedPrecondition: the service does not know the eviction policy.
        """
        answer = await self._do(calls.register_replica(replica, source, num_ranks, namespace_digest, model_name))
        calls.check_policy(source, answer)
        return answer

    async def deregister_replica(self, replica: str, epoch: int | None = None) -> None:
        """Remove a replica. If `epoch` is given and differs from the replica's current epoch, the service refuses."""
        await self._do(calls.deregister_replica(replica, epoch))

    async def describe_replica(self, replica: str) -> allocation_pb2.DescribeReplicaResponse:
        """Return the state and the counters of a replica."""
        return await self._do(calls.describe_replica(replica))

    async def list_replicas(self, page_size: int = 100) -> AsyncIterator[allocation_pb2.ReplicaSummary]:
        """Yield a summary of every replica, ordered by name. The client requests `page_size` summaries at a time, on
        demand.
        """
        token = ""
        while True:
            page = await self._do(calls.list_replicas(page_size, token))
            for summary in page.replicas:
                yield summary
            token = page.next_page_token
            if not token:
                return

    async def find_cache_hit(
        self, replica: str, what: Content | str, *, with_blocks: bool = False
    ) -> allocation_pb2.FindCacheHitResponse:
        """Return how many leading tokens of a prompt, or of a request that the service knows, are cached. Changes no
        state, not even LRU order.
        """
        return await self._do(calls.find_cache_hit(replica, what, with_blocks))

    async def allocate_slots(
        self, replica: str, request: Allocate, at: At = HERE
    ) -> allocation_pb2.AllocateSlotsResponse:
        """Allocate KV cache blocks for the next tokens of a request."""
        return await self._do(calls.allocate_slots(replica, request, at))

    async def commit_blocks(self, replica: str, commit: Commit, at: At = HERE) -> allocation_pb2.CommitBlocksResponse:
        """Append tokens to a request and register full blocks in the prefix cache."""
        return await self._do(calls.commit_blocks(replica, commit, at))

    async def free(
        self, replica: str, request_id: str, ending: Ending = Ending.FREE, *, fence_seq: int = 0, at: At = HERE
    ) -> allocation_pb2.FreeResponse:
        """End or preempt a request. Its blocks return to the pool once the step with number `fence_seq` is executed; 0
        = immediately.
        """
        return await self._do(calls.free(replica, request_id, ending, fence_seq, at))

    async def evict_blocks(
        self, replica: str, block_ids: Sequence[int], at: At = HERE
    ) -> allocation_pb2.EvictBlocksResponse:
        """Remove the prefix cache keys of the given blocks, in this order, so that no later request has a cache hit on
        these blocks.
        """
        return await self._do(calls.evict_blocks(replica, block_ids, at))

    async def prefetch(
        self, replica: str, content: Content, *, within_s: float = 0.0, at: At = HERE
    ) -> allocation_pb2.PrefetchResponse:
        """Copy what only the disk has of a prompt's longest hit to the host tier, for a request that will come. It is
        left out if it would take longer than `within_s` seconds; 0 = at any time.
        """
        return await self._do(calls.prefetch(replica, content, within_s, at))

    async def retain(
        self, replica: str, content: Content, *, ttl_s: float, priority: int = 0, at: At = HERE
    ) -> allocation_pb2.RetainResponse:
        """Let the blocks of a cached prefix be evicted after all that are not retained, for `ttl_s` seconds, 7 days at
        most; those of lower `priority` (0 to 100) first. Nothing is held. 0 seconds release the prefix.
        """
        return await self._do(calls.retain(replica, content, ttl_s, priority, at))

    async def reset_prefix_cache(self, replica: str, at: At = HERE) -> allocation_pb2.ResetPrefixCacheResponse:
        """Remove every key of the prefix cache. Does nothing while a request holds a block; the answer states whether
        the keys were removed.
        """
        return await self._do(calls.reset_prefix_cache(replica, at))

    async def snapshot(self, replica: str, *, summary: bool = False) -> admin_pb2.SnapshotResponse:
        """Check the invariants of the replica's allocator and return its state; with `summary`, only the state's digest
        and counts.
        """
        return await self._do(calls.snapshot(replica, summary))

    async def status(self) -> admin_pb2.StatusResponse:
        """Return the version of the service, its replicas and the state of its telemetry."""
        return await self._do(calls.status())

    async def drain(self) -> None:
        """Ask the service to drain: it finishes the running calls and exits, as after SIGTERM. This call returns before
        the service has exited.
        """
        await self._do(calls.drain())

    async def list_requests(self, replica: str, limit: int = 0) -> admin_pb2.ListRequestsResponse:
        """Return the requests of a replica that hold the most blocks, at most `limit` (0 = 100)."""
        return await self._do(calls.list_requests(replica, limit))

    async def explain(self, replica: str, what: Content | str | int) -> admin_pb2.ExplainResponse:
        """Explain how many leading tokens of a prompt would be a cache hit now, or how many were a hit when the given
        request was admitted.
        """
        return await self._do(calls.explain(replica, what))
