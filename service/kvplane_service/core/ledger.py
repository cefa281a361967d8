"""What is in flight: grants, tentative keys and blocks whose return must wait, by the step that they belong to.

    free -> assigned -> executed -> published

A step that was answered may still be on its way to the GPU, or never get there. Until `executed_through` reaches it,
the keys it registered are tentative: the replica's own requests may hit them (states may not), nobody else sees them,
and they are withdrawn when the step will not run for their request. Whoever adopted them is preempted with them.
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


class Life(NamedTuple):
    """One stay of a request in a slot, from an admission to its end or preemption."""

    slot: int
    serial: int


@dataclass(slots=True)
class Grants:
    """Tokens given by one step, in columns: one entry per life and part."""

    slot: list[int] = field(default_factory=list)
    serial: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def lives(self) -> list[Life]:
        """Who was given tokens."""
        return [Life(slot, serial) for slot, serial in zip(self.slot, self.serial, strict=True)]


class TentativeKey(NamedTuple):
    """A key that one step registered for one life."""

    block: int
    key: Key
    life: Life


class Ledger:
    """Books by step number, closed as steps are executed."""

    def __init__(self, coordinator: Coordinator, counters: Counters) -> None:
        self._blocks = coordinator
        self._requests = coordinator.requests
        self._counters = counters
        self._safe = coordinator.spec.commit is CommitRule.SAFE
        self.grants: dict[int, Grants] = {}
        self.tentative: dict[int, list[TentativeKey]] = {}
        self.adoptions: dict[int, list[tuple[int, Life]]] = {}  # (block with a key of that step, who hit it)
        self.waiting: deque[tuple[int, list[int]]] = deque()  # (step, blocks) to release once it is executed, in order
        self.held: dict[int, list[int]] = {}  # slot -> blocks that a transfer reads (it ended as held) or fills
        self.under_load: set[int] = set()  # of an epoch that ends: blocks that no mover has confirmed
        self.filling: dict[int, list[int]] = {}  # step -> blocks that come from outside before its launch

    # -- notes -------------------------------------------------------------------------------------------------------

    def note_grants(self, slots: Sequence[int], num_tokens: Sequence[int], seq: int) -> None:
        """These requests may compute so many tokens each in this step."""
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
        """These requests have tokens to run, so their loads have ended: a row asks for none before."""
        self._requests.loading.difference_update(slots)
        self._requests.not_zeroed.difference_update(slots)

    def granted_in(self, seq: int) -> tuple[int, int]:
        """Rows that have tokens of this step so far, and how many; without those that lost them since."""
        requests, grants = self._requests, self.grants.get(seq, Grants())
        latest = dict(zip(grants.slot, zip(grants.serial, grants.num_tokens, strict=True), strict=True))
        kept = [
            tokens
            for slot, (serial, tokens) in latest.items()
            if requests.running[slot] and requests.serial[slot] == serial
        ]
        return len(kept), sum(kept)

    def note_admission(self, slot: int, num_hit: int, hit: Sequence[Sequence[int]]) -> None:
        """A request was admitted with a hit; what it adopted may still be taken back."""
        self._counters.admitted += 1
        if not self._requests.skip_reading[slot]:
            self._counters.queried_tokens += self._requests.num_tokens[slot]
            self._counters.hit_tokens += num_hit
        pool = self._blocks.pool
        if not self._safe:
            return
        for block in (block for blocks in hit for block in blocks if block != NULL_BLOCK):
            if pool.key_step[block] > pool.executed_through:
                self.adoptions.setdefault(pool.key_step[block], []).append((block, self._life(slot)))

    def note_filling(self, slot: int, hit: Sequence[Sequence[int]], seq: int) -> None:
        """The step loads what the request has behind its hit before its launch: the load ends as the step does."""
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
        """What was registered since the last call belongs to this request and step."""
        registered = self._blocks.pool.registered
        if not registered:
            return
        if self._safe and seq > self._blocks.pool.executed_through:
            life = self._life(slot)
            self.tentative.setdefault(seq, []).extend([TentativeKey(block, key, life) for block, key in registered])
        registered.clear()

    def _life(self, slot: int) -> Life:
        return Life(slot, self._requests.serial[slot])

    def _runs(self, life: Life) -> bool:
        return self._requests.running[life.slot] and self._requests.serial[life.slot] == life.serial

    def is_executed(self, slot: int, num_tokens: int) -> bool:
        """Whether the pages of the request's first tokens are written: none in flight, nor adopted from such a step."""
        requests = self._requests
        if num_tokens > requests.computed[slot] - requests.in_flight[slot]:
            return False
        if requests.granted_step[slot] > self._blocks.pool.executed_through:
            return False  # even a grant of no tokens may have ordered a copy
        life = self._life(slot)
        return not any(adopter == life for book in self.adoptions.values() for _, adopter in book)

    # -- ends --------------------------------------------------------------------------------------------------------

    def executed(self, through: int) -> None:
        """All steps up to this one have finished on all ranks."""
        pool, requests = self._blocks.pool, self._requests
        in_flight, serial, running = requests.in_flight, requests.serial, requests.running
        through = pool.executed_through = max(pool.executed_through, through)
        for seq in [seq for seq in self.grants if seq <= through]:
            grants = self.grants.pop(seq)
            for slot, life, count in zip(grants.slot, grants.serial, grants.num_tokens, strict=True):
                if serial[slot] == life and running[slot]:
                    left = in_flight[slot] - count
                    in_flight[slot] = left if left > 0 else 0
        for book in (self.tentative, self.adoptions, self.filling):
            for seq in [seq for seq in book if seq <= through]:
                del book[seq]
        while self.waiting and self.waiting[0][0] <= through:
            pool.release(self.waiting.popleft()[1])

    def release_later(self, blocks: list[int], fence: int) -> None:
        """Release blocks in this order once the fence step is executed; at once if it is."""
        if fence <= self._blocks.pool.executed_through:
            self._blocks.pool.release(blocks)
        elif blocks:
            assert fence <= self._blocks.pool.step, f"blocks wait for step {fence}, which was not sent"
            self.waiting.append((fence, blocks))

    def preempt(self, slot: int, seq: int, fence: int = 0) -> list[int]:
        """Take a request's blocks, to be given back after the fence; the slots that lost theirs, this one first.

        When the step under way had granted it tokens, that step will not run for it: its keys of the step are
        withdrawn, and whoever adopted them is preempted too.
        """
        never_runs_from = seq if self._requests.granted_step[slot] == seq else seq + 1
        return self._lose([self._life(slot)], never_runs_from, fence)

    def fail_step(self, seq: int) -> list[int]:
        """A step will never run: the requests that it granted tokens to are preempted, and who adopted its keys."""
        return self._lose(self.grants.get(seq, Grants()).lives(), seq)

    def _lose(self, lives: Iterable[Life], from_step: int, fence: int = 0) -> list[int]:
        """Steps from `from_step` on do not run for these lives: withdraw what they registered, and what was built on
        it. Lives that still run are preempted; the others have ended, but their keys would outlive them.
        """
        queue, seen, preempted = deque(lives), set[Life](), list[int]()
        while queue:
            life = queue.popleft()
            if life in seen:
                continue
            seen.add(life)
            self._take_back(life, from_step)
            queue.extend(self._withdraw(life, from_step))
            if self._runs(life):
                if life.slot in self._requests.loading:
                    self._keep(life.slot)
                else:
                    self._give_back(life.slot, fence)
                self._requests.stop(life.slot)
                self._requests.serial[life.slot] += 1
                self._counters.preempted += 1
                preempted.append(life.slot)
        return preempted

    def _take_back(self, life: Life, from_step: int) -> None:
        """Forget what steps from `from_step` on granted this life."""
        for grants in (grants for step, grants in self.grants.items() if step >= from_step):
            for row in reversed([row for row, one in enumerate(grants.lives()) if one == life]):
                self._counters.granted_tokens -= grants.num_tokens[row]
                for column in (grants.slot, grants.serial, grants.num_tokens):
                    del column[row]

    def _withdraw(self, life: Life, from_step: int) -> list[Life]:
        """Drop the keys that steps from `from_step` on registered for this life; who adopted their blocks."""
        pool, adopters = self._blocks.pool, list[Life]()
        for step in [step for step in self.tentative if step >= from_step]:
            mine = [one for one in self.tentative[step] if one.life == life]
            self.tentative[step] = [one for one in self.tentative[step] if one.life != life]
            for one in mine:
                if pool.has_key(one.block, one.key):
                    pool.drop_keys(one.block, RemoveReason.WITHDRAWN)
                    self._counters.withdrawn_keys += 1
            blocks = {one.block for one in mine}
            adopters.extend(adopter for block, adopter in self.adoptions.get(step, ()) if block in blocks)
        return adopters

    def _note_use(self, slot: int) -> None:
        """The request gives its blocks up while its launches may be in flight; the step under way runs without it."""
        pool = self._blocks.pool
        last = min(self._requests.granted_step[slot], pool.step - 1)
        if last > pool.executed_through:
            for table in self._blocks.tables(slot):
                pool.note_use(table, last)

    def _give_back(self, slot: int, fence: int) -> None:
        """At once group by group; after a fence in one call over all groups, as the reference's deferred frees."""
        self._note_use(slot)
        if fence > self._blocks.pool.executed_through:
            self.release_later(self._blocks.take_all(slot)[::-1], fence)
        else:
            self._blocks.free(slot)

    def _keep(self, slot: int) -> None:
        """A transfer cannot be stopped from here: its pages are no others' until it is told to be over."""
        self._note_use(slot)
        self.held[slot] = self.held.pop(slot, []) + self._blocks.take_all(slot)[::-1]

    def load_is_over(self, slot: int, fence: int = 0) -> int:
        """The transfer into a request's pages has ended or failed; if it was preempted meanwhile, they return.

        Returns the step after which the pages of the request may return: not before the launches in front of the load.
        """
        requests = self._requests
        if slot in requests.loading:
            requests.loading.remove(slot)
            fence = max(fence, requests.load_after[slot])
            if slot in self.held and not requests.held[slot]:
                self.release_later(self.held.pop(slot), fence)
        return fence

    def _is_ready(self, slot: int) -> bool:
        """Whether the load of a request that is loading may have started."""
        return self._requests.load_after[slot] <= self._blocks.pool.executed_through

    def cannot_run(self, seq: int) -> frozenset[int]:
        """Slots that get no tokens in this part: a load into them has not started, or they ran in an earlier part (a
        request runs once a step, unless commit=reference).
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
        """End a request and give its blocks back after the fence; the adopters of withdrawn keys are preempted."""
        adopters = self._forget_ungranted(slot, seq)
        self._give_back(slot, fence)
        self._requests.end(slot)
        self._counters.ended += 1
        return self._lose(adopters, seq)

    def hold(self, slot: int, seq: int) -> list[int]:
        """End a request but keep its blocks until `release_held`; a load into them may go on until then."""
        adopters = self._forget_ungranted(slot, seq)
        self._keep(slot)
        self._requests.stop(slot)
        self._requests.held[slot] = True
        self._counters.ended += 1
        return self._lose(adopters, seq)

    def release_held(self, slot: int, seq: int) -> list[int]:
        """The transfers of a held request are done, or the load of another one is; the slots that lost their blocks.

        A load that is over before it was allowed to start brought nothing: its request is preempted.
        """
        if not self._requests.held[slot]:
            ready = self._is_ready(slot)
            fence = self.load_is_over(slot)
            return [] if ready or not self._requests.running[slot] else self.preempt(slot, seq, fence)
        self.release_later(self.held.pop(slot), self._requests.load_after[slot])
        self._requests.end(slot)
        return []

    def _forget_ungranted(self, slot: int, seq: int) -> list[Life]:
        if self._requests.granted_step[slot] == seq:
            return self._withdraw(self._life(slot), seq)
        return []

    def close_step(self, seq: int) -> None:
        """The step is complete: both ends of its copies return when it has run (at once as the reference does)."""
        copies = self._blocks.take_copies()
        self._blocks.pool.note_use(copies, seq)
        self.release_later(copies, seq if self._safe else 0)

    def abandon(self) -> Generator[None]:
        """The epoch ends: nothing that was in flight will be told executed; all blocks return.

        In slices of some requests, or of one with many blocks. When it is given up half way a later call goes on; the
        books stay until `close`, with the blocks that a load may still write.
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
        """The epoch has ended: no step of it is in the books. Blocks that its loads may still write, ascending."""
        busy = sorted(self.under_load)
        self.under_load.clear()
        for book in (self.grants, self.tentative, self.adoptions, self.filling):
            book.clear()
        return busy

    def _under_load(self) -> set[int]:
        """Blocks that no mover has confirmed; of a load's table those with a key are its hit, which no load writes."""
        requests, pool = self._requests, self._blocks.pool
        found = {block for blocks in self.filling.values() for block in blocks}
        for slot in requests.loading:
            tables = self._blocks.tables(slot) if requests.running[slot] else [self.held[slot]]
            found.update(block for table in tables for block in table if pool.key[block] is None)
        return found - {NULL_BLOCK}
