"""Estimates what the core takes for a step: by this a service decides whether a step may hold its event loop, and what
its owner pays. The estimate tends to be too high. It is a sum over columns, in units: blocks that are allocated and
registered.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import UNCHANGED, Facts, OnRefusal, Part, RowFlag, Step
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.in_flight import InFlightTracker

ROW = 4  # units per row
TOKENS_HASHED, DIGESTS_READ, IDS_ENCODED, BLOCKS_SEEN, SPARSE_BLOCKS = 64, 32, 32, 4, 4  # each per unit
# A key that is looked up is one unit: a large index is not in the processor's cache.
FULL_FIT = int(RowFlag.FULL_FIT)


class Effort:
    """Estimates steps on the present state of a replica. Invalid steps are accepted too."""

    def __init__(self, spec: ReplicaSpec, digest_size: int, blocks: Coordinator, tracker: InFlightTracker) -> None:
        self._spec, self._digest_size, self._blocks, self._tracker = spec, digest_size, blocks, tracker
        self._requests = blocks.requests
        self._known, self._computed = blocks.requests.num_tokens, blocks.requests.computed

    def of(self, step: Step) -> int:
        """Return the units of a step."""
        return sum(self._of_rows(part) + self._of_tables(part) + self._of_cache(part) for part in step.parts)

    def of_look_up(self, num_tokens: int) -> int:
        """Return the units of the look-up of a prompt."""
        digests = num_tokens // self._spec.hash_block_size
        return ROW + digests // DIGESTS_READ + self._blocks_of(num_tokens)

    def _of_rows(self, part: Part) -> int:
        facts, news = part.facts, part.news
        rows = len(facts.slot) + len(news.slot) + len(part.run.slot) + len(part.admit.slot) + len(part.peek.slot)
        rows += len(part.prefetch.slot) + len(part.retain.num_hashes) + len(part.peers.gone) + len(part.peers.slot)
        digests = len(facts.hashes) + len(news.hashes) + len(part.prefetch.hashes) + len(part.retain.hashes)
        units = rows * ROW + (len(facts.tokens) + len(news.tokens)) // TOKENS_HASHED
        return units + digests // self._digest_size // DIGESTS_READ

    def _of_tables(self, part: Part) -> int:
        """How many blocks, over all groups, the rows allocate, register, look up and release."""
        facts, run, admit, known, computed = part.facts, part.run, part.admit, self._known, self._computed
        waiting = self._sum(known, admit.slot) + sum(part.news.num_tokens)
        lowered, dropped = self._rewound(facts)
        running = self._sum(known, run.slot) - self._sum(computed, run.slot) + lowered
        running += sum(facts.appended) + sum(run.extra)
        wanted = _capped(running, run.cap) + _capped(waiting + sum(admit.extra), admit.cap)
        granted = max(0, min(wanted, part.budget.tokens))
        granted += sum(run.lookahead) + sum(admit.lookahead) + sum(admit.external)
        granted += sum(count for count in facts.commit if count != UNCHANGED)
        granted += sum(facts.num_hashes) * self._spec.hash_block_size  # their blocks may be registered only now
        ended = [slot for slot, end in zip(facts.slot, facts.end, strict=False) if end]
        seen = self._sum(computed, ended) + dropped
        found = waiting + self._sum(known, part.peek.slot) + self._sum(known, part.prefetch.slot)
        found += (sum(part.prefetch.num_hashes) + sum(part.retain.num_hashes)) * self._spec.hash_block_size
        units = needed = 0
        for manager in self._blocks.managers:
            units += granted // manager.block_size // (1 if manager.is_downward_closed() else SPARSE_BLOCKS)
            needed += granted // manager.block_size + len(run.slot)
        may_lack = needed > self._blocks.pool.num_free or run.reserved or any(one & FULL_FIT for one in run.flags)
        if run.on_refusal is OnRefusal.PREEMPT and may_lack:
            victims = run.victims or run.slot  # the blocks that they share are released once for each of them
            seen += self._sum(computed, victims)
            units += len(victims) * ROW
        if part.with_tables:
            units += self._blocks_of(waiting + self._sum(known, run.slot)) // IDS_ENCODED
        return units + self._blocks_of(found) + self._blocks_of(seen) // BLOCKS_SEEN

    def _rewound(self, facts: Facts) -> tuple[int, int]:
        """By how many computed tokens the rows go back, and the computed tokens of requests that such a row preempts
        because their tables lack blocks.
        """
        computed, lowered, dropped = self._computed, 0, 0
        for slot, count in zip(facts.slot, facts.computed, strict=False):
            if count != UNCHANGED and self._requests.is_live(slot) and count < computed[slot]:
                lowered += computed[slot] - count
                if not self._blocks.can_rewind(slot, max(count, 0)):
                    dropped += computed[slot]
        return lowered, dropped

    def _of_cache(self, part: Part) -> int:
        """How many blocks a cache section, or an image, visits: a reset those with a key; an eviction or a failed step
        the tables of all requests, whose blocks may be shared.
        """
        cache, computed, tracker = part.cache, self._computed, self._tracker
        units = len(cache.evicted) + len(cache.loads_over)
        if part.resume is not None:  # the stamps of all blocks are compared
            units += len(part.resume.blocks) + self._spec.num_blocks
        seen = self._blocks.pool.num_evictable if cache.reset else 0
        seen += sum(len(tracker.held.get(slot, ())) for slot in cache.released) + self._blocks_of(
            self._sum(computed, cache.released)
        )
        failed = sum(len(tracker.grants[seq].slot) for seq in cache.failed_steps if seq in tracker.grants)
        units += failed * ROW
        if cache.evicted:
            units += sum(tier.num_stale for tier in self._blocks.tiers.each)
        if cache.evicted or failed:
            seen += self._blocks_of(self._sum(computed, self._requests.slots()))
        return units + seen // BLOCKS_SEEN

    def _sum(self, column: Sequence[int], slots: Sequence[int]) -> int:
        """The sum of a column's entries for these slots. A request of another slot begins in this step, with `news`."""
        return sum(column[slot] for slot in slots if self._requests.is_live(slot))

    def _blocks_of(self, num_tokens: int) -> int:
        """How many blocks the tables of all groups have for this number of tokens."""
        return sum(num_tokens // group.block_size for group in self._spec.groups)


def _capped(num_tokens: int, caps: Sequence[int]) -> int:
    return min(num_tokens, sum(caps)) if caps else num_tokens
