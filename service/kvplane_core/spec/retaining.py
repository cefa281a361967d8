"""Applies the section `retain` of a part: retains and releases cached prefixes, see `retained`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from kvplane.base.groups import Medium
from kvplane.base.hashing import split_hashes
from kvplane.base.sections import Retain, Retained
from kvplane.base.values import RetainOutcome
from kvplane_core.face.interface import INSIDE, Hit
from kvplane_core.face.keys import Key
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.retained import DEVICE, Name, RetainedBlocks, Retention


def retain(blocks: Coordinator, rows: Retain, result: Retained) -> None:
    """Apply all rows, which the replica accepts; adds an entry for each to the result."""
    retained, now_ns = blocks.pool.retained, rows.time_ns
    retained.remove_all([name for name, one in retained.each.items() if one.until_ns <= now_ns])
    retained.forget_lost()  # so that it does not count
    for row, (digests, domain) in enumerate(_prefixes(rows)):
        name = Name(rows.owner[row] if rows.owner else "", domain, digests[-1])
        until_ns = rows.until_ns[row] if rows.until_ns else 0
        most = _most(blocks, rows.percent[row] if rows.percent else 0)
        if until_ns <= now_ns:
            _release(retained, name, most, result)
            continue
        lookup = blocks.union if retained.tiers else blocks.lookup
        hit = lookup.find(digests, domain, len(digests) * blocks.spec.hash_block_size, INSIDE)
        keys = dict(_keys(blocks, hit))
        used, before = retained.used_by(name.owner, name, keys), retained.used_by(name.owner)
        over = next((place for place in range(retained.num_places) if used[place] > most[place]), None)
        if over is not None:
            left = max(0, most[over] - before[over])
            result.add(hit.num_tokens, len(keys), left, _over_budget(retained, over))
        elif not retained.has_room(name, len(keys)):
            result.add(hit.num_tokens, len(keys), _left(most, before), RetainOutcome.TOO_MANY)
        else:
            if keys:
                retained.add(name, Retention(rows.priority[row] if rows.priority else 0, until_ns, keys))
            elif name in retained.each:
                retained.remove_all([name])
            result.add(hit.num_tokens, len(keys), _left(most, used), RetainOutcome.RETAINED)
    if retained.each:
        result.next_end_ns = [min(one.until_ns for one in retained.each.values())]


def _most(blocks: Coordinator, percent: int) -> list[int]:
    """Return how many keys an owner with this percentage may retain in each place."""
    tiers = blocks.pool.retained.tiers
    return [
        blocks.spec.num_blocks * percent // 100,
        *(min(tier.num_slots * percent // 100, tier.most_retained) for tier in tiers),
    ]


def _left(most: list[int], used: list[int]) -> int:
    return max(0, min(allowed - count for allowed, count in zip(most, used, strict=True)))


def _over_budget(retained: RetainedBlocks, place: int) -> RetainOutcome:
    if place == DEVICE:
        return RetainOutcome.OVER_BUDGET
    is_host = retained.tiers[place - 1].medium is Medium.HOST
    return RetainOutcome.OVER_HOST_BUDGET if is_host else RetainOutcome.OVER_DISK_BUDGET


def _release(retained: RetainedBlocks, name: Name, most: list[int], result: Retained) -> None:
    outcome = RetainOutcome.RELEASED
    if name in retained.each:
        retained.remove_all([name])
    elif any(one[1:] == name[1:] for one in retained.each):
        outcome = RetainOutcome.OTHER_OWNER
    result.add(0, 0, _left(most, retained.used_by(name.owner)), outcome)


def _prefixes(rows: Retain) -> Iterator[tuple[list[bytes], str]]:
    """Yield the digests and the domain of each row."""
    total = sum(rows.num_hashes)
    given = iter(split_hashes(rows.hashes, len(rows.hashes) // total) if total else ())
    for row, count in enumerate(rows.num_hashes):
        yield list(islice(given, count)), rows.domain[row] if rows.domain else ""


def _keys(blocks: Coordinator, hit: Hit) -> Iterator[tuple[Key, int]]:
    """Yield the primary key of each block of a hit, by group, the last one first, and the first place where it may be
    retained: a slot of a tier that retains nothing leaves it to the tiers behind.
    """
    tiers, places = blocks.tiers, blocks.pool.retained.tiers
    for block in chain.from_iterable(map(reversed, hit.blocks)):
        source = tiers.location(block)
        place = DEVICE if source is None else next((one.place for one in places if one.number >= source.tier), None)
        key = blocks.pool.key_of(block) if source is None else tiers.each[source.tier].key[source.slot]
        if key is not None and place is not None:
            yield key, place
