"""What host tiers have really written, kept apart from seals: the oracle of what peers may read.

It shares no code with the reader: it has a digest of each payload, by memory, slot and version, noted while it was
written, and looks at what a reader accepts and at what movers scatter into pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import compress
from threading import Lock

from torch import Tensor

from kvplane_kernels.interface import GroupPages
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.tiers import HostSlots, PeerSlots
from kvplane_worker.tiers.seal import Content
from kvplane_worker.tiers.slots import Fill


@dataclass
class Ledger:
    """Attributes:
    written: digest and key, by memory, slot and version.
    payloads: all digests.
    wrong: what a reader accepted, or a mover scattered, and no tier wrote.
    accepted: copies that readers accepted.
    refused: pieces that they refused.
    torn: reads of which the owner changed a part.
    of_groups: accepted copies by group.
    """

    written: dict[tuple[bytes, int, int], tuple[bytes, int]] = field(default_factory=dict)
    payloads: set[bytes] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    accepted: int = 0
    refused: int = 0
    torn: int = 0
    of_groups: Counter[int] = field(default_factory=Counter)
    lock: Lock = field(default_factory=Lock)

    def keep(self, memories: Collection[bytes]) -> None:
        """Forget what was written to other memories, and what was overwritten. Call it while nothing is loaded."""
        with self.lock:
            last = {(memory, slot): version for memory, slot, version in self.written if memory in memories}
            kept = {(memory, slot, version) for (memory, slot), version in last.items()}
            self.written = {place: noted for place, noted in self.written.items() if place in kept}
            self.payloads = {digest for digest, _ in self.written.values()}


LEDGER = Ledger()  # of the run that is under way


def digest_of(row: Tensor) -> bytes:
    return sha256(row.contiguous().numpy().tobytes()).digest()


class NotedSlots(HostSlots):
    """A host tier that notes what it writes."""

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        def noted(rows: Tensor) -> list[bool]:
            good = fill(rows)
            with LEDGER.lock:
                for row, content in compress(zip(rows, contents, strict=True), good):
                    digest = digest_of(row)
                    LEDGER.payloads.add(digest)
                    LEDGER.written[self.incarnation, content.slot, content.version] = digest, content.key
            return good

        return super().write(contents, num_bytes, noted)


class CheckedPeers(PeerSlots):
    """A tier of peers whose accepted copies are looked up in the ledger."""

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        rows = super().read(contents, num_bytes)
        with LEDGER.lock:
            LEDGER.refused += rows is None
            for at, content in enumerate(contents if rows is not None else ()):
                assert rows is not None
                self._look_up(content, rows[at])
        return rows

    def _look_up(self, content: Content, row: Tensor) -> None:
        peer = next((one for one in self.peers if 0 <= content.slot - one.first < one.memory.num_slots), None)
        LEDGER.accepted += 1
        LEDGER.of_groups[content.group] += 1
        if peer is None:
            return  # it was replaced while it was read
        found = LEDGER.written.get((peer.incarnation, content.slot - peer.first, content.version))
        if found != (digest_of(row), content.key):
            LEDGER.wrong.append(
                f"slot {content.slot} version {content.version} was accepted, which holds something else"
            )


class CheckedOps(TorchOps):
    """Operations on pages that look up the bytes that go to pages."""

    def scatter(self, pages: GroupPages, blocks: Sequence[int], rows: Tensor) -> None:
        with LEDGER.lock:
            if any(digest_of(row) not in LEDGER.payloads for row in rows):
                LEDGER.wrong.append(f"bytes that no tier wrote went to pages {list(blocks)[:9]}")
        super().scatter(pages, blocks, rows)
