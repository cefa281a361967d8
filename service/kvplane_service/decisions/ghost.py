"""What an LRU pool of another size would hit: a *ghost* pool, which has keys and no blocks, follows the decision log.

A prefix hits in an LRU pool if the pool has at least as many blocks as were used since the prefix was last used (its
stack distance; Mattson 1970). So one histogram of these distances has the hits of every size: the miss-ratio curve. The
ghost follows a sample of the keys, those whose digest ends in zero bits, and multiplies (SHARDS, FAST 2015): its memory
is bounded, and two ghosts of one log are equal. What the sample has more or less than its share are mostly keys that
nearly all requests begin with, so the difference counts as hits of the smallest distance.

The ghost is outside of all decisions. Its unit is a hash block of a group that keeps whole prefixes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplane.base.step import AdmitStatus, End, EventKind, Facts, News, Part, PartResult
from kvplane_core.face.cache_events import runs_of
from kvplane_core.face.interface import FOLLOWED, GroupView, ReplicaCore
from kvplane_service.decisions.log import Decision, hashed_part
from kvplane_service.decisions.sent import SentResult

if TYPE_CHECKING:
    from kvplane_service.decisions.log import Entry

_Words: TypeAlias = npt.NDArray[np.uint64]
_Column: TypeAlias = Sequence[int] | npt.NDArray[Any]

SIZES = ((1, 8), (1, 4), (1, 2), (3, 4), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1))  # parts of the pool
DEPTH = SIZES[-1][0]  # of the ghost, in pools
_MOST_KEYS = 1 << 13
_AGES = 1 << 9  # steps of a distance
_UNIT = 1 << 16  # of the histogram, which is halved
_KEPT_POOLS = 32  # look-ups after which earlier ones count half, in pools
_MOST_LATE = 16  # decode steps whose hashes are added together, which costs little more than those of one


class SizeHits(NamedTuple):
    """The hits of a pool of this number of blocks, in tokens."""

    blocks: int
    hit_tokens: int


class MissCurve(NamedTuple):
    """The hits of LRU pools of several sizes, the smallest first, and the tokens that were looked up; recent look-ups
    count more.
    """

    queried_tokens: int
    sizes: tuple[SizeHits, ...]


@dataclass(slots=True)
class _Request:
    """The sampled keys of a request, in token order; `num_read` of them can be hit by its look-up."""

    keys: list[int]
    num_read: int
    num_blocks: int
    num_tokens: int
    is_counted: bool
    domain: int = field(default=0)


class GhostLru:
    """Follows the decision log of one replica; `curve` returns the result.

    Requests count when they are first admitted. Keys count as used then, and when the request ends or is preempted.
    """

    def __init__(self, replica: ReplicaCore) -> None:
        spec = replica.spec
        self._hash_size, self._digest_size = spec.hash_block_size, replica.digest_size
        self._is_off = not spec.enable_caching or not _whole(replica.groups)
        sizes = [group.block_size for group in _whole(replica.groups)]
        depth = DEPTH * spec.num_blocks * max(sizes, default=1) // self._hash_size
        self._shift = max(0, -(-depth // _MOST_KEYS) - 1).bit_length()
        self._stack = _Stack((depth >> self._shift) + 1)
        self._requests: dict[int, _Request] = {}
        self._half_after = _KEPT_POOLS * depth // DEPTH
        self._num_blocks = self._num_tokens = self._num_sampled = 0
        self._late: list[tuple[_Column, _Column, bytes]] = []  # what `_appended` is given, of decode steps

    def add(self, entry: Entry) -> None:
        """Follow one entry of the decision log."""
        if self._is_off:
            return
        if not isinstance(entry, Decision):
            self._late.clear()
            self._requests.clear()
            if any(run.kind is EventKind.CLEARED for run in runs_of(entry.events)):
                self._stack.clear()
            return
        if isinstance(entry.result, SentResult) and not entry.result.marks & FOLLOWED:
            for one in entry.result.grown:
                if one is not None:
                    self._grow(np.frombuffer(one[0], "<u4"), np.frombuffer(one[1], "<u4"), one[2])
            return
        for part, result in zip(entry.step.parts, entry.result.parts, strict=True):
            facts, news = part.facts, part.news
            if facts.hashes or facts.end or news.slot or result.hashed_facts or result.preempted or part.admit.slot:
                self._part(hashed_part(part, result, self._digest_size), result)
            elif result.reset_done:
                self._stack.clear()

    def curve(self, replica: ReplicaCore) -> MissCurve | None:
        """Return the hits of pools of the SIZES; None if the replica has no group that keeps whole prefixes, or nothing
        was looked up.

        How many tokens of prefixes a block is worth is taken from the keys that the replica has now: windows and states
        need blocks too.
        """
        if self._is_off or not self._num_tokens:
            return None
        tokens, blocks = _worth(replica.groups, [replica.count_keys_of(group.group) for group in replica.groups])
        usable = replica.spec.num_blocks - 1
        # A sample has more or less than its share mostly of keys that most requests begin with.
        missing = (self._num_blocks >> self._shift) - self._num_sampled
        sizes = []
        for part, whole in SIZES:
            size = usable * part // whole
            distance = size * tokens // (blocks * self._hash_size) >> self._shift
            sampled = max(0, self._stack.count_within(distance) + missing) if distance else 0
            hits = (sampled << self._shift) * self._hash_size
            sizes.append(SizeHits(size, min(hits, self._num_tokens)))
        return MissCurve(self._num_tokens, tuple(sizes))

    def _part(self, part: Part, result: PartResult) -> None:
        facts = part.facts
        if not (facts.end or part.news.slot or part.admit.slot or result.reset_done or result.preempted):
            if facts.hashes:
                self._grow(facts.slot, facts.num_hashes, facts.hashes)
            return
        self._catch_up()
        if part.facts.hashes or part.facts.end:
            self._facts(part.facts)
        if result.reset_done:
            self._stack.clear()
        if part.news.slot:
            self._news(part.news)
        for slot in result.preempted:
            self._use(slot)
        for slot, status in zip(part.admit.slot, result.admit_status, strict=True):
            if status == AdmitStatus.GRANTED and slot in self._requests:
                self._admit(self._requests[slot])

    def _grow(self, slots: _Column, counts: _Column, hashes: bytes) -> None:
        self._late.append((slots, counts, hashes))
        if len(self._late) >= _MOST_LATE:
            self._catch_up()

    def _facts(self, facts: Facts) -> None:
        self._appended(facts.slot, facts.num_hashes, facts.hashes)
        for slot, end in zip(facts.slot, facts.end, strict=False):
            if end:
                self._use(slot)
                if end != End.PREEMPTED:
                    self._requests.pop(slot, None)

    def _catch_up(self) -> None:
        """Add the hashes of decode steps to their requests."""
        if self._late:
            slots, counts, hashes = zip(*self._late, strict=True)
            self._late = []
            self._appended(np.concatenate(slots), np.concatenate(counts, dtype=np.int64), b"".join(hashes))

    def _appended(self, slots: _Column, counts: _Column, hashes: bytes) -> None:
        words, at = self._sampled(hashes)
        if len(at):
            rows = np.searchsorted(np.cumsum(counts), at, side="right").tolist()
            for row, word in zip(rows, words.tolist(), strict=True):
                request = self._requests.get(int(slots[row]))
                if request is not None:
                    request.keys.append(word ^ request.domain)

    def _news(self, news: News) -> None:
        words, at = self._sampled(news.hashes)
        first = 0
        for row, slot in enumerate(news.slot):
            count = news.num_hashes[row] if news.num_hashes else 0
            num_tokens = news.num_tokens[row]
            num_blocks = min((num_tokens - 1) // self._hash_size, count)  # the last token is always computed
            bounds = np.searchsorted(at, [first, first + num_blocks, first + count]).tolist()
            domain = self._domain(news.domain[row]) if news.domain else 0
            self._requests[slot] = _Request(
                keys=[word ^ domain for word in words[bounds[0] : bounds[2]].tolist()],
                num_read=bounds[1] - bounds[0],
                num_blocks=num_blocks,
                num_tokens=num_tokens,
                is_counted=bool(news.skip_reading and news.skip_reading[row]),
                domain=domain,
            )
            first += count

    def _admit(self, request: _Request) -> None:
        if not request.is_counted:
            request.is_counted = True
            self._num_blocks += request.num_blocks
            self._num_tokens += request.num_tokens
            self._num_sampled += request.num_read
            self._stack.count(request.keys[: request.num_read])
            if self._num_blocks > self._half_after:
                self._stack.halve()
                self._num_blocks, self._num_tokens = self._num_blocks // 2, self._num_tokens // 2
                self._num_sampled //= 2
        self._stack.use(request.keys[::-1])

    def _use(self, slot: int) -> None:
        request = self._requests.get(slot)
        if request is not None:
            self._stack.use(request.keys[::-1])

    def _sampled(self, hashes: bytes) -> tuple[_Words, npt.NDArray[np.int64]]:
        """Return the sampled words of concatenated digests, and their numbers. A word is the first 8 bytes."""
        words = np.frombuffer(hashes, "<u8")[:: self._digest_size // 8]
        at = np.flatnonzero((words & np.uint64((1 << self._shift) - 1)) == 0)
        return words[at], at

    @staticmethod
    def _domain(domain: str) -> int:
        return int.from_bytes(blake2b(domain.encode(), digest_size=8).digest()) if domain else 0


def _whole(groups: Sequence[GroupView]) -> list[GroupView]:
    """Return the groups that keep whole prefixes."""
    return [group for group in groups if group.is_downward_closed()]


def _worth(groups: Sequence[GroupView], keys: Sequence[int]) -> tuple[int, int]:
    """Return a number of blocks, and the tokens of prefixes that these blocks hold, as (tokens, blocks)."""
    whole = _whole(groups)
    tokens = max(keys[group.group] * group.block_size for group in whole)
    if tokens:
        return tokens, sum(keys)
    tokens = max(group.block_size for group in whole)
    return tokens, sum(tokens // group.block_size for group in whole)


class _Stack:
    """Keys in order of their last use, at most `most`, and a histogram of stack distances.

    Uses are divided into ages of equal numbers of uses. A distance is exact to one age: it counts the keys of later
    ages and half of its own. The keys of a request are used from the last to the first, as they become free in a pool.
    """

    def __init__(self, most: int) -> None:
        self._most, self._uses_per_age = most, max(1, most // _AGES)
        self._step = -(-most // (2 * _AGES))  # of the histogram
        self._hits = np.zeros(2 * _AGES + 1, np.int64)
        self.clear()

    def clear(self) -> None:
        """Forget the keys; the histogram stays."""
        self._age: OrderedDict[int, int] = OrderedDict()
        self._live = array("q", bytes(8 * 4 * (self._most // self._uses_per_age + 1)))  # keys by age
        self._uses = 0

    def count(self, keys: Sequence[int]) -> None:
        """Count the distances of keys that are looked up."""
        at = np.array([age for key in keys if (age := self._age.get(key, -1)) >= 0], np.int64)
        live = np.frombuffer(self._live, np.int64)
        distances = len(self._age) - live.cumsum()[at] + live[at] // 2
        np.add.at(self._hits, np.minimum(distances // self._step, len(self._hits) - 1), _UNIT)

    def use(self, keys: Sequence[int]) -> None:
        """Put keys on top, the last one on top of all."""
        ages, live, per_age = self._age, self._live, self._uses_per_age
        for key in keys:
            before = ages.pop(key, -1)
            if before >= 0:
                live[before] -= 1
            age = self._uses // per_age
            if age == len(live):
                self._renumber()
                age = self._uses // per_age
            ages[key] = age
            live[age] += 1
            self._uses += 1
            if len(ages) > self._most:
                live[ages.popitem(last=False)[1]] -= 1

    def halve(self) -> None:
        """Halve the histogram."""
        self._hits //= 2

    def count_within(self, distance: int) -> int:
        """Return the number of uses with less than this distance."""
        whole, rest = divmod(distance, self._step)
        if whole >= len(self._hits) - 1:
            return int(self._hits.sum()) // _UNIT
        return int(self._hits[:whole].sum() + self._hits[whole] * rest // self._step) // _UNIT

    def _renumber(self) -> None:
        for age in range(len(self._live)):
            self._live[age] = 0
        for number, key in enumerate(self._age):
            age = self._age[key] = number // self._uses_per_age
            self._live[age] += 1
        self._uses = -(-len(self._age) // self._uses_per_age) * self._uses_per_age
