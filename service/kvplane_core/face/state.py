"""The image of a replica: its whole state as bytes, so that another replica continues from it exactly.

    export_state(replica) -> bytes           load_state(spec, bytes) -> Replica, which answers every later step equally;
                                             NativeReplica.load does the same
    slices(replica) -> the same bytes in pieces, of the time of the call
    digest(replica) -> the SHA-256 of the bytes on which later decisions depend

The layout: MAGIC, then named values as in `packed_values`, each preceded by its name (a text). All lists are by block,
by slot or by group; a set or dict is keyed by one of these.

    spec        digest of the spec: another pool cannot load the state
    replica     seq, keeps_keys, shown
    pool        epoch, generation, counter, step, executed_through and further numbers; reserved and busy blocks
    pool.NAME   one column of the pool per value
    free        free blocks in eviction order
    eviction    only with another policy than LRU: its name, number of free blocks before the divider, `hit_end` of the
                requests, and for TURN_TAIL the superseded blocks, for HAZARD what it has learnt
    split       only of a split pool: number of free blocks of cut superblocks, and which superblocks had a state last
    retained    only if a prefix is: owner, domain, hash, priority, end and keys of each; the free blocks that are
                evicted after those of `free`, by priority
    stamped     only if the next part orders stamps: the blocks that get them
    keys        repeated: first block, different (domain, group) pairs, then per block from there on: number of its pair
                plus 1, 0 = no key; and the digests of the blocks that have a key
    tiers       only with tiers: slots, keys, jobs in flight
    more_keys   further keys of blocks with their tokens, in order of registration: events name them in this order
    shared      keys of several blocks, these in the order in which they are hit
    requests    by column; only the serial of a free slot
    content     repeated: slot, hashes, and the state of the hasher if the service hashes the tokens
    tracker     the records of steps in flight
    manager     repeated, by group: the attributes in the manager's STATE
    counters, residency, pool_counters, group_counters and, per column, ages of blocks: statistics, which decide nothing

Left out: what is empty between two steps (orders and events); and what
is derived (the bounds of the fast path, the index of keys). So two cores that decided equally have equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme, HashTail, RequestHasher
from kvplane.base.step import ExtraKeys, Multimodal
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.packed_values import ValueReader


def export_state(replica: ReplicaCore) -> bytes:
    """Return the image of a replica. No step may be open."""
    return b"".join(replica.image())


def export_hashed(replica: ReplicaCore) -> bytes:
    """Return the image as `export_state`, as if all requests had been added with hashes: without the states of hashers,
    which have tokens and salts. Further content of these requests must come as hashes.
    """
    return b"".join(replica.image(hashed=True))


def digest(replica: ReplicaCore) -> str:
    """Return the SHA-256 (hex) of the state without its statistics, also before the events of a step are taken.

    Equal operations on equal replicas give equal digests, in any process and on any core.
    """
    hashed = hashlib.sha256()
    for piece in replica.image(with_statistics=False):
        hashed.update(piece)
    return hashed.hexdigest()


def slices(replica: ReplicaCore) -> Iterator[bytes]:
    """Return the image of a replica at the time of this call, in pieces. No step may be open."""
    return replica.image()


def read_entries(image: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an image. Raises InvalidArgument."""
    if not image.startswith(MAGIC):
        raise not_loaded("state", "the bytes are not an exported state of this version")
    reader = ValueReader(image, len(MAGIC))
    while reader.has_more:
        yield str(reader.read()), reader.read()


def not_loaded(field: str, problem: str) -> InvalidArgument:
    """Return the refusal of an image. `field`: state or eviction."""
    remedy = "export the state with the same version and spec"
    if field == "eviction":
        remedy = "load the state into a replica with the policy of the state"
    return InvalidArgument(problem, field=field, remedy=remedy)


MAGIC = b"kvplane state 2\n"


def spec_digest(spec: ReplicaSpec) -> bytes:
    """Return the digest of the normalized spec: equal for equal decisions, whatever numbers its classes have. The
    eviction policy, which is not in its text, has an entry of its own.
    """
    return digest_as_stated(spec.normalized)


def spec_digests(spec: ReplicaSpec) -> list[bytes]:
    """Return the digests that images of the spec have, that of new ones first; earlier ones have that of the spec as
    it is.
    """
    return [spec_digest(spec), digest_as_stated(spec)]


def digest_as_stated(spec: ReplicaSpec) -> bytes:
    """Return the digest of the spec as it is."""
    of_states = f" blocks_per_state={spec.blocks_per_state}" if spec.blocks_per_state > 1 else ""
    of_tiers = f" checkpoint_percent={spec.checkpoint_percent}" if spec.checkpoint_percent else ""
    shares = [tier.retained_percent for tier in spec.tiers]
    of_tiers += f" retained_percent={shares}" if any(shares) else ""
    return hashlib.sha256((repr(spec) + of_states + of_tiers).encode()).digest()


def hasher_state(hasher: RequestHasher) -> list[object]:
    """Return what `hasher_of` makes a hasher of."""
    extra, tail = hasher.extra_keys, hasher.tail
    items = [(item.identifier, item.offset, item.length) for item in extra.multimodal]
    return [tail.num_blocks, tail.digest, tail.pending, extra.lora, extra.salt, items, list(extra.prompt_embeds)]


def hasher_of(state: list[Any], scheme: HashScheme) -> RequestHasher:
    """Make the hasher of a request."""
    num_blocks, digest, pending, lora, salt, items, embeds = state
    extra = ExtraKeys(lora, salt, tuple(Multimodal(*item) for item in items), tuple(embeds))
    return RequestHasher(scheme, extra, HashTail(num_blocks, digest, pending))
