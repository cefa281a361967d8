"""The service that follows the tiers: there they are a replica of their own, whose pool is host memory.

It has each step of the allocator, and so all that it has of any replica that it follows; and it passes on what callers
ask: to evict blocks, to forget all, to retain a prefix, or to read a prompt from the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplane.base.sections import Peers
from kvplane.base.session import CacheRequest
from kvplane.base.step import Step, StepResult
from kvplane.blocking.mirror import MirrorSender
from kvplane_vllm.engine_lock import EngineLock
from kvplane_vllm.following import last_epoch, sender_of

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
    from kvplane_vllm.target import Target


MOST_ROWS = 2048  # of what peers have, in one step; one that the service sends has no more


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
        self._news: deque[tuple[int, Peers]] = deque()  # what peers have, by number of the request
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
        self._take()
        if not self._asked:
            return None
        request = self._asked.popleft()
        self._carried_out[seq] = request.number
        return request

    def next_news(self, seq: int) -> Peers | None:
        """Return what peers have stored or evicted, as `next_request`: all that waits, in steps of MOST_ROWS."""
        self._take()
        found = list[Peers]()
        while self._news and (not found or sum(map(_size, (*found, self._news[0][1]))) <= MOST_ROWS):
            self._carried_out[seq], rows = self._news.popleft()
            found.append(rows)
        return joined(found) if found else None

    def _take(self) -> None:
        for one in self.sender.take_cache_requests():
            if one.rows is not None and _size(one.rows.peers):
                self._news.append((one.number, one.rows.peers))
            else:
                self._asked.append(one)

    def close(self) -> None:
        """Notify the service that the engine leaves."""
        self.sender.close()
        self._lock.release()


def joined(sections: Sequence[Peers]) -> Peers:
    """Return one section that does what these do, one after another: slots that are gone are emptied before the rows,
    so of each slot only the last change counts.
    """
    rows, gone = dict[int, tuple[int, int, bytes, str]](), dict[int, None]()
    slot_of = dict[tuple[int, bytes, str], int]()  # by key: it is in one slot
    for one in sections:
        for slot in one.gone:
            rows.pop(slot, None)
            gone[slot] = None
        size = len(one.hashes) // max(1, len(one.slot))
        for at, slot in enumerate(one.slot):
            digest = bytes(one.hashes[at * size : (at + 1) * size])
            key = one.group[at], digest, one.domain[at] if one.domain else ""
            before = slot_of.get(key, slot)
            if before != slot and before in rows and rows[before][1:] == key:
                del rows[before]
                gone[before] = None
            slot_of[key] = slot
            rows.pop(slot, None)
            rows[slot] = one.version[at], *key
    columns = list(zip(*rows.values(), strict=True)) or [(), (), (), ()]
    versions, groups, digests, domains = map(list, columns)
    return Peers(list(rows), versions, groups, b"".join(digests), domains, list(gone))


def _size(rows: Peers) -> int:
    return len(rows.slot) + len(rows.gone)
