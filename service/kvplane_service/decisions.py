"""The decision log: the last steps of a replica and what became of them, as they were.

Whatever tells about decisions (metrics, traces, explanations, recordings) reads it and derives nothing of its own. It
holds hashes, never tokens. On the step's path it only keeps two objects that exist anyway, step and result; what
a reader wants of them is worked out when it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from kvplane.base.step import CacheEvent, Facts, Part, PartResult, Step, StepResult
from kvplane_service.core.cache_events import runs_of


class Decision(NamedTuple):
    """A step, or a piece of one, that was applied.

    Attributes:
        step: as the engine sent it, without its tokens.
        result: the answer.
        events: cache events of each part.
        at_ns: clock of the service when it was applied.
        took_ns: how long the core worked on it.
    """

    step: Step
    result: StepResult
    events: tuple[Sequence[CacheEvent], ...]
    at_ns: int
    took_ns: int


@dataclass(frozen=True, slots=True)
class Life:
    """A new engine life began: every request ended, and of the keys those that the memory proved were kept.

    Attributes:
        events: what was lost.
        incarnation: of the page memory, 0 = not known.
        busy: blocks that loads of earlier lives may still write, as the engine and movers said.
        memory_is_new: no load of an earlier life can write to it.
    """

    epoch: int
    stamp_table: Sequence[int]
    events: Sequence[CacheEvent]
    at_ns: int
    incarnation: int = 0
    busy: Sequence[int] = ()
    memory_is_new: bool = False


_MAX_DROPS = 16

Entry: TypeAlias = Decision | Life
Follower: TypeAlias = Callable[[Entry], None]


class DecisionLog:
    """The last entries, bounded in number and in what they hold. The oldest go first.

    Args:
        max_steps: entries at most.
        max_size: of all entries together, by `size_of`.
    """

    def __init__(self, max_steps: int, max_size: int) -> None:
        self._entries: deque[tuple[Entry, int]] = deque()
        self._max_steps = max_steps
        self._max_size = max_size
        self._size = 0
        self._followers: list[Follower] = []
        self.num_lost = 0  # entries that are no longer kept

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first."""
        return (entry for entry, _ in self._entries)

    def __reversed__(self) -> Iterator[Entry]:
        return (entry for entry, _ in reversed(self._entries))

    @property
    def size(self) -> int:
        """Of all entries together."""
        return self._size

    def append(self, entry: Entry) -> None:
        """Keep an entry, in place of the oldest ones when there is no room, and show it to the followers."""
        size = size_of(entry)
        self._entries.append((entry, size))
        self._size += size
        for _ in range(_MAX_DROPS):  # a large one has room made for it by those behind it too: many at once take long
            if self._size <= self._max_size and len(self._entries) <= self._max_steps:
                break
            self._size -= self._entries.popleft()[1]
            self.num_lost += 1
        for follower in self._followers:
            follower(entry)

    def follow(self, follower: Follower) -> None:
        """Call this with every entry from now on, on the step's path: be quick."""
        self._followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        """Call it no longer."""
        self._followers.remove(follower)


def slowest(log: DecisionLog, count: int) -> list[Decision]:
    """The decisions that took longest, slowest first."""
    decisions = (entry for entry in log if isinstance(entry, Decision))
    return nlargest(count, decisions, key=attrgetter("took_ns"))


def size_of(entry: Entry) -> int:
    """Roughly how many block ids, hashes and amounts an entry holds."""
    if isinstance(entry, Life):
        return 1 + len(entry.stamp_table) + len(entry.events) + len(entry.busy)
    size = 1
    for part, result in zip(entry.step.parts, entry.result.parts, strict=True):
        size += len(part.facts.slot) + len(part.run.slot) + len(result.tables.ids) + len(result.orders.stamp_block)
        size += len(part.resume.blocks) if part.resume is not None else 0
        size += (len(part.news.hashes) + len(part.facts.hashes)) >> 4
        for made in result.hashed_news:
            size += len(made) >> 4
    for events in entry.events:
        for run in runs_of(events):
            size += len(run.hashes)
    return size


def without_tokens(step: Step) -> Step:
    """The step with hashes alone; itself when it has no tokens."""
    for part in step.parts:
        if part.facts.tokens or part.news.tokens:
            return replace(step, parts=[_without_tokens(part) for part in step.parts])
    return step


def _without_tokens(part: Part) -> Part:
    return replace(part, facts=replace(part.facts, tokens=[]), news=replace(part.news, tokens=[]))


def hashed_step(decision: Decision, digest_size: int) -> Step:
    """The step as an engine would have sent it that hashes itself: it has the same outcome, bit for bit."""
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
    """Rows that gave tokens have their digests in `made`, in order."""
    rows = iter(made)
    counts = [len(next(rows)) // size if appended else 0 for appended in facts.appended]
    return replace(facts, num_hashes=counts, hashes=b"".join(made))


def hashes_of_news(decision: Decision, part: int, digest_size: int) -> list[list[bytes]]:
    """The digests that each new request of a part began with."""
    news = _hashed(decision.step.parts[part], decision.result.parts[part], digest_size).news
    counts = news.num_hashes or [0] * len(news.slot)
    ends = list(accumulate(counts, initial=0))
    return [
        [news.hashes[at * digest_size : (at + 1) * digest_size] for at in range(start, end)]
        for start, end in pairwise(ends)
    ]
