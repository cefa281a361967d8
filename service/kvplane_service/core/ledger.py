"""What is in flight: grants, tentative keys and blocks whose return must wait, by the step that they belong to.

    free -> assigned -> executed -> published

A step that was answered may still be on its way to the GPU, or never get there. Until `executed_through` reaches it,
the keys it registered are tentative: the replica's own requests may hit them (states may not), nobody else sees them,
and they are withdrawn when the step will not run for their request. Whoever adopted them is preempted with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvplane.base.groups import CommitRule
from kvplane.base.step import RemoveReason
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.counters import Counters
from kvplane_service.core.pool import Key


@dataclass(frozen=True, slots=True)
class Grant:
    """Tokens given to one life of a slot by one step."""

    slot: int
    serial: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TentativeKey:
    """A key that one step registered for one life of a slot."""

    block: int
    key: Key
    slot: int
    serial: int


class Ledger:
    """Books by step number, closed as steps are executed."""

    def __init__(self, coordinator: Coordinator, counters: Counters) -> None:
        self._blocks = coordinator
        self._requests = coordinator.requests
        self._counters = counters
        self._safe = coordinator.spec.commit is CommitRule.SAFE
        self.grants: dict[int, list[Grant]] = {}
        self.tentative: dict[int, list[TentativeKey]] = {}
        self.waiting: deque[tuple[int, list[int]]] = deque()  # (step, blocks) to release once it is executed, in order
        self.held: dict[int, list[int]] = {}  # slot -> blocks of a request that ended while a transfer reads them

    # -- notes -------------------------------------------------------------------------------------------------------

    def note_grant(self, slot: int, num_tokens: int, seq: int) -> None:
        """A request may compute tokens in this step."""
        requests = self._requests
        requests.in_flight[slot] += num_tokens
        requests.granted_step[slot] = seq
        self.grants.setdefault(seq, []).append(Grant(slot, requests.serial[slot], num_tokens))
        self._counters.granted_tokens += num_tokens

    def note_admission(self, slot: int, num_hit: int) -> None:
        """A request was admitted with a hit."""
        self._counters.admitted += 1
        if not self._requests.skip_reading[slot]:
            self._counters.queried_tokens += self._requests.num_tokens[slot]
            self._counters.hit_tokens += num_hit

    def note_keys(self, slot: int, seq: int) -> None:
        """What was registered since the last call belongs to this request and step."""
        registered = self._blocks.pool.registered
        if registered and self._safe and seq > self._blocks.pool.executed_through:
            serial = self._requests.serial[slot]
            keys = self.tentative.setdefault(seq, [])
            keys.extend(TentativeKey(block, key, slot, serial) for block, key in registered)
        registered.clear()

    # -- ends --------------------------------------------------------------------------------------------------------

    def executed(self, through: int) -> None:
        """All steps up to this one have finished on all ranks."""
        pool, requests = self._blocks.pool, self._requests
        pool.executed_through = max(pool.executed_through, through)
        for seq in [seq for seq in self.grants if seq <= through]:
            for grant in self.grants.pop(seq):
                if requests.serial[grant.slot] == grant.serial and requests.running[grant.slot]:
                    requests.in_flight[grant.slot] = max(0, requests.in_flight[grant.slot] - grant.num_tokens)
        for seq in [seq for seq in self.tentative if seq <= through]:
            del self.tentative[seq]
        while self.waiting and self.waiting[0][0] <= through:
            pool.release(self.waiting.popleft()[1])

    def release_later(self, blocks: list[int], fence: int) -> None:
        """Release blocks in this order once the fence step is executed; at once if it is."""
        if fence <= self._blocks.pool.executed_through:
            self._blocks.pool.release(blocks)
        elif blocks:
            self.waiting.append((fence, blocks))

    def preempt(self, slot: int, seq: int) -> list[int]:
        """Take a request's blocks; the slots that lost theirs, this one first.

        When the step under way had granted it tokens, that step will not run for it: its keys of the step are
        withdrawn, and whoever adopted them is preempted too.
        """
        never_runs_from = seq if self._requests.granted_step[slot] == seq else seq + 1
        return self._preempt_all([slot], never_runs_from)

    def fail_step(self, seq: int) -> list[int]:
        """A step will never run: the requests that it granted tokens to are preempted, and who adopted its keys."""
        requests = self._requests
        lost = [
            grant.slot
            for grant in self.grants.get(seq, ())
            if requests.serial[grant.slot] == grant.serial and requests.running[grant.slot]
        ]
        return self._preempt_all(lost, seq)

    def _preempt_all(self, slots: Iterable[int], never_runs_from: int) -> list[int]:
        requests = self._requests
        queue, gone = deque(slots), list[int]()
        while queue:
            slot = queue.popleft()
            if not requests.running[slot]:
                continue
            adopters = self._withdraw(slot, never_runs_from)
            self._blocks.free(slot)
            requests.stop(slot)
            requests.serial[slot] += 1
            self._counters.preempted += 1
            gone.append(slot)
            queue.extend(adopters)
        return gone

    def _withdraw(self, slot: int, from_step: int) -> list[int]:
        """Drop the keys that steps from `from_step` on registered for the request; who else holds their blocks."""
        requests, pool = self._requests, self._blocks.pool
        serial, adopters = requests.serial[slot], list[int]()
        for step in [step for step in self.tentative if step >= from_step]:
            mine = [one for one in self.tentative[step] if one.slot == slot and one.serial == serial]
            for one in mine:
                if pool.has_key(one.block, one.key):
                    pool.drop_keys(one.block, RemoveReason.WITHDRAWN)
                    self._counters.withdrawn_keys += 1
                    others = (other for other in requests.slots() if other != slot and requests.running[other])
                    adopters.extend(self._blocks.holders(one.block, others))
        return adopters

    def end(self, slot: int, seq: int, fence: int) -> list[int]:
        """End a request and give its blocks back after the fence; the adopters of withdrawn keys are preempted."""
        adopters = self._forget_ungranted(slot, seq)
        if fence > self._blocks.pool.executed_through:
            self.release_later(self._blocks.take_all(slot)[::-1], fence)
        else:
            self._blocks.free(slot)
        self._requests.end(slot)
        self._counters.ended += 1
        return self._preempt_all(adopters, seq)

    def hold(self, slot: int, seq: int) -> list[int]:
        """End a request but keep its blocks until `release_held`."""
        adopters = self._forget_ungranted(slot, seq)
        self.held[slot] = self._blocks.take_all(slot)[::-1]
        self._requests.stop(slot)
        self._requests.held[slot] = True
        self._counters.ended += 1
        return self._preempt_all(adopters, seq)

    def release_held(self, slot: int) -> None:
        """The transfers of a held request are done."""
        self._blocks.pool.release(self.held.pop(slot))
        self._requests.end(slot)

    def _forget_ungranted(self, slot: int, seq: int) -> list[int]:
        if self._requests.granted_step[slot] == seq:
            return self._withdraw(slot, seq)
        return []

    def abandon(self) -> None:
        """The epoch ended: nothing that was in flight will be told executed; all blocks return."""
        for slot in self._requests.slots():
            if self._requests.held[slot]:
                self.release_held(slot)
                continue
            self._blocks.free(slot)
            self._requests.end(slot)
        while self.waiting:
            self._blocks.pool.release(self.waiting.popleft()[1])
        self._blocks.pool.release(self._blocks.take_copies())
        self.grants.clear()
        self.tentative.clear()
