"""The keys of the compiled core: as columns for a store, and as STORED events for a new subscriber (see `entries`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.cpp import _native
from kvplane_core.face.entries import MAX_HASHES, Entries, KeyRun


def published(core: object, spec: ReplicaSpec, digest_size: int, blocks: list[int]) -> Entries:
    """Return the published keys of these blocks, see `Replica.entries`."""
    bare: list[int] = []
    rows: dict[int, list[tuple[int, int, bytes, int]]] = {}
    horizon, domains, stamps = _native.read(core, "executed_through"), _native.read(core, "domains"), {}
    for block, (stamp, step, keys, _) in zip(blocks, _native.read(core, "keys", blocks), strict=True):
        stamps[block] = stamp
        if not keys or step > horizon:
            bare.append(block)
            continue
        for number, ((pair, digest), num_tokens) in enumerate(keys):
            rows.setdefault(pair, []).append((block, 0 if number else num_tokens, digest, stamp))
    flat = list(chain.from_iterable(rows.values()))
    num_groups = len(spec.groups)
    return Entries(
        digest_size,
        runs=[
            KeyRun(domains[(pair - 1) // num_groups], (pair - 1) % num_groups, len(run)) for pair, run in rows.items()
        ],
        block=[block for block, _, _, _ in flat],
        stamp=[stamp for _, _, _, stamp in flat],
        num_tokens=[num_tokens for _, num_tokens, _, _ in flat],
        age=[0] * len(flat),
        digests=b"".join([digest for _, _, digest, _ in flat]),
        unkeyed_block=bare,
        unkeyed_stamp=[stamps[block] for block in bare],
    )


def events_of_keys(core: object, spec: ReplicaSpec) -> Iterator[tuple[int, CacheEvent]]:
    """Yield STORED events of all keys, each with the step in flight that registered the keys; 0: they are published."""
    num_groups, domains = len(spec.groups), _native.read(core, "domains")
    horizon = _native.read(core, "executed_through")
    for start in range(1, spec.num_blocks, MAX_HASHES):
        rows: dict[tuple[bool, int, int], list[tuple[bytes, int, int]]] = {}
        blocks = range(start, min(start + MAX_HASHES, spec.num_blocks))
        for block, (_, step, keys, _) in zip(blocks, _native.read(core, "keys", blocks), strict=True):
            for number, ((pair, digest), num_tokens) in enumerate(keys):
                kind = (number > 0, step if step > horizon else 0, pair)
                rows.setdefault(kind, []).append((digest, block, num_tokens))
        for (is_further, step, pair), found in sorted(rows.items()):
            group, domain = (pair - 1) % num_groups, domains[(pair - 1) // num_groups]
            size = spec.groups[group].block_size
            for at in range(0, len(found), MAX_HASHES):
                hashes, of_blocks, tokens = zip(*found[at : at + MAX_HASHES], strict=True)
                starts = () if is_further else tuple((count - 1) // size * size for count in tokens)
                yield (
                    step,
                    CacheEvent(
                        EventKind.STORED, group, hashes, of_blocks, domain, block_size=size, block_starts=starts
                    ),
                )
