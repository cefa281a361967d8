"""The decision log: the last steps of a replica with their results, packed.

Metrics, traces, explanations and recordings are all derived from it. It has hashes, never tokens. The step's path only
stores the two existing objects, step and result; they are packed into one byte string later (`packing.py`), and
unpacked when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from kvplane.base.step import CacheEvent, Facts, Part, PartResult, Step, StepResult
from kvplane_service.core.cache_events import runs_of
from kvplane_service.decisions.packed_log import LogBudget, PackedLog
from kvplane_service.decisions.packing import pack_decision, pack_events, slowness_of, unpack_decision, unpack_events


class Decision(NamedTuple):
    """A step, or a piece of one, that was applied.

    Attributes:
        step: as the engine sent it, without its tokens.
        result: the answer.
        events: cache events of each part.
        at_ns: when it was applied, by the clock of the service.
        took_ns: time that the core took.
    """

    step: Step
    result: StepResult
    events: tuple[Sequence[CacheEvent], ...]
    at_ns: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class Life:
    """A new engine life began: every request ended, and only keys verified by the stamps were kept.

    Attributes:
        events: removals of the lost keys.
        incarnation: of the page memory, 0 = unknown.
        busy: blocks that loads of earlier lives may still write, as reported by the engine and its movers.
        memory_is_new: no load of an earlier life can write to the memory.
    """

    epoch: int
    stamp_table: Sequence[int]
    events: Sequence[CacheEvent]
    at_ns: int
    incarnation: int = 0
    busy: Sequence[int] = ()
    memory_is_new: bool = False


Entry: TypeAlias = Decision | Life
Follower: TypeAlias = Callable[[Entry], None]

# Lost keys of a life that are packed at most, which blocks the event loop for a few milliseconds.
_MAX_LOST_KEYS = 1 << 16
_LIFE_BYTES, _STAMP_BYTES, _BLOCK_BYTES = 600, 8, 4


@dataclass(frozen=True, slots=True)
class _KeptLife:
    """A life as the log keeps it: its events are packed, its stamps are shared with the replica.

    Attributes:
        life: without its events.
        events: packed.
    """

    life: Life
    events: bytes

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        life = self.life
        return (
            _LIFE_BYTES + len(self.events) + len(life.stamp_table) * _STAMP_BYTES + len(life.busy) * _BLOCK_BYTES
        )


_Packed: TypeAlias = bytes | _KeptLife


class DecisionLog(PackedLog[Entry, _Packed]):
    """The last entries, at most `max_entries` and within the budget. The oldest are dropped first."""

    def __init__(self, max_entries: int, budget: LogBudget) -> None:
        super().__init__(max_entries, budget)
        self._followers: list[Follower] = []

    def __iter__(self) -> Iterator[Entry]:
        """The current entries, oldest first. Each is unpacked when the iterator reaches it, so that reading can
        be sliced.
        """
        return map(_unpack, list(self._kept))

    def append(self, entry: Entry) -> None:
        """Add an entry, drop the oldest ones when there is no room, and pass the entry to the followers."""
        if isinstance(entry, Life) and sum(len(run.hashes) for run in runs_of(entry.events)) > _MAX_LOST_KEYS:
            self._lose()
        else:
            self._keep(entry)
        for follower in self._followers:
            follower(entry)

    def slowest(self, count: int) -> list[Decision]:
        """The decisions that took longest, slowest first."""
        packed = (entry for entry in self._kept if isinstance(entry, bytes))
        candidates = [Decision(*unpack_decision(raw)) for raw in nlargest(count, packed, key=slowness_of)]
        candidates += [entry for entry in self._kept if isinstance(entry, Decision)]
        return nlargest(count, candidates, key=attrgetter("took_ns"))

    def _pack(self, entry: Entry) -> _Packed:
        if isinstance(entry, Decision):
            return pack_decision(*entry)
        return _KeptLife(replace(entry, events=()), pack_events(entry.events))

    def follow(self, follower: Follower) -> None:
        """Call `follower` with every entry from now on. It runs on the step's path, so it must be fast."""
        self._followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        """Stop calling `follower`."""
        self._followers.remove(follower)


def _unpack(kept: Entry | _Packed) -> Entry:
    if isinstance(kept, bytes):
        return Decision(*unpack_decision(kept))
    if isinstance(kept, _KeptLife):
        return replace(kept.life, events=unpack_events(kept.events))
    return kept


def without_tokens(step: Step) -> Step:
    """The step without its tokens; itself when it has none."""
    for part in step.parts:
        if part.facts.tokens or part.news.tokens:
            return replace(step, parts=[_without_tokens(part) for part in step.parts])
    return step


def _without_tokens(part: Part) -> Part:
    return replace(part, facts=replace(part.facts, tokens=[]), news=replace(part.news, tokens=[]))


def hashed_step(decision: Decision, digest_size: int) -> Step:
    """The step as sent by an engine that computes the hashes itself; its result is identical."""
    parts = zip(decision.step.parts, decision.result.parts, strict=True)
    return replace(decision.step, parts=[_hashed(part, result, digest_size) for part, result in parts])


def _hashed(part: Part, result: PartResult, size: int) -> Part:
    facts, news = part.facts, part.news
    if result.hashed_facts:
        facts = _hashed_facts(facts, result.hashed_facts, size)
    if result.hashed_news:
        made = result.hashed_news
        news = replace(news, num_hashes=[len(hashes) // size for hashes in made], hashes=b"".join(made))
    return replace(part, facts=facts, news=news)


def _hashed_facts(facts: Facts, made: list[bytes], size: int) -> Facts:
    """Rows with tokens have their digests in `made`, in order."""
    rows = iter(made)
    counts = [len(next(rows)) // size if appended else 0 for appended in facts.appended]
    return replace(facts, num_hashes=counts, hashes=b"".join(made))


def hashes_of_news(decision: Decision, part: int, digest_size: int) -> list[list[bytes]]:
    """The initial digests of each new request of a part."""
    news = _hashed(decision.step.parts[part], decision.result.parts[part], digest_size).news
    counts = news.num_hashes or [0] * len(news.slot)
    ends = list(accumulate(counts, initial=0))
    return [
        [news.hashes[at * digest_size : (at + 1) * digest_size] for at in range(start, end)]
        for start, end in pairwise(ends)
    ]
