"""Memories of peers that are not what they seem, and readers with planted faults."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import torch

from kvplane.base.job_table import JobRow
from kvplane_worker.tiers import Movers, PeerSlots
from kvplane_worker.tiers.arena import PeerMemory, sizes
from kvplane_worker.tiers.peers import HOST
from kvplane_worker.tiers.seal import HEADER_BYTES, IDENTITY_BYTES, Content
from tests.peers.ledger import LEDGER, CheckedPeers


class Memory:
    """What a peer reads of a sound memory. A fault changes some reads; `incarnation` is that of the sound memory."""

    share = 0.3  # of reads

    def __init__(self, sound: PeerMemory, namespace: bytes, incarnation: bytes, rng: Random) -> None:
        self.sound, self.namespace, self.incarnation, self.rng = sound, namespace, incarnation, rng
        self.num_slots, self.slot_bytes = sound.num_slots, sound.slot_bytes

    def read(self, slot: int, headers: memoryview, payloads: memoryview) -> bool:
        is_there, (count, width) = self.sound.read(slot, headers, payloads), sizes(headers, payloads)
        for at in range(count):
            if is_there and width and self.rng.random() < self.share:
                header = headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
                is_there = self.changed(slot + at, header, payloads[at * width : (at + 1) * width])
        return is_there

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        del slot, header, payload
        return True

    def close(self) -> None:
        self.sound.close()

    def resealed(self, header: memoryview, payload: memoryview, identity: bytes) -> None:
        """Seal other bytes honestly, under another identity, as the slot that the header names."""
        place, slot = (int.from_bytes(header[at : at + 4], "little") for at in (40, 44))
        version, key = (int.from_bytes(header[at : at + 8], "little") for at in (48, 56))
        payload[: len(payload) // 2] = bytes(len(payload) // 2)
        header[:] = Content(identity, HOST, slot, place & 0xFFFFFF, version, key).seal(payload)


class WrongBytes(Memory):
    """The header is right, and a bit of the bytes is not."""

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        payload[self.rng.randrange(len(payload))] ^= 1 << self.rng.randrange(8)
        return True


class OtherNamespace(Memory):
    """Bytes of other weights, sealed by a peer that claims their namespace."""

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        self.resealed(header, payload, bytes(IDENTITY_BYTES) + self.incarnation)
        return True


class OtherMemory(Memory):
    """The peer has started again under its name: equal slots, versions and keys, in another memory."""

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        self.resealed(header, payload, self.namespace + bytes(IDENTITY_BYTES))
        return True


class OtherSlot(Memory):
    """Another slot is read, as an address that is off by one would."""

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        return self.sound.read(self.rng.randrange(self.num_slots), header, payload)


class Torn(Memory):
    """The owner writes the slot between two parts of the read."""

    share = 1.0

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        time.sleep(self.rng.choice([0, 0.02, 0.08]))
        before, half = bytes(payload), len(payload) // 2
        late = memoryview(bytearray(len(payload)))
        self.sound.read(slot, memoryview(bytearray(HEADER_BYTES)), late)
        payload[half:] = late[half:]
        LEDGER.torn += bytes(payload) != before
        return True


class Slow(Memory):
    """A read takes longer than an engine waits for a load."""

    share = 0.1

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        time.sleep(0.15)
        return True


class Late(Memory):
    """The read begins late: by then the owner may have written the slot again."""

    share = 0.5

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        time.sleep(self.rng.choice([0.02, 0.08]))
        return self.sound.read(slot, header, payload)


class Gone(Memory):
    """The peer cannot be read."""

    def changed(self, slot: int, header: memoryview, payload: memoryview) -> bool:
        return False


MEMORIES: dict[str, type[Memory]] = {
    "sound": Memory,
    "wrong bytes": WrongBytes,
    "another namespace": OtherNamespace,
    "another memory": OtherMemory,
    "another slot": OtherSlot,
    "torn reads": Torn,
    "late": Late,
    "slow": Slow,
    "gone": Gone,
}


# -- planted faults of the reader ---------------------------------------------------------------------------------


class NoKey(CheckedPeers):
    """The key in the seal is not compared with that of the job."""

    def _is_right(self, content: Content, header: memoryview, payload: memoryview) -> bool:
        key = int.from_bytes(header[56:64], "little")
        return super()._is_right(content._replace(key=key), header, payload)


class NoIncarnation(CheckedPeers):
    """Any memory will do."""

    def _is_right(self, content: Content, header: memoryview, payload: memoryview) -> bool:
        peers = self._peers
        self._peers = tuple(replace(one, incarnation=bytes(header[24:40])) for one in peers)
        try:
            return super()._is_right(content, header, payload)
        finally:
            self._peers = peers


class NoVersion(CheckedPeers):
    """What the slot holds now is as good as what the job names."""

    def _is_right(self, content: Content, header: memoryview, payload: memoryview) -> bool:
        version, key = (int.from_bytes(header[at : at + 8], "little") for at in (48, 56))
        return super()._is_right(content._replace(version=version, key=key), header, payload)


class NoNamespace(CheckedPeers):
    """The namespace that the peer claims is trusted."""

    def _is_right(self, content: Content, header: memoryview, payload: memoryview) -> bool:
        mine, self.namespace = self.namespace, bytes(header[8:24])
        try:
            return super()._is_right(content, header, payload)
        finally:
            self.namespace = mine


class NoChecksum(CheckedPeers):
    """The header is compared, and not the checksum."""

    def _is_right(self, content: Content, header: memoryview, payload: memoryview) -> bool:
        peer = self._peer_of(content.slot)
        if peer is None:
            return False
        identity = self.namespace + peer.incarnation
        expected = content._replace(identity=identity, tier=HOST, slot=content.slot - peer.first).seal(payload)
        return bytes(header)[:72] == expected[:72]


class ScattersFirst(Movers):
    """Bytes go to the pages before their seal is verified."""

    def _load(self, piece: list[JobRow]) -> bool:
        tier = self.tiers[piece[0].tier]
        if isinstance(tier, PeerSlots):
            pages = self._place.pages.group(piece[0].group)
            for row in piece:
                unverified = torch.zeros(1, pages.bytes_per_block, dtype=torch.uint8)
                tier._copy(row.slot, memoryview(bytearray(HEADER_BYTES)), unverified[0].numpy().data)
                self._ops.scatter(pages, (row.block,), unverified)
        return super()._load(piece)


class Skips(Movers):
    """Says that blocks of one group are loaded from peers, and writes no page."""

    group = 0

    def _load(self, piece: list[JobRow]) -> bool:
        if piece[0].group == self.group and isinstance(self.tiers[piece[0].tier], PeerSlots):
            return True
        return super()._load(piece)


class SkipsSecond(Skips):
    group = 1


READERS: dict[str, tuple[type[PeerSlots], str]] = {
    "the key is not compared": (NoKey, "confused"),
    "the incarnation is not compared": (NoIncarnation, "another memory"),
    "the version is not compared": (NoVersion, "late"),
    "the peer's namespace is trusted": (NoNamespace, "another namespace"),
    "the checksum is not compared": (NoChecksum, "wrong bytes"),
}
