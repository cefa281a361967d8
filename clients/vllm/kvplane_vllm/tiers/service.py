"""The service that follows the tiers: there they are a replica of their own, whose pool is host memory.

It has each step of the allocator, and so all that it has of any replica that it follows; and it passes on what callers
ask: to evict blocks, to forget all, to retain a prefix, or to read a prompt from the disk.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvplane.base.session import CacheRequest
from kvplane.base.step import Step, StepResult
from kvplane.blocking.mirror import MirrorSender
from kvplane_vllm.engine_lock import EngineLock
from kvplane_vllm.following import last_epoch, sender_of

if TYPE_CHECKING:
    from kvplane.base.sections import Peers
    from kvplane_core.face.native import NativeReplica
    from kvplane_vllm.target import Target


class Service:
    """The sender of the steps.

    Attributes:
        known_epoch: the newest epoch of the replica at the service; 0 if it has none, or cannot be reached.
    """

    def __init__(self, target: Target) -> None:
        """Wait for the service only to ask for the last epoch, for a limited time. Raises OtherWriter if another engine
        process of this host writes the replica.
        """
        self._target, self._lock = target, EngineLock(target.address, target.replica)
        self.known_epoch = last_epoch(target)
        self._sender: MirrorSender | None = None
        self._asked: deque[CacheRequest] = deque()
        self._news: deque[CacheRequest] = deque()  # what peers have
        self._carried_out: dict[int, int] = {}  # by number of a step: the request that it carries out

    @property
    def sender(self) -> MirrorSender:
        """The sender, when the allocator is made."""
        assert self._sender is not None, "the allocator is made"
        return self._sender

    def begin(self, replica: NativeReplica, namespace: bytes, num_ranks: int) -> None:
        """Send the state of the allocator, and from then on its steps. `namespace`: of what peers may read; b"" = none
        reads it.
        """
        self._sender = sender_of(self._target, replica, takes_rows=True, namespace=namespace, num_ranks=num_ranks)

    def send(self, step: Step, result: StepResult) -> None:
        """Send a step that has ended. Never waits."""
        carried_out, self._carried_out = self._carried_out, {}
        self.sender.submit([(step, result)], carried_out)

    def next_request(self, seq: int) -> CacheRequest | None:
        """Return what a caller asks for, to be carried out in the first part of this step; None = nothing."""
        return self._next(self._asked, seq)

    def next_news(self, seq: int) -> Peers | None:
        """Return what peers have stored or evicted, as `next_request`."""
        request = self._next(self._news, seq)
        return request.rows.peers if request is not None and request.rows is not None else None

    def _next(self, waiting: deque[CacheRequest], seq: int) -> CacheRequest | None:
        for one in self.sender.take_cache_requests():
            is_news = one.rows is not None and (one.rows.peers.slot or one.rows.peers.gone)
            (self._news if is_news else self._asked).append(one)
        if not waiting:
            return None
        request = waiting.popleft()
        self._carried_out[seq] = request.number
        return request

    def close(self) -> None:
        """Notify the service that the engine leaves."""
        self.sender.close()
        self._lock.release()
