"""The decision log: the last steps of a replica with their results, each packed into one byte string.

Metrics, traces, explanations and recordings are derived from it. It contains block hashes and never tokens. Before a
step is answered, only references to the existing step and result are stored; both are packed later (`packing.py`), and
unpacked when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import chain
from typing import NamedTuple, TypeAlias

from kvplane.base.step import CacheEvent, Facts, Part, PartResult, Step
from kvplane_core.face.cache_events import runs_of
from kvplane_service.decisions.packed_log import MAX_WAITING, LogBudget, PackedLog
from kvplane_service.decisions.packing import Decision as Decision
from kvplane_service.decisions.packing import (
    Took,
    events_of_packed,
    pack_decision,
    pack_events,
    slowness_of,
    unpack_decision,
    unpack_events,
)
from kvplane_service.decisions.sent import SentStep, step_with


@dataclass(frozen=True, slots=True)
class Life:
    """The beginning of a new engine life (the engine took over the page memory again): every request of the previous
    life ended, and a cached key was kept only if the stamp table proved that the page still has the content.

    Attributes:
        epoch: number of the engine life.
        stamp_table: the stamps of all blocks at that time, by which the keys were verified; empty if there was none.
        events: cache events that remove the keys that were not kept.
        at_ns: time at which the life began, by the clock of the service.
        incarnation: random number of this allocation of the page memory, 0 = unknown.
        busy: blocks that loads of earlier lives may still write, as reported by the engine and its movers.
        memory_is_new: no load of an earlier life can still write to the page memory.
        state: the exported state of an engine that decides itself (a mirror), from which the replica continues; empty
            for a life that begins without requests.
        disk_incarnation: number that identifies what the disk tiers hold, 0 = unknown.
    """

    epoch: int
    stamp_table: Sequence[int]
    events: Sequence[CacheEvent]
    at_ns: int
    incarnation: int = 0
    busy: Sequence[int] = ()
    memory_is_new: bool = False
    state: bytes = b""
    disk_incarnation: int = 0


Entry: TypeAlias = Decision | Life
Follower: TypeAlias = Callable[[Entry], None]

# Most lost keys of a Life that are packed; packing takes a few milliseconds of the event loop, in pieces.
_MAX_LOST_KEYS = 1 << 16
_LIFE_BYTES, _STAMP_BYTES, _BLOCK_BYTES = 600, 8, 4


@dataclass(frozen=True, slots=True)
class _KeptLife:
    """A Life (the beginning of an engine life) as the log keeps it: with packed events, and with the stamp table shared
    with the replica.

    Attributes:
        life: the Life without its events.
        events: its events, packed.
    """

    life: Life
    events: bytes

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory, in bytes."""
        life = self.life
        columns = len(life.stamp_table) * _STAMP_BYTES + len(life.busy) * _BLOCK_BYTES
        return _LIFE_BYTES + len(self.events) + columns + len(life.state)


_Packed: TypeAlias = bytes | _KeptLife


class Candidate(NamedTuple):
    """An entry of the log as it is kept, and whether it may have the text that is sought."""

    kept: Entry | _Packed
    sought: bytes

    @property
    def may_name(self) -> bool:
        """Whether the entry may have the text."""
        return isinstance(self.kept, Decision) or (isinstance(self.kept, bytes) and self.sought in self.kept)

    def read(self) -> Entry:
        """Return the entry, unpacked."""
        return _unpack(self.kept)

    def names(self, name: str) -> bool:
        """Whether the entry has a new request of this name; True if none has a name that is sought."""
        if not self.may_name or not self.sought:
            return self.may_name
        entry = self.read()
        return isinstance(entry, Decision) and any(name in part.news.request_id for part in entry.step.parts)

    def keys_of(self, block: int) -> Iterator[bytes]:
        """Yield the digests of the keys that the entry gives to a block or removes from it."""
        if isinstance(self.kept, bytes):
            parts: Sequence[Sequence[CacheEvent]] = events_of_packed(self.kept)
        else:
            entry = self.read()
            parts = entry.events if isinstance(entry, Decision) else (entry.events,)
        for event in chain.from_iterable(map(runs_of, parts)):
            if block in event.blocks:
                yield from (digest for digest, at in zip(event.hashes, event.blocks, strict=True) if at == block)


class DecisionLog(PackedLog[Entry, _Packed]):
    """The last entries (applied steps and beginnings of engine lives, the times of one epoch) of one replica, at most
    `max_entries` and within the memory budget. The oldest are dropped first.
    """

    def __init__(self, max_entries: int, budget: LogBudget) -> None:
        super().__init__(max_entries, budget)
        self._followers: list[Follower] = []
        self._later: list[Follower] = []
        self._took = dict[int, tuple[Took, bytes]]()  # of the slowest, by the identity of the entry, which it keeps
        self._unread: deque[Entry] = deque()  # the newest entries, which those followers do not have yet

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the current entries, oldest first. Each entry is unpacked only when the iterator reaches it, so
        that a reader can pause between two entries.
        """
        return map(_unpack, list(self._kept))

    def candidates(self, name: str) -> Sequence[Candidate]:
        """Return the current entries, oldest first, for a search of those that may name a request. A request without
        an id has a name that no entry has: all may name it, as for "".
        """
        sought = b"" if name.startswith("slot ") else name.encode()
        return [Candidate(one, sought) for one in self._kept]

    def append(self, entry: Entry, packed: bytes | None = None) -> None:
        """Add an entry, drop the oldest entries if there is no room, and pass the entry to every follower. `packed`:
        the same entry as `pack_decision` packs it, if it is known. The token ids of a step are dropped.
        """
        if isinstance(entry, Decision) and (packed is None or self._followers):
            entry = entry._replace(step=without_tokens(entry.step))
        if packed is not None:
            self._keep(packed)
        elif isinstance(entry, Life) and sum(len(run.hashes) for run in runs_of(entry.events)) > _MAX_LOST_KEYS:
            self._lose()
        else:
            self._keep(entry)
        if self._later:
            self._unread.append(entry)
            if packed is None:
                self._pass_on(self._num_waiting)  # what was dropped unpacked
            elif len(self._unread) == 1:
                self._budget.has_waiting(self)
            elif len(self._unread) > MAX_WAITING:  # all but this one together, which costs less than each alone
                self._pass_on(1)
        for follower in self._followers:
            follower(entry)

    def slowest(self, count: int) -> list[Took]:
        """Return how long the `count` steps that took longest did, slowest first. Each entry is decoded once."""
        packed = nlargest(count, (entry for entry in self._kept if isinstance(entry, bytes)), key=slowness_of)
        self._took = {id(raw): self._took.get(id(raw)) or (Took.of_packed(raw), raw) for raw in packed}
        found = [took for took, _ in self._took.values()]
        waiting = (entry for entry in self._kept if isinstance(entry, Decision))
        found += [Took.of(entry.step, entry.at_ns, entry.took_ns) for entry in waiting]
        return nlargest(count, found)

    def _pack(self, entry: Entry) -> Generator[None, None, _Packed]:
        if isinstance(entry, Decision):
            return (yield from pack_decision(*entry))
        return _KeptLife(replace(entry, events=()), (yield from pack_events(entry.events)))

    def follow(self, follower: Follower) -> None:
        """Call `follower` with every future entry. The call is made before the step is answered, so `follower` must be
        fast.
        """
        self._followers.append(follower)

    def follow_later(self, follower: Follower) -> None:
        """Call `follower` with every future entry, in order, but after the step is answered: when the entry is packed,
        or when `catch_up` is called. It must not keep the entry, whose step may still have its token ids.
        """
        self.catch_up()
        self._later.append(follower)

    def catch_up(self) -> None:
        """Pass on the entries that wait for the followers of `follow_later`; there are few."""
        self._pass_on(0)

    def pack_oldest(self) -> bool:
        """Pack a piece of the oldest unpacked entry, and pass it on when all of it is packed; see `PackedLog`."""
        has_more = super().pack_oldest()
        self._pass_on(self._num_waiting)
        return has_more

    def _pass_on(self, num_left: int) -> None:
        while len(self._unread) > num_left:
            entry = self._unread.popleft()
            for follower in self._later:
                follower(entry)

    def unfollow(self, follower: Follower) -> None:
        """Stop calling `follower`, if it is called."""
        self._followers = [one for one in self._followers if one != follower]
        self._later = [one for one in self._later if one != follower]


def _unpack(kept: Entry | _Packed) -> Entry:
    if isinstance(kept, bytes):
        return unpack_decision(kept)
    if isinstance(kept, _KeptLife):
        return replace(kept.life, events=unpack_events(kept.events))
    return kept


def without_tokens(step: Step) -> Step:
    """Return the step without its token ids; the same object if it has none."""
    if isinstance(step, SentStep):
        return step  # it was applied: its parts are those of the record
    if not any(part.facts.tokens or part.news.tokens for part in step.parts):
        return step
    return step_with(step, [_without_tokens(part) for part in step.parts], step.traceparent)


def _without_tokens(part: Part) -> Part:
    return replace(part, facts=replace(part.facts, tokens=[]), news=replace(part.news, tokens=[]))


def hashed_step(decision: Decision, digest_size: int) -> Step:
    """Return the step as an engine that hashes tokens itself would have sent it: with block hashes and without tokens.
    Applying it gives the same result.
    """
    step, results = decision.step, decision.result.parts
    parts = [hashed_part(part, result, digest_size) for part, result in zip(step.parts, results, strict=True)]
    return step_with(step, parts, step.traceparent)


def hashed_part(part: Part, result: PartResult, size: int) -> Part:
    """Return a part as an engine that hashes tokens itself would have sent it, see `hashed_step`."""
    if not (result.hashed_facts or result.hashed_news):
        return part
    facts, news = part.facts, part.news
    if result.hashed_facts:
        facts = _hashed_facts(facts, result.hashed_facts, size)
    if result.hashed_news:
        made = result.hashed_news
        news = replace(news, num_hashes=[len(hashes) // size for hashes in made], hashes=b"".join(made))
    return replace(part, facts=facts, news=news)


def _hashed_facts(facts: Facts, made: Sequence[bytes], size: int) -> Facts:
    """Return the facts (the step's rows about known requests) with block hashes instead of tokens. `made` has the block
    digests of each row that has new tokens, in row order.
    """
    rows = iter(made)
    counts = [len(next(rows)) // size if appended else 0 for appended in facts.appended]
    return replace(facts, num_hashes=counts, hashes=b"".join(made))
