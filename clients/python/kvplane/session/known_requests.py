"""A record of a session's requests, made from the session's own steps, for a session without a `revive` (a function of
the engine that returns its requests).

After a restart, the session sends these requests to the service, and no stamps. So the service recovers no cache entry
and preempts every request, and the engine admits them again. For requests with external transfers this is impossible,
since the steps do not show which pages a transfer reads or writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import compress
from typing import Any

from kvplane.base.decode_rows import DecodeRows
from kvplane.base.errors import ServiceRestarted
from kvplane.base.hashing import revived
from kvplane.base.step import (
    NO_EXTRA_KEYS,
    UNCHANGED,
    Admit,
    AdmitStatus,
    End,
    Facts,
    News,
    Part,
    PartResult,
    RowFlag,
    Step,
    StepResult,
)
from kvplane.base.when_read import given_fields
from kvplane.session.reopening import Revival

_MAX_COLLECTED = 32  # decode steps whose tokens are added together
_DEFAULTS = {"request_id": "", "domain": "", "extra_keys": NO_EXTRA_KEYS, "skip_reading": 0, "max_tokens": 0, "hint": 0}


class _Request:
    """One recorded request.

    Attributes:
        facts: the columns of its news row except its content.
        num_began: tokens of this row.
    """

    __slots__ = ("facts", "hashes", "num_began", "num_hashes", "num_tokens", "tokens")

    def __init__(self, facts: dict[str, Any], num_began: int) -> None:
        self.facts = facts
        self.num_began = self.num_tokens = num_began
        self.num_hashes = 0
        self.tokens = array("I")
        self.hashes = bytearray()


class KnownRequests:
    """The recorded requests of one session. The session uses this object as its `revive`, that is, to get its requests
    after a restart of the service.

    It keeps four bytes for each token of a request that has not ended.
    """

    def __init__(self) -> None:
        self.running: set[int] = set()  # slots that hold blocks
        self._requests: dict[int, _Request] = {}
        self._obstacle = ""
        self._loading: set[int] = set()  # jobs of loads from tiers whose end was not reported
        # Of the last decode steps: slots, and a 1 for each, or None for rows of a builder
        self._decoding: tuple[Sequence[int], Sequence[int] | None] = ((), None)
        # Per decode step, a token of each of these slots; empty with hashes
        self._decoded: list[array[int] | DecodeRows] = []

    def note(self, step: Step, result: StepResult) -> None:
        """Record a step that the service applied, and its result."""
        if (rows := step.rows) is not None:  # of the step nothing else is read, since each object takes time
            if rows.slots is not self._decoding[0] or len(self._decoded) == _MAX_COLLECTED:
                self._add_collected()
                self._decoding = rows.slots, None
            if rows.appended:
                self._decoded.append(rows)
                self._add_hashes(rows.slots, rows.num_hashes, rows.hashes)
            if preempted := vars(result.parts[0]).get("preempted"):
                self.running.difference_update(preempted)
            return
        for part, done in zip(step.parts, result.parts, strict=True):
            self._record(part)
            if preempted := vars(done).get("preempted"):
                self.running.difference_update(preempted)
            if "admit" in vars(part):
                self._note_admitted(part.admit, done)

    def after(self, lost: Iterable[Step]) -> KnownRequests:
        """Return a copy of the record that also includes these steps, which no service has answered."""
        copy = deepcopy(self)
        try:
            for part in (part for step in lost for part in step.parts):
                copy._record(part)
            copy._add_collected()
        except (LookupError, OverflowError, TypeError, ValueError):
            copy._obstacle = "a step in flight is malformed"
        return copy

    def revival(self, epoch: int, hash_block_size: int) -> Revival:
        """Return the requests for a restarted service, to begin an epoch above this one.

        Raises:
            ServiceRestarted: the recorded steps are not sufficient, for instance after an external load.
        """
        self._add_collected()
        with_tokens = {bool(one.tokens) for one in self._requests.values() if one.num_tokens}
        obstacle = self._obstacle or ("some requests have tokens, others hashes" if len(with_tokens) > 1 else "")
        if self._loading:
            obstacle = obstacle or "a load from a tier may write pages of a request"
        if obstacle:
            raise ServiceRestarted(
                f"the service restarted, and the session cannot send its requests again: {obstacle}",
                remedy="open the session with the argument revive, a function that returns the engine's requests",
            )
        return Revival(news=self._news(hash_block_size), running=tuple(sorted(self.running)), owner_epoch=epoch)

    def _news(self, hash_block_size: int) -> News:
        news, hashes = News(slot=list(self._requests)), bytearray()
        for one in self._requests.values():
            news.num_tokens.append(one.num_tokens)
            news.tokens.extend(one.tokens)
            news.num_hashes.append(one.num_hashes)
            hashes += one.hashes
            keys = revived(one.facts["extra_keys"], one.num_began, one.num_tokens, hash_block_size)
            for name, value in {**one.facts, "extra_keys": keys}.items():
                getattr(news, name).append(value)
        news.hashes = bytes(hashes)
        return news

    def _record(self, part: Part) -> None:
        """Record the requests of a part as the engine sent them."""
        given = given_fields(part)  # sections that are missing are empty
        if "facts" in given and part.facts.slot:
            self._add_appended(part.facts)
            for slot, hint in zip(part.facts.slot, part.facts.hint, strict=False):
                if hint != UNCHANGED:
                    self._requests[slot].facts["hint"] = hint
            if part.facts.hashes or part.facts.end:
                self._add_hashes_and_ends(part.facts)
        if part.resume is not None:
            self._obstacle = "requests were resumed with their blocks"
        if self._loading and "cache" in given:
            self._loading.difference_update(part.cache.jobs_done, part.cache.jobs_failed)
            self._loading = {job for job in self._loading if job >= part.cache.jobs_before}
        if "news" in given and part.news.slot:
            self._add_collected()
            self._add_news(part.news)

    def _add_news(self, news: News) -> None:
        token_at = hash_at = 0
        size = len(news.hashes) // max(1, sum(news.num_hashes))
        for row, slot in enumerate(news.slot):
            facts = {
                name: getattr(news, name)[row] if getattr(news, name) else empty for name, empty in _DEFAULTS.items()
            }
            one = self._requests[slot] = _Request(facts, news.num_tokens[row])
            one.num_hashes = news.num_hashes[row] if news.num_hashes else 0
            if news.tokens:
                one.tokens.extend(news.tokens[token_at : token_at + one.num_tokens])
            token_at += one.num_tokens
            one.hashes += news.hashes[hash_at : hash_at + one.num_hashes * size]
            hash_at += one.num_hashes * size

    def _add_hashes_and_ends(self, facts: Facts) -> None:
        self._add_hashes(facts.slot, facts.num_hashes, facts.hashes)
        for row in compress(range(len(facts.end)), facts.end):
            self._end(facts.slot[row], End(facts.end[row]))

    def _add_hashes(self, slots: Sequence[int], counts: Sequence[int], hashes: bytes) -> None:
        if not hashes:
            return
        hash_at, size = 0, len(hashes) // max(1, sum(counts))
        for slot, count in zip(compress(slots, counts), filter(None, counts), strict=True):
            one = self._requests[slot]
            one.num_hashes += count
            one.hashes += hashes[hash_at : hash_at + count * size]
            hash_at += count * size

    def _add_appended(self, facts: Facts) -> None:
        """Add the tokens of facts. Those of decode steps of the same requests, one token each, are collected, and added
        to each request together: to add each alone would be the most expensive part of receiving an answer.
        """
        num_rows, num_tokens = len(facts.slot), len(facts.tokens)
        slots, ones = self._decoding
        is_next = facts.slot == slots and facts.appended == ones  # first: two comparisons of arrays are much faster
        if num_tokens in (0, num_rows) and (is_next or facts.appended.count(1) == num_rows):
            if not is_next or num_tokens != len(self._decoded[-1]):
                self._add_collected()
                self._decoding = facts.slot[:], facts.appended[:]
            self._decoded.append(array("I", facts.tokens))
            if len(self._decoded) == _MAX_COLLECTED:
                self._add_collected()
            return
        self._add_collected()
        token_at = 0
        for row in compress(range(num_rows), facts.appended):
            one, count = self._requests[facts.slot[row]], facts.appended[row]
            one.num_tokens += count
            one.tokens.extend(facts.tokens[token_at : token_at + count])
            token_at += count

    def _add_collected(self) -> None:
        """Add the collected tokens to their requests."""
        steps = [one.appended_tokens() if isinstance(one, DecodeRows) else one for one in self._decoded]
        self._decoded = []
        (slots, _), self._decoding = self._decoding, ((), None)
        for slot in slots:
            self._requests[slot].num_tokens += len(steps)
        for slot, tokens in zip(slots, zip(*steps, strict=True), strict=False):  # without tokens: no row
            self._requests[slot].tokens.extend(tokens)

    def _end(self, slot: int, end: End) -> None:
        self._add_collected()
        self.running.discard(slot)
        if end is End.HELD:
            self._obstacle = "a transfer may read pages of a held request"
        if end is not End.PREEMPTED:
            del self._requests[slot]

    def _note_admitted(self, admit: Admit, done: PartResult) -> None:
        if any(admit.external) or any(flags & RowFlag.DELAY_CACHING for flags in admit.flags):
            self._obstacle = "an external load may write pages of a request"
        self._loading.update(filter(None, done.admit_job))
        for slot, status in zip(admit.slot, done.admit_status, strict=True):
            if status == AdmitStatus.GRANTED:
                self.running.add(slot)
