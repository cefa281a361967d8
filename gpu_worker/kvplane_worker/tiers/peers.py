"""What the host tiers of other replicas have, as one tier that is only read.

    slot of this tier = first slot of a peer + slot of the peer's host tier

The service says which slots stand for which peer, and in which memory (incarnation) it found them. A copy counts only
if its seal has the namespace of this worker, never what the peer claims, that memory, and the group, slot, version and
key of the job. It is verified in memory of this process, before any page is written. Nothing is asked of the peer, and
nothing holds its slots: a slot that was written again meanwhile is a failed load.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from kvplane.base.groups import TierSpec
from kvplane_worker.tiers.arena import PeerMemory, aligned, sizes
from kvplane_worker.tiers.kept import Kept
from kvplane_worker.tiers.seal import HEADER_BYTES, IDENTITY_BYTES, Content, held_in, was_written_again
from kvplane_worker.tiers.slots import Fill, SlotCounts, Slots

HOST = 0  # number of the host tier of every replica that has a tier of peers
_FIRST = attrgetter("first")


@dataclass(frozen=True, slots=True)
class Peer:
    """The host tier of a peer on one rank.

    Attributes:
        first: slot of the tier of peers that stands for its slot 0.
        incarnation: 16 bytes that name its memory.
        memory: where it is read.
    """

    first: int
    incarnation: bytes
    memory: PeerMemory = field(compare=False)


class PeerSlots(Slots):
    """The tier of peers. See `Slots`; nothing is written into it."""

    def __init__(self, spec: TierSpec, slot_bytes: int, namespace: bytes = bytes(IDENTITY_BYTES)) -> None:
        """`namespace`: of this worker, as its own host tier has it."""
        self.spec = spec
        self.slot_bytes = aligned(slot_bytes)
        self.namespace, self.incarnation = namespace, bytes(IDENTITY_BYTES)
        self.counts = SlotCounts()
        self._peers: tuple[Peer, ...] = ()  # replaced as a whole: movers read it
        self._threads = threading.local()

    @property
    def peers(self) -> Sequence[Peer]:
        """The peers, by their first slots."""
        return self._peers

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Read these peers from now on, each at slots of its own."""
        self._peers = tuple(sorted(peers, key=_FIRST))

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        """Write nothing: the slots are those of peers."""
        del num_bytes, fill
        return [False] * len(contents)

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        """See `Slots.read`. None also if a peer is not there any more."""
        if num_bytes > self.slot_bytes:
            return None
        headers, rows = self._staging(len(contents), num_bytes)
        payloads = _bytes_of(rows.view(-1))
        if not self._copy(contents[0].slot, headers, payloads):
            return None
        for at, content in enumerate(contents):
            header = headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
            if not self._is_right(content, header, payloads[at * num_bytes : (at + 1) * num_bytes]):
                return None
        return rows

    def note_unread(self, contents: Sequence[Content]) -> None:
        """See `Slots.note_unread`: failed if the peer is gone, discarded if it wrote a slot again, else refused."""
        header = memoryview(bytearray(HEADER_BYTES))
        for content in contents:
            expected = self._expected(content)
            if expected is None or not self._copy(content.slot, header, memoryview(bytearray())):
                self.counts.failed += len(contents)
                return
            if was_written_again(bytes(header), expected):
                self.counts.discarded += len(contents)
                return
        self.counts.refused += len(contents)

    def _expected(self, content: Content) -> Content | None:
        """Return what the peer's slot holds if it is what a job names; None if the peer is gone."""
        peer = self._peer_of(content.slot)
        if peer is None:
            return None
        identity, slot = self.namespace + peer.incarnation, content.slot - peer.first
        return content._replace(identity=identity, tier=HOST, slot=slot)

    def _is_right(self, content: Content, header: memoryview, payload: memoryview) -> bool:
        """Whether what was copied is what a job names."""
        expected = self._expected(content)
        return expected is not None and bytes(header) == expected.seal(payload)

    def _copy(self, slot: int, headers: memoryview, payloads: memoryview) -> bool:
        """Copy as `PeerMemory.read` does, slots of this tier: consecutive ones may be of two peers."""
        count, width = sizes(headers, payloads)
        first = 0
        while first < count:
            peer = self._peer_of(slot + first)
            if peer is None or width > peer.memory.slot_bytes:
                return False
            at = slot + first - peer.first
            end = min(count, first + peer.memory.num_slots - at)
            to = headers[first * HEADER_BYTES : end * HEADER_BYTES], payloads[first * width : end * width]
            if not peer.memory.read(at, *to):
                return False
            first = end
        return True

    def _peer_of(self, slot: int) -> Peer | None:
        peers = self._peers
        at = bisect_right(peers, slot, key=_FIRST) - 1
        return peers[at] if at >= 0 and slot - peers[at].first < peers[at].memory.num_slots else None

    def _staging(self, count: int, num_bytes: int) -> tuple[memoryview, Tensor]:
        """Return memory of this thread for this number of headers and payloads. No transfer writes it."""
        first, size = count * HEADER_BYTES, count * (HEADER_BYTES + num_bytes)
        buffer: Tensor | None = getattr(self._threads, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._threads.buffer = torch.empty(size, dtype=torch.uint8)
        return _bytes_of(buffer[:first]), buffer[first:size].view(count, num_bytes)

    def held(self, slot: int) -> tuple[int, int]:
        """See `Slots.held`."""
        header = memoryview(bytearray(HEADER_BYTES))
        return held_in(bytes(header)) if self._copy(slot, header, memoryview(bytearray())) else (0, 0)

    def close(self, kept: Kept | None = None, erase: bool = False) -> None:
        """Release the memory of all peers."""
        del kept, erase
        peers, self._peers = self._peers, ()
        for peer in peers:
            peer.memory.close()


def _bytes_of(row: Tensor) -> memoryview:
    """Return the bytes of a row, writable."""
    view: memoryview = row.numpy().data
    return view
