"""The history of keys and requests in the decision log: when each key was stored and removed, and by which request.

It is built from a copy of the log's entries, so that a thread can read the history while the log changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress, pairwise, repeat
from typing import NamedTuple, TypeAlias

import numpy as np

from kvplane.base.step import (
    EVICTIONS,
    NO_EXTRA_KEYS,
    AdmitStatus,
    CacheEvent,
    End,
    EventKind,
    ExtraKeys,
    Facts,
    News,
    Part,
    PartResult,
    RemoveReason,
)
from kvplane.base.values import WhyDeclined
from kvplane_core.face.cache_events import runs_of
from kvplane_core.face.interface import MAX_SLOTS
from kvplane_service.decisions.log import Decision, Entry

Spot: TypeAlias = tuple[int, int, int]  # a position in the log: number of entry, part and event; ordered by time
NOW: Spot = (1 << 62, 0, 0)  # after every entry


class Change(NamedTuple):
    """A change of a key (the hash under which a block is found): the key was given to a block or removed from one.

    Attributes:
        at: position in the log.
        by: name of the request that caused the change, "" if unknown.
        epoch, seq, at_ns: engine life, step and time of the change; `seq` is 0 at the beginning of an engine life.
        without_stamps: the engine life began without a stamp table, which has the version number of each page's
            content; so no key could be verified.
        tier: index of the tier from which a load wrote the block that got the key; -1 = a launch wrote it.
        mismatched: the key was removed because a canary found other content in the block.
    """

    at: Spot
    kind: EventKind
    block: int
    reason: RemoveReason
    by: str
    epoch: int
    seq: int
    at_ns: int
    without_stamps: bool = False
    tier: int = -1
    mismatched: bool = False


class KeyName(NamedTuple):
    """Identifies a cache key (the hash under which a block is found) by domain, group and block digest."""

    domain: str
    group: int
    digest: bytes


_NOT_TRIED = frozenset({AdmitStatus.NOT_REACHED, AdmitStatus.NOT_WAITING})


@dataclass(slots=True)
class Known:
    """One use of a slot (the number of a request in steps) by a request, from the request's arrival to its end, as far
    as the log shows these.

    Attributes:
        name: request id, or "slot N" if the engine sent none.
        digests: hashes of its full hash blocks.
        skip_reading: the request does not look up cached blocks.
        admitted_at: position in the log at which it was first granted blocks, NOW until then.
        position: number of prompt tokens that are hit or granted at present; generated tokens are not counted.
        computed: each new maximum of `position`, and the position in the log at which it was reached.
        counted: tokens that had been appended to requests of its slot when `num_tokens` was counted.
    """

    name: str
    domain: str
    num_tokens: int
    digests: list[bytes]
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    skip_reading: bool = False
    admitted_at: Spot = NOW
    position: int = 0
    computed: list[tuple[Spot, int]] = field(default_factory=list)
    counted: int = 0

    def has(self, digest: bytes, count: int) -> bool:
        """Whether the digest is that of its first `count` hash blocks. A hash covers all tokens before its end, so that
        the same one is at the same index of every request.
        """
        return len(self.digests) >= count and self.digests[count - 1] == digest

    def move_to(self, position: int, at: Spot) -> None:
        """Set the number of prompt tokens that are hit or granted."""
        self.position = position
        if position > self.computed_at(NOW):
            self.computed.append((at, position))

    def computed_at(self, at: Spot) -> int:
        """Return the largest number of prompt tokens that were hit or granted before the log position `at`."""
        return next((count for then, count in reversed(self.computed) if then < at), 0)


class PassedOver(NamedTuple):
    """A hit of the tiers that was not loaded: why, the farthest tier that it needs, its tokens, and the nanoseconds to
    load it and to compute it, 0 if they are unknown.
    """

    why: WhyDeclined
    tier: int
    hit: int
    load_ns: int
    compute_ns: int


class RefusedGrowth(NamedTuple):
    """A run row that got no tokens because too few blocks were free: its step, the blocks that it needed, those that
    were free after its part, and whether the request was preempted.
    """

    seq: int
    needed: int
    free: int
    preempted: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to admit a request, with a copy of the request at that time.

    Attributes:
        at: position in the log of the first event after the look-up of the attempt.
        hit: tokens of the hit.
        epoch, seq, at_ns: number of the engine life, step number, and time in nanoseconds of the attempt.
        passed: a longer hit of the tiers, which was not loaded; None if there was none.
        needed, free: blocks that a refused row needed, and those that were free after its part.
        growth: the last row of the running request that was refused; None if there was none.
    """

    request: Known
    at: Spot
    status: AdmitStatus
    hit: int
    epoch: int
    seq: int
    at_ns: int
    passed: PassedOver | None = None
    needed: int = 0
    free: int = 0
    growth: RefusedGrowth | None = None


@dataclass(slots=True)
class History:
    """The contents of a decision log, indexed by key and by request.

    Attributes:
        changes: the changes of each key, in order.
        cleared: events that removed all keys at once.
        requests: every use of a slot (the number of a request in steps), in order.
        attempts: the last attempt to admit each request, by name of the request.
    """

    changes: dict[KeyName, list[Change]] = field(default_factory=dict)
    cleared: list[Change] = field(default_factory=list)
    requests: list[Known] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)

    def blocks_at(self, key: KeyName, at: Spot, now: Iterable[int]) -> set[int]:
        """Return the blocks that had the key just before the log position `at`; `now` are the blocks that have the key
        at the end of the log.
        """
        blocks = set(now)
        for change in reversed(self._all_changes(key)):
            if change.at < at:
                break
            if change.kind is EventKind.STORED:
                blocks.discard(change.block)
            elif change.kind is EventKind.REMOVED:
                blocks.add(change.block)
        return blocks

    def last_change(self, key: KeyName, at: Spot) -> Change | None:
        """Return the last change of the key before the log position `at`, None if there is none."""
        return next((change for change in reversed(self._all_changes(key)) if change.at < at), None)

    def cleared_by_life(self, after: Spot, before: Spot) -> Change | None:
        """Return the first beginning of an engine life, between two log positions, at which all cached keys were
        removed; None if there is none.
        """
        return next((one for one in self.cleared if one.seq == 0 and after < one.at < before), None)

    def _all_changes(self, key: KeyName) -> list[Change]:
        """Return the changes of the key in order, including the events that removed all keys while a block had this
        key.
        """
        changes, carried = [], set[int]()
        for change in sorted([*self.changes.get(key, ()), *self.cleared]):
            if change.kind is EventKind.CLEARED:
                if not carried:
                    continue
                carried.clear()
            elif change.kind is EventKind.STORED:
                carried.add(change.block)
            else:
                carried.discard(change.block)
            changes.append(change)
        return changes

    def of_block(self, block: int, most: int) -> list[tuple[Change, KeyName]]:
        """Return the last `most` changes, oldest first, of the keys that this block has had, on whichever block."""
        keys = [key for key, changes in self.changes.items() if any(one.block == block for one in changes)]
        return sorted((change, key) for key in keys for change in self._all_changes(key))[-most:]

    def is_stored(self, key: KeyName, at: Spot) -> bool:
        """Return True if the log shows that the key was stored in a block before the log position `at`."""
        changes = self.changes.get(key, ())
        return any(change.kind is EventKind.STORED and change.at < at for change in changes)

    def admitted(self, at: Spot) -> Iterator[Known]:
        """Yield the requests that were granted blocks before the log position `at`."""
        return (request for request in self.requests if request.admitted_at < at)


class HistoryReader:
    """Builds a History entry by entry. It follows which request uses which slot (the number of a request in steps).

    Attributes:
        history: contents of the entries added so far.
    """

    def __init__(self, digest_size: int, wanted: Set[bytes] | None = None, name: str | None = None) -> None:
        """`wanted`: the digests of the keys whose changes are read; `name`: the request whose attempts are read; None:
        of all.
        """
        self._size = digest_size
        self._wanted, self._name = wanted, name
        self._appended = np.zeros(MAX_SLOTS, np.int64)  # tokens of all requests that had a slot, by slot
        self._slots: dict[int, Known] = {}
        self._named: set[int] = set()  # slots of requests of this name
        self._partial: set[int] = set()  # slots of requests whose prompt is not fully computed
        self._ordered: dict[int, dict[int, int]] = {}  # by job of a load: the tier of each block
        self._tier_of: dict[int, int] = {}  # the same of the loads that ended in this part
        self._mismatched: Set[int] = frozenset()  # blocks of this part
        self.history = History()

    def add(self, number: int, entry: Entry) -> None:
        """Add the next entry of the log; `number` is the entry's number in the log."""
        if isinstance(entry, Decision):
            for at in range(len(entry.step.parts)):
                self._part(_Piece(number, at, entry, entry.step.parts[at]))
            return
        self._slots.clear()
        self._named.clear()
        self._partial.clear()
        self._tier_of, self._mismatched = {}, frozenset()
        for at, event in enumerate(entry.events):
            # Reported as cleared when no key was kept: the stamps verified none.
            stamp = (event.kind, 0, RemoveReason.UNVERIFIED, "", entry.epoch, 0, entry.at_ns, not entry.stamp_table)
            self._event(event, Change((number, 0, at), *stamp))

    def is_over(self) -> bool:
        """Whether there will be no later attempt to admit the request of this name that was admitted or refused."""
        return self._name in self.history.attempts and not self._named

    def _part(self, piece: _Piece) -> None:
        self._facts(piece.part.facts, piece.result.hashed_facts)
        self._news(piece.part.news, piece.result.hashed_news)
        self._resume(piece)
        self._run(piece)
        if piece.part.admit.slot:
            self._admit(piece)
        self._cache(piece)
        takers, decision = None, piece.decision
        for at, event in piece.events_of(self._wanted):
            takers = piece.takers() if takers is None else takers
            taker = takers.get(event.blocks[0], -1) if event.blocks else -1
            by = self._slots.get(event.slot if event.kind is EventKind.STORED else taker)
            stamp = (event.kind, 0, event.reason, by.name if by else "")
            when = (decision.step.epoch, decision.step.seq, decision.at_ns)
            self._event(event, Change((piece.entry, piece.number, at), *stamp, *when))

    def _event(self, event: CacheEvent, change: Change) -> None:
        if event.kind is EventKind.CLEARED:
            self.history.cleared.append(change)
            return
        for digest, block in zip(event.hashes, event.blocks, strict=True):
            if self._wanted is not None and digest not in self._wanted:
                continue
            key = KeyName(event.domain, event.group, digest)
            tier = self._tier_of.get(block, -1) if event.kind is EventKind.STORED else -1
            mismatched = block in self._mismatched and event.kind is EventKind.REMOVED
            one = change._replace(block=block, tier=tier, mismatched=mismatched)
            self.history.changes.setdefault(key, []).append(one)

    def _cache(self, piece: _Piece) -> None:
        """Record which blocks the loads that ended filled, and which a canary found to be wrong."""
        cache, orders = piece.part.cache, piece.result.orders
        ended = {job: self._ordered.pop(job, {}) for job in (*cache.jobs_done, *cache.jobs_failed)}
        self._tier_of = {block: tier for job in cache.jobs_done for block, tier in ended[job].items()}
        self._mismatched = frozenset(cache.mismatched)
        for job, block, tier in zip(orders.load_job, orders.load_block, orders.load_tier, strict=True):
            self._ordered.setdefault(job, {})[block] = tier

    def _facts(self, facts: Facts, made: Sequence[bytes]) -> None:
        """Of the many rows of requests that run, read those that end or have full blocks. `made`: the hashes of each
        row that has tokens, if the core made them.
        """
        if any(facts.appended):
            self._appended[facts.slot] += facts.appended  # a slot has one row
        if made:
            for slot, hashes in zip(compress(facts.slot, facts.appended), made, strict=True):
                if hashes and slot in self._slots:
                    self._slots[slot].digests.extend(_split(hashes, self._size))
        elif facts.hashes:
            for slot, hashes in zip(facts.slot, _rows(facts.hashes, facts.num_hashes, self._size), strict=True):
                if slot in self._slots:
                    self._slots[slot].digests.extend(_split(hashes, self._size))
        for slot, end in zip(compress(facts.slot, facts.end), filter(None, facts.end), strict=True):
            if end in (End.FREE, End.HELD):
                self._slots.pop(slot, None)
                self._named.discard(slot)

    def _news(self, news: News, made: Sequence[bytes]) -> None:
        hashes = made or [*_rows(news.hashes, news.num_hashes or [0] * len(news.slot), self._size)]
        for row, slot in enumerate(news.slot):
            request = Known(
                name=(news.request_id[row] if news.request_id else "") or f"slot {slot}",
                domain=news.domain[row] if news.domain else "",
                num_tokens=news.num_tokens[row],
                digests=_split(hashes[row], self._size),
                extra_keys=news.extra_keys[row] if news.extra_keys else NO_EXTRA_KEYS,
                skip_reading=bool(news.skip_reading and news.skip_reading[row]),
                counted=int(self._appended[slot]),
            )
            self._slots[slot] = request
            (self._named.add if request.name == self._name else self._named.discard)(slot)
            self.history.requests.append(request)

    def _count(self, slot: int) -> Known:
        """Count the tokens that the request of a slot got since they were last counted, and return the request."""
        request, counted = self._slots[slot], int(self._appended[slot])
        request.num_tokens += counted - request.counted
        request.counted = counted
        return request

    def _resume(self, piece: _Piece) -> None:
        """Record requests that were resumed from an earlier engine life; they have blocks from the beginning of the new
        engine life.
        """
        resume, at = piece.part.resume, (piece.entry, piece.number, -1)
        for slot, computed in zip(resume.slot, resume.computed, strict=True) if resume is not None else ():
            if slot in self._slots:
                self._slots[slot].admitted_at = at
                self._move(slot, computed, at)

    def _run(self, piece: _Piece) -> None:
        result = piece.result
        for slot, needed in zip(piece.part.run.slot, result.run_needed, strict=False):  # it is empty in most parts
            name = self._slots[slot].name if slot in self._slots else None
            if needed and name in self.history.attempts:
                growth = RefusedGrowth(piece.decision.step.seq, needed, result.free_blocks, slot in result.preempted)
                self.history.attempts[name] = replace(self.history.attempts[name], growth=growth)
        if self._partial.isdisjoint(piece.part.run.slot):
            return
        for slot, granted in zip(piece.part.run.slot, piece.result.granted, strict=True):
            if slot in self._partial and slot in self._slots:
                self._move(slot, self._slots[slot].position + granted, (piece.entry, piece.number, -1))

    def _move(self, slot: int, position: int, at: Spot) -> None:
        request = self._count(slot)
        request.move_to(position, at)
        (self._partial.add if position < request.num_tokens else self._partial.discard)(slot)

    def _admit(self, piece: _Piece) -> None:
        slots, statuses = piece.part.admit.slot, piece.result.admit_status
        rows = [row for row, status in enumerate(statuses) if status not in _NOT_TRIED and slots[row] in self._slots]
        if rows:
            first_events, passed = piece.first_events(), piece.passed_over()
            for row in rows:
                self._attempt(piece, row, first_events[row], passed.get(row))

    def _attempt(self, piece: _Piece, row: int, first_event: int, passed: PassedOver | None) -> None:
        result, step, request = piece.result, piece.decision.step, self._slots[piece.part.admit.slot[row]]
        status, at = AdmitStatus(result.admit_status[row]), (piece.entry, piece.number, first_event)
        if self._name in (None, request.name):
            then = replace(self._count(piece.part.admit.slot[row]), digests=list(request.digests))
            when = (step.epoch, step.seq, piece.decision.at_ns)
            needed = result.admit_needed[row] if result.admit_needed else 0
            blocks = passed, needed, result.free_blocks if needed else 0
            self.history.attempts[request.name] = Attempt(then, at, status, result.admit_hit[row], *when, *blocks)
        if status is AdmitStatus.GRANTED:
            request.admitted_at = min(request.admitted_at, at)
            external = piece.part.admit.external[row] if piece.part.admit.external else 0
            self._move(piece.part.admit.slot[row], result.admit_hit[row] + external + result.admit_granted[row], at)


class _Piece(NamedTuple):
    """One part (one message) of one applied step. `entry` is the number of the decision in the log, `number` that of
    the part in the decision.
    """

    entry: int
    number: int
    decision: Decision
    part: Part

    @property
    def result(self) -> PartResult:
        return self.decision.result.parts[self.number]

    def events_of(self, wanted: Set[bytes] | None) -> Iterator[tuple[int, CacheEvent]]:
        """Yield the events of wanted keys, None: of all, and those without a key, each with its index."""
        at = 0
        for run in runs_of(self.decision.events[self.number]):
            is_wanted = wanted is None or not run.hashes or not wanted.isdisjoint(run.hashes)
            if run.kind is not EventKind.REMOVED:
                if is_wanted:
                    yield at, run
                at += 1
                continue
            if is_wanted:
                for number, (digest, block) in enumerate(zip(run.hashes, run.blocks, strict=True), at):
                    if wanted is None or digest in wanted:
                        yield number, replace(run, hashes=(digest,), blocks=(block,))
            at += len(run.hashes)

    def takers(self) -> dict[int, int]:
        """Return, for each block that this part of a step allocated, the slot (number in steps) of the request that got
        it.
        """
        slots = [*self.part.run.slot, *self.part.admit.slot]
        taken = dict[int, int]()
        for blocks in (self.result.tables, self.result.new_blocks):
            takers = map(repeat, map(slots.__getitem__, blocks.row), blocks.count)
            taken.update(zip(blocks.ids, chain.from_iterable(takers), strict=True))
        return taken

    def first_events(self) -> list[int]:
        """Return, for each admit row (an attempt to admit a request), the index of the first cache event that it or a
        later row caused; the number of events if none did.
        """
        takers, at = self.takers(), 0
        rows = {slot: row for row, slot in enumerate(self.part.admit.slot)}
        first = dict[int, int]()  # by row
        for run in runs_of(self.decision.events[self.number]):
            if run.kind is not EventKind.REMOVED:
                if run.kind is EventKind.STORED and run.slot in rows:
                    first.setdefault(rows[run.slot], at)
                at += 1
                continue
            if run.reason in EVICTIONS:
                for number, block in enumerate(run.blocks, at):
                    if block in takers and takers[block] in rows:
                        first.setdefault(rows[takers[block]], number)
            at += len(run.hashes)
        of_rows = [first.get(row, at) for row in range(len(self.part.admit.slot))]
        return [*accumulate(reversed(of_rows), min)][::-1]

    def passed_over(self) -> dict[int, PassedOver]:
        """Return the hits of the tiers that admit rows did not load, by row."""
        found, declined = dict[int, PassedOver](), self.result.declined
        for at, row in enumerate(declined.row):
            times = declined.load_ns[at], declined.compute_ns[at]
            found.setdefault(
                row, PassedOver(WhyDeclined(declined.why[at]), declined.tier[at], declined.hit[at], *times)
            )
        return found


def _rows(hashes: bytes, counts: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield the hashes of each row."""
    ends = accumulate(counts, initial=0)
    return (hashes[begin * size : end * size] for begin, end in pairwise(ends))


def _split(hashes: bytes, size: int) -> list[bytes]:
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
