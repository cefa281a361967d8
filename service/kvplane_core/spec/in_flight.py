"""Records of each step in flight: tokens granted, keys registered, and blocks to release after the execution of the
step.

    a block:  free -> assigned -> executed -> published

A step that was answered may be executed later, or never. Until `executed_through` reaches the step, the keys that it
registered are tentative: other requests of this replica may hit these keys, which is safe because the steps of those
requests run later (a recurrent state may not be hit); other clients do not see them. If the step does not run for the
request that registered a key, the key is withdrawn, and requests that adopted its block are preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

from kvplane.base.groups import CommitRule, EvictionPolicy
from kvplane.base.step import RemoveReason
from kvplane_core.face.counters import Counters
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.eviction import renew_states
from kvplane_core.spec.policies import note_released
from kvplane_core.spec.preempted import leave_hit


class Stay(NamedTuple):
    """One use of a slot by a request, from its admission to its end or preemption; `serial` counts the uses of the
    slot.
    """

    slot: int
    serial: int


@dataclass(slots=True)
class Grants:
    """Tokens that one step granted, in columns: one entry per part of the step and per stay (one use of a slot)."""

    slot: list[int] = field(default_factory=list)
    serial: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def stays(self) -> list[Stay]:
        """Return the stays (uses of a slot) to which the step granted tokens."""
        return [Stay(slot, serial) for slot, serial in zip(self.slot, self.serial, strict=True)]


class InFlightTracker:
    """Keeps what each step in flight granted, registered and adopted, until the step is executed or fails."""

    def __init__(self, coordinator: Coordinator, counters: Counters) -> None:
        self._blocks = coordinator
        self._requests = coordinator.requests
        self._counters = counters
        self._safe = coordinator.spec.commit is CommitRule.SAFE
        self.grants: dict[int, Grants] = {}
        self.tentative: dict[int, dict[Stay, list[tuple[int, Key]]]] = {}  # step -> keys, by the stay that registered
        self.adoptions: dict[int, dict[int, list[Stay]]] = {}  # step -> stays that adopted a key of it, by block
        self.waiting: deque[tuple[int, list[int]]] = deque()  # (step, blocks) to release once it is executed, in order
        self.held: dict[int, list[int]] = {}  # slot -> blocks that a transfer reads (ended as held) or writes
        self.under_load: set[int] = set()  # while an epoch ends: blocks whose loads are not confirmed to be over
        self.filling: dict[int, list[int]] = {}  # step -> blocks that are loaded before its launch
        self._withdrawn: list[int] = []  # blocks that lost their keys in the cascade that is carried out

    # -- notes -------------------------------------------------------------------------------------------------------

    def note_grants(self, slots: Sequence[int], num_tokens: Sequence[int], seq: int) -> None:
        """Record the tokens that step `seq` grants to each of these requests."""
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
        """Record that the loads of these requests have ended: an engine grants tokens to a loading request only after
        the load.
        """
        self._requests.loading.difference_update(slots)
        self._requests.not_zeroed.difference_update(slots)

    def granted_in(self, seq: int) -> tuple[int, int]:
        """Return how many rows of this step got tokens so far, and the sum of these tokens; rows preempted since do not
        count.
        """
        requests, grants = self._requests, self.grants.get(seq, Grants())
        latest = dict(zip(grants.slot, zip(grants.serial, grants.num_tokens, strict=True), strict=True))
        kept = [
            tokens
            for slot, (serial, tokens) in latest.items()
            if requests.running[slot] and requests.serial[slot] == serial
        ]
        return len(kept), sum(kept)

    def note_admission(self, slot: int, num_hit: int, hit: Sequence[Sequence[int]]) -> None:
        """Count an admission, and record the blocks of its hit whose keys were registered by steps not executed yet."""
        self._counters.admitted += 1
        if not self._requests.skip_reading[slot]:
            self._counters.queried_tokens += self._requests.num_tokens[slot]
            self._counters.hit_tokens += num_hit
        pool, stay, last = self._blocks.pool, self._stay(slot), 0
        self._blocks.tiers.note_hit(chain.from_iterable(hit))
        if not self._safe:
            return
        for block in (block for blocks in hit for block in blocks if block != NULL_BLOCK):
            step = pool.key_step[block]
            if step > pool.executed_through:
                self.adoptions.setdefault(step, {}).setdefault(block, []).append(stay)
                last = max(last, step)
        self._requests.adopted_step[slot] = last

    def note_filling(self, slot: int, hit: Sequence[Sequence[int]], seq: int) -> None:
        """Record that the launch of this step itself loads the request's external tokens: the load ends with
        the step.
        """
        self.filling.setdefault(seq, []).extend(sorted(self._loaded_blocks(slot, hit)))

    def _loaded_blocks(self, slot: int, hit: Sequence[Sequence[int]]) -> set[int]:
        """Return the blocks that a load may write: all blocks of the request's tables except those of the hit.

        A block counts as part of the hit only where table and hit list it at the same position. The hit also lists
        blocks outside the attention window, which the request does not hold: its own allocation may put such a block at
        another position, and the load writes it there.
        """
        return {
            block
            for table, adopted in zip(self._blocks.tables(slot), hit, strict=True)
            for block, of_hit in zip_longest(table, adopted)
            if block != of_hit
        }

    def note_keys(self, slot: int, seq: int) -> None:
        """Record, for step `seq`, the keys that this request registered since the last call."""
        registered = self._blocks.pool.registered
        if not registered:
            return
        self._blocks.tiers.note_computed(registered)
        if self._safe and seq > self._blocks.pool.executed_through:
            self.tentative.setdefault(seq, {}).setdefault(self._stay(slot), []).extend(registered)
        registered.clear()

    def _stay(self, slot: int) -> Stay:
        return Stay(slot, self._requests.serial[slot])

    def _runs(self, stay: Stay) -> bool:
        return self._requests.running[stay.slot] and self._requests.serial[stay.slot] == stay.serial

    def is_executed(self, slot: int, num_tokens: int) -> bool:
        """Whether all steps that write the pages of the request's first `num_tokens` tokens are executed; pages of the
        hit count too.
        """
        requests = self._requests
        if num_tokens > requests.computed[slot] - requests.in_flight[slot]:
            return False
        if requests.granted_step[slot] > self._blocks.pool.executed_through:
            return False  # a row that was granted 0 tokens can order a copy too
        return requests.adopted_step[slot] <= self._blocks.pool.executed_through

    # -- ends --------------------------------------------------------------------------------------------------------

    def executed(self, through: int) -> None:
        """Remove the records of steps up to `through`, which all ranks have finished; releases the blocks that waited
        for these steps.
        """
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
            if book:
                for seq in [seq for seq in book if seq <= through]:
                    del book[seq]
        while self.waiting and self.waiting[0][0] <= through:
            pool.release(self.waiting.popleft()[1])

    def release_later(self, blocks: list[int], fence: int) -> None:
        """Release the blocks, in this order, once step `fence` is executed; immediately if `fence` is
        executed already.
        """
        if fence <= self._blocks.pool.executed_through:
            self._blocks.pool.release(blocks)
        elif blocks:
            assert fence <= self._blocks.pool.step, f"blocks wait for step {fence}, which was not sent"
            self.waiting.append((fence, blocks))

    def preempt(self, slot: int, seq: int, fence: int = 0) -> list[int]:
        """Preempt a request; its blocks are released once step `fence` is executed.

        Returns all slots that are preempted, beginning with `slot`. If the step being applied granted tokens to the
        request, the step will not run for the request: the keys that the request registered in this step are withdrawn,
        and requests that adopted blocks of these keys are preempted too.
        """
        cancelled_from_step = seq if self._requests.granted_step[slot] == seq else seq + 1
        return self._preempt_cascade([self._stay(slot)], cancelled_from_step, fence)

    def prepare_return(self, slot: int) -> None:
        """Let a request that is preempted now, and all of whose blocks are as they should be, continue later from where
        it is, if the replica has tiers.
        """
        blocks, requests, pool = self._blocks, self._requests, self._blocks.pool
        fresh = requests.granted_step[slot] == pool.step  # what it was granted is not computed
        if not blocks.tiers.each or fresh or slot in requests.loading or self.loads_from_tiers(slot):
            return
        # As if the step before had registered them: if that, or one before it, does not run, they are withdrawn.
        pool.step -= 1
        leave_hit(blocks, slot)
        self.note_keys(slot, pool.step)
        pool.step += 1
        blocks.tiers.note_hit(block for table in blocks.tables(slot) for block in reversed(table))

    def next_victim(self, seq: int) -> int | None:
        """Return the slot of the last request that step `seq` granted tokens to: an engine preempts it first."""
        stays = self.grants.get(seq, Grants()).stays()[-1:]
        return next((stay.slot for stay in stays if self._runs(stay)), None)

    def fail_step(self, seq: int) -> list[int]:
        """Preempt the requests to which a failed step granted tokens, and the requests that adopted keys of this step.

        Returns the preempted slots.
        """
        return self._preempt_cascade(self.grants.get(seq, Grants()).stays(), seq)

    def _preempt_cascade(self, stays: Iterable[Stay], from_step: int, fence: int = 0) -> list[int]:
        """Preempt these stays (uses of a slot), for which steps from `from_step` on do not run, and withdraw the keys
        of these steps.

        Every stay that adopted a withdrawn key is treated in the same way. A stay that has ended only loses its keys.
        """
        queue, seen, preempted = deque(stays), set[Stay](), list[int]()
        while queue:
            stay = queue.popleft()
            if stay in seen:
                continue
            seen.add(stay)
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
        self._cancel_grants(seen, from_step)
        self._register_again()
        return preempted

    def _register_again(self) -> None:
        """Let the requests that still hold blocks whose keys were withdrawn register these blocks again.

        Safe: they hold what earlier steps wrote, since a request that adopted a withdrawn key is preempted.
        """
        held = [block for block in self._withdrawn if self._blocks.pool.references[block]]
        self._withdrawn.clear()
        if held:
            self._blocks.register_again(held)

    def _cancel_grants(self, stays: set[Stay], from_step: int) -> None:
        """Remove the records of tokens that steps from `from_step` on granted to these stays (uses of a slot)."""
        slots = {stay.slot for stay in stays}
        for grants in (grants for step, grants in self.grants.items() if step >= from_step):
            if slots.isdisjoint(grants.slot):
                continue  # a step may preempt hundreds of requests one by one
            for row in reversed([row for row, one in enumerate(grants.stays()) if one in stays]):
                self._counters.granted_tokens -= grants.num_tokens[row]
                for column in (grants.slot, grants.serial, grants.num_tokens):
                    del column[row]

    def _withdraw(self, stay: Stay, from_step: int) -> list[Stay]:
        """Drop the keys that this stay (use of a slot) registered in steps from `from_step` on; returns the stays that
        adopted these keys.
        """
        pool, adopters = self._blocks.pool, list[Stay]()
        for step in sorted(step for step in self.tentative if step >= from_step):
            mine = self.tentative[step].pop(stay, [])
            for block, key in mine:
                if pool.has_key(block, key):
                    self._withdrawn.append(block)
                    pool.drop_keys(block, RemoveReason.WITHDRAWN)
                    self._counters.withdrawn_keys += 1
            of_block = self.adoptions.get(step, {})
            adopters.extend(adopter for block, _ in mine for adopter in of_block.get(block, ()))
        return adopters

    def _note_use(self, slot: int) -> None:
        """Record that launches in flight may use the request's blocks; the step being applied is not one of them."""
        pool = self._blocks.pool
        last = min(self._requests.granted_step[slot], pool.step - 1)
        if last > pool.executed_through:
            for table in self._blocks.tables(slot):
                pool.note_use(table, last)

    def _give_back(self, slot: int, fence: int) -> None:
        """Release the request's blocks: group by group if step `fence` is executed, else all in one call once it is, as
        vLLM does.
        """
        self._note_use(slot)
        spec = self._blocks.spec
        if spec.eviction is EvictionPolicy.TURN_TAIL or spec.blocks_per_state > 1:
            renew_states(self._blocks.managers, slot)
        note_released(self._blocks.managers, slot)
        if fence > self._blocks.pool.executed_through:
            self.release_later(self._blocks.take_all(slot)[::-1], fence)
        else:
            self._blocks.free(slot)

    def _pin_for_transfer(self, slot: int) -> None:
        """Hold a request's blocks until the engine reports the end of the transfer that reads these blocks: a transfer
        cannot be cancelled.
        """
        self._note_use(slot)
        note_released(self._blocks.managers, slot)
        self.held[slot] = self.held.pop(slot, []) + self._blocks.take_all(slot)[::-1]

    def load_is_over(self, slot: int, fence: int = 0) -> int:
        """Record that the load into a request's pages has ended; releases the pages if the request was preempted since.

        Returns the number of the step after which the request's pages may be released, at least `fence`: launches that
        were sent before the load may still use the pages.
        """
        requests = self._requests
        if slot in requests.loading:
            requests.loading.remove(slot)
            fence = max(fence, requests.load_after[slot])
            if slot in self.held and not requests.held[slot]:
                self.release_later(self.held.pop(slot), fence)
        return fence

    def _is_ready(self, slot: int) -> bool:
        """Whether the load into this request is allowed to start."""
        return self._requests.load_after[slot] <= self._blocks.pool.executed_through

    def cannot_run(self, seq: int) -> frozenset[int]:
        """Return slots that get no tokens in this part: the load of their request cannot have started, or an earlier
        part granted tokens.

        A request runs at most once per step, except with commit=reference (the replica behaves as vLLM).
        """
        ran = frozenset(self.grants[seq].slot) if self._safe and seq in self.grants else frozenset()
        loading = self._requests.loading
        if self._blocks.tiers.loading:
            ran = ran.union(slot for slot in self._blocks.tiers.loading if self.loads_from_tiers(slot))
        return ran.union(slot for slot in loading if not self._is_ready(slot)) if loading else ran

    def loads_from_tiers(self, slot: int) -> bool:
        """Whether a load from the tiers fills blocks of the request's hit."""
        tiers = self._blocks.tiers
        if slot not in tiers.loading:
            return False
        load = tiers.jobs.loads[tiers.loading[slot]]
        return self._requests.running[slot] and self._requests.serial[slot] == load.serial

    def note_load(self, slot: int, hit: Sequence[Sequence[int]]) -> int:
        """Record that a transfer will fill all blocks of an admitted request that are not part of its hit.

        Returns the number of the last step in flight that may read or write one of these blocks: the transfer must
        start after it.
        """
        self._requests.loading.add(slot)
        self._requests.not_zeroed.add(slot)
        self._requests.load_after[slot] = self._blocks.pool.last_use(self._loaded_blocks(slot, hit))
        return self._requests.load_after[slot]

    def end(self, slot: int, seq: int, fence: int) -> list[int]:
        """End a request; its blocks are released once step `fence` is executed.

        Returns the slots that are preempted because they adopted keys of the request that are now withdrawn.
        """
        adopters = self._forget_ungranted(slot, seq)
        self._give_back(slot, fence)
        self._requests.end(slot)
        self._counters.ended += 1
        return self._preempt_cascade(adopters, seq)

    def hold(self, slot: int, seq: int) -> list[int]:
        """End a request but hold its blocks for transfers until `release_held`; returns the preempted slots, as `end`
        does.
        """
        adopters = self._forget_ungranted(slot, seq)
        self._pin_for_transfer(slot)
        self._requests.stop(slot)
        self._requests.held[slot] = True
        self._counters.ended += 1
        return self._preempt_cascade(adopters, seq)

    def release_held(self, slot: int, seq: int) -> list[int]:
        """Record that the transfers of a held request have ended, or the load into a request that is not held.

        Returns the slots that are preempted: a load that is reported as ended before step `load_after` is executed
        cannot have started, so its request is preempted.
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
        """Complete step `seq`: the blocks of its copies are released once the step is executed.

        With commit=reference (the replica behaves as vLLM) they are released immediately.
        """
        copies = self._blocks.take_copies()
        if copies:
            self._blocks.pool.note_use(copies, seq)
            self.release_later(copies, seq if self._safe else 0)

    def abandon(self) -> None:
        """Release the blocks of all requests at the end of an engine life: its steps in flight will not be executed.

        The records, and the list of blocks that a load may still write, are kept until `close`.
        """
        self.under_load |= self._under_load()
        from_tiers = self._blocks.tiers.abandon_loads()
        self.under_load |= set(from_tiers)
        self._blocks.pool.release(from_tiers)
        pool = self._blocks.pool
        for slot in self._requests.slots():
            if slot in self.held:
                self.release_held(slot, 0)
            if self._requests.is_live(slot):
                self._blocks.free(slot)
                self._requests.end(slot)
        while self.waiting:
            pool.release(self.waiting.popleft()[1])
        pool.release(self._blocks.take_copies())

    def close(self) -> list[int]:
        """Clear all records of an ended engine life; returns the blocks that its loads may still write, ascending."""
        busy = sorted(self.under_load)
        self.under_load.clear()
        for book in (self.grants, self.tentative, self.adoptions, self.filling):
            book.clear()
        return busy

    def _under_load(self) -> set[int]:
        """Return the blocks that loads may still write. A block with a key belongs to a hit, and no load writes the
        blocks of a hit.
        """
        requests, pool = self._requests, self._blocks.pool
        found = {block for blocks in self.filling.values() for block in blocks}
        for slot in requests.loading:
            tables = self._blocks.tables(slot) if requests.running[slot] else [self.held[slot]]
            found.update(block for table in tables for block in table if pool.key[block] is None)
        return found - {NULL_BLOCK}
