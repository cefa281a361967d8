"""Copies into the first tier what prompts that will be admitted soon lack there: the section `prefetch` of a part.

    disk ──move──▶ host        now, while others run
    host ──load──▶ device      when the request is admitted, with LOAD: it no longer waits for the disk

A copy evicts from the first tier only what another place has too, so a prefetch loses nothing. Nothing is copied for a
request that runs: it has its hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvplane.base.hashing import split_hashes
from kvplane.base.sections import Prefetch, Prefetched
from kvplane.base.values import NO_REQUEST, PrefetchOutcome
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.tiers.loads import Missing, TierLoads
from kvplane_core.spec.tiers.tiers import MAX_JOBS

MOST_IN_FLIGHT = MAX_JOBS // 4  # copies into the first tier: loads and saves need jobs too


def order_prefetch(blocks: Coordinator, loads: TierLoads, rows: Prefetch, result: Prefetched) -> None:
    """Order the copies of all rows, which the replica accepts; adds an entry for each to the result."""
    for (digests, domain, most), within_ns in zip(_prompts(blocks, rows), _column(rows.within_ns), strict=False):
        plan = loads.plan(digests, domain, most) if most > 0 else None
        if plan is None:
            result.add(0, 0, PrefetchOutcome.ALL)
            continue
        far = [one for one in plan.missing if one.source.tier]
        first = blocks.tiers.each[0]
        for one in plan.missing:
            if not one.source.tier:
                first.refresh(first.key[one.source.slot])
        missing = [one for one in far if _key(blocks, one) not in first.writing]
        if within_ns and _time_ns(blocks, missing) > within_ns:
            blocks.tiers.counters.prefetches_late += 1
            result.add(plan.hit.num_tokens, 0, PrefetchOutcome.TOO_LATE)
            continue
        room = _room(blocks, len(missing))
        ordered = sum(_order(blocks, one) for one in missing[:room])
        blocks.tiers.counters.prefetched += ordered
        outcome = PrefetchOutcome.ALL if ordered == len(missing) else PrefetchOutcome.TOO_MANY
        result.add(plan.hit.num_tokens, ordered, outcome)


def _prompts(blocks: Coordinator, rows: Prefetch) -> Iterator[tuple[Sequence[bytes], str, int]]:
    """Yield the digests and the domain of each row, and the most tokens that it can hit."""
    total = sum(rows.num_hashes)
    given = iter(split_hashes(rows.hashes, len(rows.hashes) // total) if total else ())
    domains = rows.domain or [""] * len(rows.slot)
    for at, slot in enumerate(rows.slot):
        if slot != NO_REQUEST:
            requests = blocks.requests
            most = 0 if requests.running[slot] or requests.held[slot] else blocks.most_hit(slot)
            yield requests.content[slot].digests, requests.domain[slot], most
            continue
        digests = list(islice(given, rows.num_hashes[at]))
        yield digests, domains[at], len(digests) * blocks.spec.hash_block_size


def _column(values: Sequence[int]) -> Iterator[int]:
    yield from values
    while True:
        yield 0


def _key(blocks: Coordinator, one: Missing) -> tuple[str, int, bytes]:
    return blocks.tiers.each[one.source.tier].key[one.source.slot]


def _copies(blocks: Coordinator) -> list[int]:
    """Return the tier that each copy into the first one reads, of those in flight."""
    return [move.source.tier for move in blocks.tiers.jobs.moves.values() if not move.tier]


def _time_ns(blocks: Coordinator, missing: Sequence[Missing]) -> int:
    """Return the nanoseconds to copy these blocks, behind the copies in flight; 0 if it is unknown."""
    costs = blocks.tiers.costs_ns
    sources = [*_copies(blocks), *(one.source.tier for one in missing)]
    if not costs or any(not costs[1 + tier] for tier in set(sources)):
        return 0
    return sum(costs[1 + tier] for tier in sources)


def _room(blocks: Coordinator, most: int) -> int:
    """Return how many copies may be ordered now, at most `most`: slots of the first tier that are free, or whose key is
    somewhere else too, in order of eviction.
    """
    tiers = blocks.tiers
    first, *others = tiers.each
    most = min(most, MOST_IN_FLIGHT - len(_copies(blocks)), MAX_JOBS - len(tiers.jobs))
    count = first.num_free
    for key, slot in first.in_order():
        if count >= most:
            break
        if slot in first.pins:
            continue
        if key not in first.shadows and all(tier.find(key) is None for tier in others):
            break
        count += 1
    return max(0, min(most, count))


def _order(blocks: Coordinator, one: Missing) -> bool:
    tiers = blocks.tiers
    return tiers.order_move(tiers.each[one.source.tier], one.source.slot, tiers.each[0])
