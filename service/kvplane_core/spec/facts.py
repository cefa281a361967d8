"""Applies the sections `facts` and `cache` of a part of a step: what happened to requests and pages since the last
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import cast

from kvplane.base.groups import CommitRule
from kvplane.base.hashing import pack_tokens, split_hashes
from kvplane.base.sections import Peers
from kvplane.base.step import UNCHANGED, Cache, End, Facts, News, Part, PartResult, RemoveReason
from kvplane_core.face.part_rows import Update
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.policies import note_hint
from kvplane_core.spec.tiers.loads import TierLoads


class FactApplier:
    """Applies the section `facts` to requests, and the section `cache` to blocks and keys.

    Args:
        coordinator: allocates and releases the blocks.
        tracker: records what steps in flight granted and registered.
        digest_size: bytes of a block hash.
    """

    def __init__(self, coordinator: Coordinator, tracker: InFlightTracker, digest_size: int) -> None:
        self._blocks = coordinator
        self._requests = coordinator.requests
        self._pool = coordinator.pool
        self._tracker = tracker
        self._spec = coordinator.spec
        self._digest_size = digest_size
        self._tier_loads = TierLoads(coordinator, tracker)

    def apply(self, part: Part, seq: int, result: PartResult) -> None:
        """Apply the section `facts` of a part, row by row; adds the preempted slots to `result`."""
        facts = part.facts
        given, token_at = _given_hashes(facts), 0
        for row, slot in enumerate(facts.slot):
            appended = facts.appended[row] if facts.appended else 0
            update = Update(
                slot,
                computed=facts.computed[row] if facts.computed else UNCHANGED,
                appended=appended,
                digests=given.get(row, ()),
                commit=facts.commit[row] if facts.commit else UNCHANGED,
                release_skipped=facts.release_skipped[row] if facts.release_skipped else UNCHANGED,
                end=End(facts.end[row]) if facts.end else End.NONE,
                fence=facts.fence[row] if facts.fence else 0,
                hint=facts.hint[row] if facts.hint else UNCHANGED,
            )
            tokens = facts.tokens[token_at : token_at + appended] if facts.tokens else ()
            token_at += appended
            self.apply_update(update, tokens, seq, result)
            if part.with_hashes:
                report_hashes(self._requests.content[slot].digests, result)

    def note_hints(self, news: News) -> None:
        """Record the hints of new requests."""
        for slot, hint in zip(news.slot, news.hint, strict=False):
            note_hint(self._pool, self._requests, slot, hint)

    def apply_update(self, update: Update, tokens: Sequence[int], seq: int, result: PartResult) -> None:
        """Apply one row of facts. `tokens`: ids of the appended tokens, only for requests whose tokens the service
        hashes.
        """
        slot, requests = update.slot, self._requests
        if update.computed != UNCHANGED:
            self._correct(update, seq, result)
        requests.num_tokens[slot] += update.appended
        if tokens:
            cast("list[bytes]", result.hashed_facts).append(self._append_tokens(slot, tokens))
        self.add_digests(slot, update.digests)
        if update.commit != UNCHANGED:
            self._commit(slot, update.commit, seq)
        if update.release_skipped != UNCHANGED and requests.running[slot]:
            self._blocks.release_skipped(slot, update.release_skipped)
        if update.hint != UNCHANGED:
            note_hint(self._pool, requests, slot, update.hint)
        if update.end is not End.NONE:
            self._end(slot, update.end, update.fence, seq, result)

    def _correct(self, update: Update, seq: int, result: PartResult) -> None:
        """Lower the request's number of computed tokens to `computed`, after drafts were rejected. A higher `computed`
        is ignored.

        A request that lacks blocks or the state to compute again from position `computed` is preempted; unless the same
        row ends it, since its blocks may be held for a transfer.
        """
        requests, slot, computed = self._requests, update.slot, update.computed
        if computed < requests.computed[slot] and self._spec.commit is CommitRule.SAFE:
            if update.end is End.NONE and not self._blocks.can_rewind(slot, computed, update.appended):
                gone = self._tracker.preempt(slot, seq)
                result.preempted.extend(gone)
                result.went_back += len(gone)
                return
            self._blocks.rewind(slot, computed)
            if slot in requests.not_zeroed:
                self._blocks.zero_unloaded(slot, computed)
        requests.ends_at[slot] = requests.launch_end(slot)
        requests.computed[slot] = min(requests.computed[slot], computed)

    def add_digests(self, slot: int, digests: Sequence[bytes]) -> None:
        """Add the hashes of blocks that became full."""
        self._requests.content[slot].digests.extend(digests)

    def _append_tokens(self, slot: int, tokens: Sequence[int]) -> bytes:
        """Hash the appended tokens; returns the concatenated digests of the blocks that became full."""
        content = self._requests.content[slot]
        if content.hasher is None:
            return b""
        made = content.hasher.append(pack_tokens(tokens))
        self.add_digests(slot, split_hashes(made, self._digest_size))
        return made

    def _commit(self, slot: int, num_tokens: int, seq: int) -> None:
        """Register the blocks of the request's first `num_tokens` tokens.

        If all steps that write these blocks are executed, the keys become visible to other clients now; otherwise once
        the steps are executed.
        """
        requests, pool = self._requests, self._pool
        if self._tracker.loads_from_tiers(slot):
            return  # the end of its job registers the blocks
        self._tracker.load_is_over(slot)
        num_tokens = min(num_tokens, requests.computed[slot], requests.num_tokens[slot])
        pool.step = pool.executed_through if self._tracker.is_executed(slot, num_tokens) else seq
        requests.ends_at[slot] = requests.launch_end(slot)
        self._blocks.commit(slot, num_tokens)
        self._tracker.note_keys(slot, pool.step)
        pool.step = seq

    def _end(self, slot: int, end: End, fence: int, seq: int, result: PartResult) -> None:
        if end is End.PREEMPTED and self._requests.running[slot]:
            self._tracker.prepare_return(slot)
        if end is not End.HELD:
            fence = self._tracker.load_is_over(slot, fence)
        if end is End.FREE:
            result.preempted.extend(self._tracker.end(slot, seq, fence))
        elif end is End.HELD:
            result.preempted.extend(self._tracker.hold(slot, seq))
        elif self._requests.running[slot]:
            result.preempted.extend(gone for gone in self._tracker.preempt(slot, seq, fence) if gone != slot)

    def apply_cache(self, cache: Cache, result: PartResult) -> None:
        """Apply the section `cache` of a part; adds the preempted slots to `result`."""
        for failed in cache.failed_steps:
            result.preempted.extend(self._tracker.fail_step(failed))
        dropped = [self._evict(block) for block in cache.evicted]
        if cache.costs_ns:
            self._blocks.tiers.costs_ns = list(cache.costs_ns)
        if cache.jobs_done or cache.jobs_failed or cache.jobs_before:
            self._tier_loads.end_jobs(cache, result)
        if any(dropped):
            self._blocks.register_again(cache.evicted)
        for slot in cache.released:
            result.preempted.extend(self._tracker.release_held(slot, self._pool.step))
        self._pool.release_busy(cache.loads_over)
        if cache.reset:
            result.reset_done = self._pool.reset()
            if result.reset_done:
                self._blocks.tiers.reset()

    def apply_peers(self, peers: Peers) -> None:
        """Apply the section `peers` of a part."""
        if not peers.gone and not peers.slot:
            return
        tier = self._blocks.tiers.each[-1]
        for slot in peers.gone:
            tier.drop_slot(slot)
        digests = split_hashes(peers.hashes, self._digest_size)
        domains = peers.domain or [""] * len(peers.slot)
        for slot, version, group, digest, domain in zip(
            peers.slot, peers.version, peers.group, digests, domains, strict=True
        ):
            tier.set_peer(slot, (domain, group, digest), version)

    def _evict(self, block: int) -> bool:
        """Drop the keys of a block, and give the block a new stamp; returns whether it had keys.

        A block without keys also gets a new stamp, because a store may still have a key with the old one.
        """
        tiers, key = self._blocks.tiers, self._pool.key_of(block)
        if tiers.each:
            tiers.revoke(block, key)  # saved from this page, or from one with the same content
        had_keys = self._pool.drop_keys(block, RemoveReason.DROPPED)
        if not had_keys:
            self._pool.restamp(block)
        return had_keys


def _given_hashes(facts: Facts) -> dict[int, list[bytes]]:
    """Return the digests by row number, for the rows that have digests."""
    if not facts.hashes:
        return {}
    digests = iter(split_hashes(facts.hashes, len(facts.hashes) // sum(facts.num_hashes)))
    return {row: list(islice(digests, count)) for row, count in enumerate(facts.num_hashes) if count}


def report_hashes(digests: list[bytes], result: PartResult) -> None:
    """Add the number of a request's block hashes, and the last one, to the result; engines compare them with theirs."""
    result.num_hashes.append(len(digests))
    result.last_hash.append(digests[-1] if digests else b"")
