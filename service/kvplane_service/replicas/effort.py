"""How long a step will take, roughly and rather too long, before it is applied.

The unit is a block that is allocated and registered, some 4 us. It decides only whether a step may hold the event loop,
so sums over columns are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvplane.base.step import UNCHANGED, Part, Step
from kvplane_service.core.replica import Replica

MOST_INLINE = 4096  # some 15 ms
_ROW = 4  # units
_TOKENS_HASHED, _DIGESTS_READ, _BLOCKS_SEEN, _SPARSE_BLOCKS = 64, 32, 4, 4  # so many take a unit


def effort(step: Step, replica: Replica) -> int:
    """Blocks that would take as long as this step, which need not be valid."""
    return sum(_of_part(part, replica) for part in step.parts)


def _of_part(part: Part, replica: Replica) -> int:
    facts, news = part.facts, part.news
    rows = len(facts.slot) + len(news.slot) + len(part.run.slot) + len(part.admit.slot) + len(part.peek.slot)
    tokens, digests = len(facts.tokens) + len(news.tokens), len(facts.hashes) + len(news.hashes)
    units = rows * _ROW + tokens // _TOKENS_HASHED + digests // replica.digest_size // _DIGESTS_READ
    return units + _of_tables(part, replica) + _of_cache(part, replica)


def _of_tables(part: Part, replica: Replica) -> int:
    """Blocks that rows allocate, register, look up and give back, in all groups."""
    requests, facts, run, admit = replica.requests, part.facts, part.run, part.admit
    known, computed = requests.num_tokens, requests.computed
    waiting = _sum(known, admit.slot) + sum(part.news.num_tokens)
    running = _sum(known, run.slot) - _sum(computed, run.slot) + sum(facts.appended) + sum(run.extra)
    wanted = _capped(running, run.cap) + _capped(waiting + sum(admit.extra), admit.cap)
    granted = max(0, min(wanted, part.budget.tokens))
    granted += sum(run.lookahead) + sum(admit.lookahead) + sum(admit.external)
    granted += sum(count for count in facts.commit if count != UNCHANGED)
    granted += sum(facts.num_hashes) * replica.spec.hash_block_size  # their blocks may be registered only now
    seen = waiting + _sum(known, part.peek.slot) + (_sum(computed, facts.slot) if facts.end else 0)
    units = 0
    for manager in replica.coordinator.managers:
        dense = 1 if manager.downward_closed else _SPARSE_BLOCKS
        units += granted // manager.block_size // dense + seen // manager.block_size // _BLOCKS_SEEN
    return units


def _of_cache(part: Part, replica: Replica) -> int:
    """Blocks that are passed over: those with a key in a reset, those of all tables in an eviction or a failure."""
    cache, pool = part.cache, replica.coordinator.pool
    units = len(cache.evicted) + len(cache.loads_over) + (len(part.resume.blocks) if part.resume else 0)
    if cache.evicted or cache.released or cache.failed_steps:
        units += (pool.num_blocks - pool.num_free) // _BLOCKS_SEEN
    return units + (pool.num_evictable // _BLOCKS_SEEN if cache.reset else 0)


def _capped(num_tokens: int, caps: Sequence[int]) -> int:
    return min(num_tokens, sum(caps)) if caps else num_tokens


def _sum(column: Sequence[int], slots: Sequence[int]) -> int:
    """Over these slots; those that the column lacks begin in this step, and their tokens are in its news."""
    there: Iterable[int] = slots
    if slots and (max(slots) >= len(column) or min(slots) < 0):
        there = (slot for slot in slots if 0 <= slot < len(column))
    return sum(map(column.__getitem__, there))
