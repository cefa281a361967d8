"""What steps in flight granted and registered, and the blocks whose release waits for one of them, by step.

    free -> assigned -> executed -> published

A step that was answered may be executed later, or never. Until `executed_through` reaches it, the keys that it
registered are tentative: requests of this replica may hit them, which is safe because their steps run later (states may
not be hit), and no reader outside sees them. They are withdrawn when the step will not run for their request; requests
that adopted their blocks are preempted then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from kvplane.base.groups import CommitRule
from kvplane.base.step import RemoveReason
from kvplane_service.core.columns import SLICE_BLOCKS
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.counters import Counters
from kvplane_service.core.keys import NULL_BLOCK, Key

_SLICE_REQUESTS = 64  # a request of a few hundred blocks takes some 50 us to free


class Stay(NamedTuple):
    """A request in a slot, from an admission to its end or preemption."""

    slot: int
    serial: int


@dataclass(slots=True)
class Grants:
    """Tokens that one step granted, in columns: one entry per stay and part."""

    slot: list[int] = field(default_factory=list)
    serial: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def stays(self) -> list[Stay]:
        """The stays that were granted tokens."""
        return [Stay(slot, serial) for slot, serial in zip(self.slot, self.serial, strict=True)]


class TentativeKey(NamedTuple):
    """A key that a step in flight registered for a stay."""

    block: int
    key: Key
    stay: Stay


class InFlightTracker:
    """Records by step number, which are removed once the step is executed."""

    def __init__(self, coordinator: Coordinator, counters: Counters) -> None:
        self._blocks = coordinator
        self._requests = coordinator.requests
        self._counters = counters
        self._safe = coordinator.spec.commit is CommitRule.SAFE
        self.grants: dict[int, Grants] = {}
        self.tentative: dict[int, list[TentativeKey]] = {}
        self.adoptions: dict[int, list[tuple[int, Stay]]] = {}  # (block with a key of that step, stay that adopted it)
        self.waiting: deque[tuple[int, list[int]]] = deque()  # (step, blocks) to release once it is executed, in order
        self.held: dict[int, list[int]] = {}  # slot -> blocks that a transfer reads (ended as held) or writes
        self.under_load: set[int] = set()  # while an epoch ends: blocks whose loads are not confirmed to be over
        self.filling: dict[int, list[int]] = {}  # step -> blocks that are loaded before its launch

    # -- notes -------------------------------------------------------------------------------------------------------

    def note_grants(self, slots: Sequence[int], num_tokens: Sequence[int], seq: int) -> None:
        """Record the tokens that each of these requests may compute in this step."""
        requests = self._requests
        if requests.not_zeroed:
            self.end_loads(slots)
        in_flight, granted_step, serial = requests.in_flight, requests.granted_step, requests.serial
        for slot, count in zip(slots, num_tokens, strict=True):
            in_flight[slot] += count
            granted_step[slot] = seq
        grants = self.grants.setdefault(seq, Grants())
        grants.slot.extend(slots)
        grants.serial.extend([serial[slot] for slot in slots])
        grants.num_tokens.extend(num_tokens)
        self._counters.granted_tokens += sum(num_tokens)

    def end_loads(self, slots: Iterable[int]) -> None:
        """These requests were granted tokens, so their loads are over: an engine runs no request before that."""
        self._requests.loading.difference_update(slots)
        self._requests.not_zeroed.difference_update(slots)

    def granted_in(self, seq: int) -> tuple[int, int]:
        """Rows with tokens of this step so far, and these tokens; requests preempted since are left out."""
        requests, grants = self._requests, self.grants.get(seq, Grants())
        latest = dict(zip(grants.slot, zip(grants.serial, grants.num_tokens, strict=True), strict=True))
        kept = [
            tokens
            for slot, (serial, tokens) in latest.items()
            if requests.running[slot] and requests.serial[slot] == serial
        ]
        return len(kept), sum(kept)

    def note_admission(self, slot: int, num_hit: int, hit: Sequence[Sequence[int]]) -> None:
        """Count an admission, and record the adopted blocks whose keys are still tentative."""
        self._counters.admitted += 1
        if not self._requests.skip_reading[slot]:
            self._counters.queried_tokens += self._requests.num_tokens[slot]
            self._counters.hit_tokens += num_hit
        pool = self._blocks.pool
        if not self._safe:
            return
        for block in (block for blocks in hit for block in blocks if block != NULL_BLOCK):
            if pool.key_step[block] > pool.executed_through:
                self.adoptions.setdefault(pool.key_step[block], []).append((block, self._stay(slot)))

    def note_filling(self, slot: int, hit: Sequence[Sequence[int]], seq: int) -> None:
        """Record that the launch of this step loads the request's external tokens: the load ends with the step."""
        self.filling.setdefault(seq, []).extend(sorted(self._loaded_blocks(slot, hit)))

    def _loaded_blocks(self, slot: int, hit: Sequence[Sequence[int]]) -> set[int]:
        """Blocks that a load may write: all of the tables but the hit where it was adopted.

        Compared by position: a hit names blocks outside the window too. The request does not adopt those, so its own
        allocation may reuse one of them at another position, where the load writes it.
        """
        return {
            block
            for table, adopted in zip(self._blocks.tables(slot), hit, strict=True)
            for block, of_hit in zip_longest(table, adopted)
            if block != of_hit
        }

    def note_keys(self, slot: int, seq: int) -> None:
        """Record the keys registered since the last call as this request's, in this step."""
        registered = self._blocks.pool.registered
        if not registered:
            return
        if self._safe and seq > self._blocks.pool.executed_through:
            stay = self._stay(slot)
            self.tentative.setdefault(seq, []).extend([TentativeKey(block, key, stay) for block, key in registered])
        registered.clear()

    def _stay(self, slot: int) -> Stay:
        return Stay(slot, self._requests.serial[slot])

    def _runs(self, stay: Stay) -> bool:
        return self._requests.running[stay.slot] and self._requests.serial[stay.slot] == stay.serial

    def is_executed(self, slot: int, num_tokens: int) -> bool:
        """Whether the pages of the request's first `num_tokens` tokens are written, adopted ones included."""
        requests = self._requests
        if num_tokens > requests.computed[slot] - requests.in_flight[slot]:
            return False
        if requests.granted_step[slot] > self._blocks.pool.executed_through:
            return False  # a grant of 0 tokens can order a copy too
        stay = self._stay(slot)
        return not any(adopter == stay for book in self.adoptions.values() for _, adopter in book)

    # -- ends --------------------------------------------------------------------------------------------------------

    def executed(self, through: int) -> None:
        """All steps up to this one have finished on all ranks."""
        pool, requests = self._blocks.pool, self._requests
        in_flight, serial, running = requests.in_flight, requests.serial, requests.running
        through = pool.executed_through = max(pool.executed_through, through)
        for seq in [seq for seq in self.grants if seq <= through]:
            grants = self.grants.pop(seq)
            for slot, stay_serial, count in zip(grants.slot, grants.serial, grants.num_tokens, strict=True):
                if serial[slot] == stay_serial and running[slot]:
                    left = in_flight[slot] - count
                    in_flight[slot] = left if left > 0 else 0
        for book in (self.tentative, self.adoptions, self.filling):
            for seq in [seq for seq in book if seq <= through]:
                del book[seq]
        while self.waiting and self.waiting[0][0] <= through:
            pool.release(self.waiting.popleft()[1])

    def release_later(self, blocks: list[int], fence: int) -> None:
        """Release blocks in this order once step `fence` is executed; now, if it is."""
        if fence <= self._blocks.pool.executed_through:
            self._blocks.pool.release(blocks)
        elif blocks:
            assert fence <= self._blocks.pool.step, f"blocks wait for step {fence}, which was not sent"
            self.waiting.append((fence, blocks))

    def preempt(self, slot: int, seq: int, fence: int = 0) -> list[int]:
        """Preempt a request; its blocks are released after the fence. Returns all preempted slots, this one first.

        A step that granted it tokens and is still being applied will not run for it: the keys of that step are
        withdrawn, and requests that adopted them are preempted too.
        """
        cancelled_from_step = seq if self._requests.granted_step[slot] == seq else seq + 1
        return self._preempt_cascade([self._stay(slot)], cancelled_from_step, fence)

    def fail_step(self, seq: int) -> list[int]:
        """A step will never run: preempt the requests to which it granted tokens, and those that adopted its keys."""
        return self._preempt_cascade(self.grants.get(seq, Grants()).stays(), seq)

    def _preempt_cascade(self, stays: Iterable[Stay], from_step: int, fence: int = 0) -> list[int]:
        """Steps from `from_step` on do not run for these stays: withdraw their keys of these steps, and preempt them.

        The same for every stay that adopted a withdrawn key. Of stays that have ended only the keys are withdrawn.
        """
        queue, seen, preempted = deque(stays), set[Stay](), list[int]()
        while queue:
            stay = queue.popleft()
            if stay in seen:
                continue
            seen.add(stay)
            self._cancel_grants(stay, from_step)
            queue.extend(self._withdraw(stay, from_step))
            if self._runs(stay):
                if stay.slot in self._requests.loading:
                    self._pin_for_transfer(stay.slot)
                else:
                    self._give_back(stay.slot, fence)
                self._requests.stop(stay.slot)
                self._requests.serial[stay.slot] += 1
                self._counters.preempted += 1
                preempted.append(stay.slot)
        return preempted

    def _cancel_grants(self, stay: Stay, from_step: int) -> None:
        """Remove the grants of steps from `from_step` on for this stay."""
        for grants in (grants for step, grants in self.grants.items() if step >= from_step):
            for row in reversed([row for row, one in enumerate(grants.stays()) if one == stay]):
                self._counters.granted_tokens -= grants.num_tokens[row]
                for column in (grants.slot, grants.serial, grants.num_tokens):
                    del column[row]

    def _withdraw(self, stay: Stay, from_step: int) -> list[Stay]:
        """Drop the keys that steps from `from_step` on registered for this stay; the stays that adopted them."""
        pool, adopters = self._blocks.pool, list[Stay]()
        for step in [step for step in self.tentative if step >= from_step]:
            mine = [one for one in self.tentative[step] if one.stay == stay]
            self.tentative[step] = [one for one in self.tentative[step] if one.stay != stay]
            for one in mine:
                if pool.has_key(one.block, one.key):
                    pool.drop_keys(one.block, RemoveReason.WITHDRAWN)
                    self._counters.withdrawn_keys += 1
            blocks = {one.block for one in mine}
            adopters.extend(adopter for block, adopter in self.adoptions.get(step, ()) if block in blocks)
        return adopters

    def _note_use(self, slot: int) -> None:
        """Record that launches in flight may use the request's blocks; the present step runs without the request."""
        pool = self._blocks.pool
        last = min(self._requests.granted_step[slot], pool.step - 1)
        if last > pool.executed_through:
            for table in self._blocks.tables(slot):
                pool.note_use(table, last)

    def _give_back(self, slot: int, fence: int) -> None:
        """Release now, group by group; or after the fence all groups in one call, as the reference's deferred frees."""
        self._note_use(slot)
        if fence > self._blocks.pool.executed_through:
            self.release_later(self._blocks.take_all(slot)[::-1], fence)
        else:
            self._blocks.free(slot)

    def _pin_for_transfer(self, slot: int) -> None:
        """Hold a request's blocks: a transfer in flight cannot be cancelled, so they wait until its end is reported."""
        self._note_use(slot)
        self.held[slot] = self.held.pop(slot, []) + self._blocks.take_all(slot)[::-1]

    def load_is_over(self, slot: int, fence: int = 0) -> int:
        """The transfer into a request's pages has ended or failed; release them if the request was preempted since.

        Returns the step after which the request's pages may be released: launches before the load may still use them.
        """
        requests = self._requests
        if slot in requests.loading:
            requests.loading.remove(slot)
            fence = max(fence, requests.load_after[slot])
            if slot in self.held and not requests.held[slot]:
                self.release_later(self.held.pop(slot), fence)
        return fence

    def _is_ready(self, slot: int) -> bool:
        """Whether the load of a loading request is allowed to start."""
        return self._requests.load_after[slot] <= self._blocks.pool.executed_through

    def cannot_run(self, seq: int) -> frozenset[int]:
        """Slots that get no tokens in this part: their load cannot have started, or they ran in an earlier part.

        A request runs once a step, except with commit=reference.
        """
        ran = frozenset(self.grants[seq].slot) if self._safe and seq in self.grants else frozenset()
        loading = self._requests.loading
        return ran.union(slot for slot in loading if not self._is_ready(slot)) if loading else ran

    def note_load(self, slot: int, hit: Sequence[Sequence[int]]) -> int:
        """A transfer will fill the blocks of an admission that are not of its hit.

        Returns the last step in flight that may read or write one of them: the transfer starts after it.
        """
        self._requests.loading.add(slot)
        self._requests.not_zeroed.add(slot)
        self._requests.load_after[slot] = self._blocks.pool.last_use(self._loaded_blocks(slot, hit))
        return self._requests.load_after[slot]

    def end(self, slot: int, seq: int, fence: int) -> list[int]:
        """End a request and release its blocks after the fence; the slots preempted for adopting withdrawn keys."""
        adopters = self._forget_ungranted(slot, seq)
        self._give_back(slot, fence)
        self._requests.end(slot)
        self._counters.ended += 1
        return self._preempt_cascade(adopters, seq)

    def hold(self, slot: int, seq: int) -> list[int]:
        """End a request but hold its blocks until `release_held`; transfers may use them until then."""
        adopters = self._forget_ungranted(slot, seq)
        self._pin_for_transfer(slot)
        self._requests.stop(slot)
        self._requests.held[slot] = True
        self._counters.ended += 1
        return self._preempt_cascade(adopters, seq)

    def release_held(self, slot: int, seq: int) -> list[int]:
        """Record that the transfers of a held request have ended, or the load of a request that is not held.

        Returns the slots that this preempts: a load that ends before step `load_after` is executed has written nothing,
        so its request is preempted.
        """
        if not self._requests.held[slot]:
            ready = self._is_ready(slot)
            fence = self.load_is_over(slot)
            return [] if ready or not self._requests.running[slot] else self.preempt(slot, seq, fence)
        self.release_later(self.held.pop(slot), self._requests.load_after[slot])
        self._requests.end(slot)
        return []

    def _forget_ungranted(self, slot: int, seq: int) -> list[Stay]:
        if self._requests.granted_step[slot] == seq:
            return self._withdraw(self._stay(slot), seq)
        return []

    def close_step(self, seq: int) -> None:
        """The step is complete: release the blocks of its copies once it is executed (now with commit=reference)."""
        copies = self._blocks.take_copies()
        self._blocks.pool.note_use(copies, seq)
        self.release_later(copies, seq if self._safe else 0)

    def abandon(self) -> Generator[None]:
        """The epoch ends and no step in flight will be reported as executed: release all blocks.

        In slices of some requests, or of one with many blocks. After a generator that was dropped half way a further
        call continues. The records, and the blocks that a load may still write, are kept until `close`.
        """
        self.under_load |= self._under_load()
        pool, returned = self._blocks.pool, self._blocks.pool.num_free
        for number, slot in enumerate(self._requests.slots(), 1):
            if slot in self.held:
                self.release_held(slot, 0)
            if self._requests.is_live(slot):
                self._blocks.free(slot)
                self._requests.end(slot)
            if number % _SLICE_REQUESTS == 0 or pool.num_free - returned >= SLICE_BLOCKS:
                returned = pool.num_free
                yield
        while self.waiting:
            pool.release(self.waiting.popleft()[1])
        pool.release(self._blocks.take_copies())

    def close(self) -> list[int]:
        """The epoch has ended: clear all records. Returns the blocks that its loads may still write, ascending."""
        busy = sorted(self.under_load)
        self.under_load.clear()
        for book in (self.grants, self.tentative, self.adoptions, self.filling):
            book.clear()
        return busy

    def _under_load(self) -> set[int]:
        """Blocks that loads may still write. Keyed blocks of a loading request are its hit, which no load writes."""
        requests, pool = self._requests, self._blocks.pool
        found = {block for blocks in self.filling.values() for block in blocks}
        for slot in requests.loading:
            tables = self._blocks.tables(slot) if requests.running[slot] else [self.held[slot]]
            found.update(block for table in tables for block in table if pool.key[block] is None)
        return found - {NULL_BLOCK}
