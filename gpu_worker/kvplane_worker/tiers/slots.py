"""The slots of one tier of a worker: each holds the bytes of one block of any group on this rank, under a seal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from kvplane.base.errors import OutOfMemory
from kvplane.base.groups import TierSpec
from kvplane.base.worker import TierUse
from kvplane_worker.memory import free_host_bytes, pin_host_memory
from kvplane_worker.tiers.arena import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from kvplane_worker.tiers.arena import Arena
from kvplane_worker.tiers.arena import aligned as aligned
from kvplane_worker.tiers.kept import Kept
from kvplane_worker.tiers.seal import HEADER_BYTES, IDENTITY_BYTES, UNSEALED, Content, held_in

Fill = Callable[[Tensor], list[bool]]  # fills rows, and says of each whether it is what it should be

MOST_OF_FREE = 0.8  # share of the free host memory that a tier may take


@dataclass(slots=True)
class SlotCounts:
    """What movers did with one tier, in blocks unless stated otherwise."""

    saved: int = 0
    saved_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    discarded: int = 0  # the page, the engine life or the slot of a peer changed meanwhile
    refused: int = 0  # the slot did not hold what the job names, or was damaged
    failed: int = 0  # reads and writes that the disk refused, or did in part; blocks of peers that are gone


class Slots(Protocol):
    """A tier. A slot is written by one thread at a time, and by none while another one reads it: the core sees to it.

    Attributes:
        spec: kind and number of slots.
        slot_bytes: room for the payload of a slot.
        counts: what happened.
        namespace: 16 bytes that name what gives the bytes their meaning.
        incarnation: 16 bytes that name the memory, or the content of the file.
    """

    spec: TierSpec
    slot_bytes: int
    counts: SlotCounts
    namespace: bytes
    incarnation: bytes

    @property
    def identity(self) -> bytes:
        """As in `Content`."""
        return self.namespace + self.incarnation

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        """Let `fill` write the payloads of consecutive slots, uint8 [len(contents), num_bytes], and seal those whose
        result is True. Until then a slot holds nothing. Returns which are sealed.
        """

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        """Return the payloads of consecutive slots, uint8 [len(contents), num_bytes], or None if one of them is not
        what it should be. Valid until the next `read` of the same thread.
        """

    def note_unread(self, contents: Sequence[Content]) -> None:
        """Count the slots that the last `read` of this thread did not return, by the reason."""
        self.counts.refused += len(contents)

    @property
    def is_suspended(self) -> bool:
        """Whether a disk that fails is left alone for a while. Nothing else fails."""
        return False

    def held(self, slot: int) -> tuple[int, int]:
        """Return group and bytes of what the slot says that it holds, unverified."""

    def close(self, kept: Kept | None = None, erase: bool = False) -> None:
        """Release the memory. `kept`: what the slots hold, for the next worker, if no process writes them any more.
        `erase`: leave nothing of it.
        """


def use_of(tier: Slots) -> TierUse:
    """Return what a worker reports of a tier."""
    counts = tier.counts
    return TierUse(
        tier.spec.kind,
        slot_bytes=tier.slot_bytes,
        saved_blocks=counts.saved,
        saved_bytes=counts.saved_bytes,
        loaded_blocks=counts.loaded,
        loaded_bytes=counts.loaded_bytes,
        discarded_blocks=counts.discarded,
        refused_blocks=counts.refused,
        failed_blocks=counts.failed,
        suspended=tier.is_suspended,
    )


class HostSlots(Slots):
    """A tier in host memory."""

    def __init__(self, spec: TierSpec, slot_bytes: int, device: str, namespace: bytes = bytes(IDENTITY_BYTES)) -> None:
        """Allocate the slots, zeroed; a GPU `device` copies from and to them without the processor. `namespace`: names
        what gives the bytes their meaning, equal in all replicas that may read them.

        Raises:
            OutOfMemory: they do not fit into the free memory of the host.
        """
        self.spec = spec
        self.slot_bytes = aligned(slot_bytes)
        self.counts = SlotCounts()
        self.namespace = namespace
        size, free = spec.num_blocks * self.slot_bytes, int(free_host_bytes() * MOST_OF_FREE)
        if size > free:
            raise OutOfMemory(
                f"the host tier needs {size} bytes, {free} bytes are {MOST_OF_FREE:.0%} of what is free",
                field="tiers",
                remedy=f"register the replica with a host tier of at most {free // self.slot_bytes} blocks",
                metadata={"asked": str(size), "free": str(free), "num_blocks": str(free // self.slot_bytes)},
            )
        self.arena = Arena.create(spec.num_blocks, self.slot_bytes)
        self.incarnation = self.arena.incarnation
        self._view, self._headers = self.arena.rows, self.arena.headers
        self._rows = torch.frombuffer(self._view, dtype=torch.uint8).view(spec.num_blocks, self.slot_bytes)
        pin_host_memory(self._rows, device)

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        """See `Slots.write`."""
        first, count = contents[0].slot, len(contents)
        self._headers[first * HEADER_BYTES : (first + count) * HEADER_BYTES] = UNSEALED * count
        good = fill(self._rows[first : first + count, :num_bytes])
        for content in compress(contents, good):
            self._set_header(content.slot, content.seal(self._payload(content.slot, num_bytes)))
        return good

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        """See `Slots.read`."""
        if num_bytes > self.slot_bytes:
            return None
        for content in contents:
            if self._header(content.slot) != content.seal(self._payload(content.slot, num_bytes)):
                return None
        first = contents[0].slot
        return self._rows[first : first + len(contents), :num_bytes]

    def held(self, slot: int) -> tuple[int, int]:
        """See `Slots.held`."""
        return held_in(self._header(slot))

    def close(self, kept: Kept | None = None, erase: bool = False) -> None:
        """See `Slots.close`."""
        del self._rows  # the memory is unmapped with the last view of it
        self.arena.close()

    def _payload(self, slot: int, num_bytes: int) -> memoryview:
        first = slot * self.slot_bytes
        return self._view[first : first + num_bytes]

    def _header(self, slot: int) -> bytes:
        return bytes(self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES])

    def _set_header(self, slot: int, header: bytes) -> None:
        self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = header
