"""A step that an engine applies row by row on the compiled core, in its own process: the methods of `OpenStep`.

Each method is one call of the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvplane.base.errors import InvalidArgument
from kvplane.base.sections import AdmitRow
from kvplane.base.step import (
    UNLIMITED,
    Admit,
    AdmitStatus,
    Cache,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    Run,
    Step,
    StepResult,
)
from kvplane_core.cpp import _native
from kvplane_core.face.interface import Hit, ReplicaCore
from kvplane_core.face.part_rows import (
    NO_TERMS,
    UNALIGNED,
    PartRows,
    RunRow,
    Update,
    admit_section,
    facts_section,
    news_section,
    row_of,
    run_section,
)
from kvplane_core.face.reasons import Refusal

_ADMIT_STATUS = tuple(AdmitStatus)


def hit_of(core: object, slot: int, limit: int = UNLIMITED) -> Hit:
    """Return a request's longest cached prefix of at most `limit` tokens."""
    found = _native.read(core, "look_up", slot, limit)
    if found is None:
        raise InvalidArgument(f"slot {slot} has no request", field="slot")
    return Hit(found[0], found[1], tuple(found[2]))


class NativeOpenStep:
    """See `OpenStep`. The rows are recorded only on request."""

    def __init__(self, core: object, replica: ReplicaCore, executed_through: int, records: bool = False) -> None:
        """Begin the next step of the replica; all steps up to `executed_through` have finished on all ranks.

        `records`: `recorded` is called later.
        """
        self._replica = replica
        self._core = core
        self.seq = _native.change(core, "open", executed_through, records)
        self._executed_through = executed_through
        self._epoch = replica.epoch if records else 0
        self._recorded: object = None  # the sections that the core has recorded
        self._others: dict[int, PartRows] | None = {} if records else None  # the other ones
        self._results: list[PartResult] = []
        self.new_blocks: list[list[int]] = []
        self.reset_done = False

    def close(self) -> StepResult:
        """End the step; returns the result of the step."""
        parts, through, self._recorded = _native.change(self._core, "close")
        self._results += parts
        return StepResult(self.seq, 0, self._results, through)

    def recorded(self) -> Step:
        """Return the step that has the rows of this closed step. Any thread may call it, also while later steps run."""
        assert self._others is not None, "the step was opened without `records`"
        parts = []
        for number, (facts, run, admit, hashes) in enumerate(_native.recorded_rows(self._recorded)):
            others = self._others.get(number) or PartRows()
            part = Part(Facts(hashes=hashes, **facts), others.cache or Cache())
            part.news = news_section(others.news)
            part.run = Run(on_refusal=OnRefusal.SKIP, **run)
            part.admit = Admit(on_refusal=OnRefusal.SKIP, **admit)
            parts.append(part)
        return Step(self._epoch, self.seq, parts, executed_through=self._executed_through)

    def flush(self) -> list[PartResult]:
        """Complete the results of the rows so far; further rows start the next part."""
        self._results += _native.change(self._core, "flush")
        return self._results

    @property
    def results(self) -> list[PartResult]:
        """The results that are complete and were returned by `flush`."""
        return self._results

    @property
    def has_events(self) -> bool:
        """Whether there are cache events that no complete result has."""
        return _native.read(self._core, "has_events")

    def is_granted(self, slot: int) -> bool:
        """Whether the slot runs in this step."""
        return _native.read(self._core, "is_granted", slot)

    @property
    def any_granted(self) -> bool:
        """Whether a slot runs in this step."""
        return self.is_granted(-1)

    def update(self, update: Update) -> list[int]:
        """Apply one row of facts; returns the slots that are preempted by it."""
        try:
            return _native.change(self._core, "update", *update)
        except _native.Refused as refused:
            raise self._named(refused, Part(facts=facts_section([update]))) from None

    def change_cache(self, cache: Cache) -> list[int]:
        """Apply a cache section; returns the slots that are preempted by it."""
        try:
            preempted, self.reset_done, number = _native.change(self._core, "change_cache", cache)
        except _native.Refused as refused:
            raise self._named(refused, Part(cache=cache)) from None
        if self._others is not None:
            self._others.setdefault(number, PartRows()).cache = cache
        return preempted

    def add(self, slot: int, num_tokens: int, digests: Sequence[bytes], **columns: str | int) -> None:
        """Put a new request of `num_tokens` tokens into a free slot."""
        news = News([slot], [num_tokens], num_hashes=[len(digests)], hashes=b"".join(digests))
        for name, value in columns.items():
            setattr(news, name, [value])
        try:
            number = _native.change(self._core, "add", news)
        except _native.Refused as refused:
            raise self._named(refused, Part(news=news)) from None
        if self._others is not None:
            self._others.setdefault(number, PartRows()).news.append(news)

    def decode(
        self, slot: int, num_tokens: int, digests: Sequence[bytes], num_new: int, lookahead: int, in_flight: int
    ) -> Sequence[list[int]] | Literal[False] | None:
        """Append what a running request gained, and grant it tokens: `update` and `extend` in one call."""
        return _native.decode_row(self._core, slot, num_tokens, digests, num_new, lookahead, in_flight)

    def extend(
        self, slot: int, num_new: int, lookahead: int = 0, in_flight: int = -1, flags: int = 0, reserved: int = 0
    ) -> Sequence[list[int]] | None:
        """Grant `num_new` tokens to a running request; None, and no change, if too few blocks are free."""
        try:
            new = _native.change(self._core, "extend", slot, num_new, lookahead, in_flight, int(flags), reserved)
        except _native.Refused as refused:
            requests = self._replica.requests
            extra = requests.computed[slot] + num_new - requests.num_tokens[slot] if requests.is_live(slot) else 0
            row = RunRow(slot, extra, lookahead, in_flight, int(flags) | self._flags, reserved)
            raise self._named(refused, Part(run=run_section([row]))) from None
        return new

    def look_up(self, slot: int, limit: int = UNLIMITED) -> Hit:
        """Find the request's longest cached prefix of at most `limit` tokens. Changes nothing."""
        return hit_of(self._core, slot, limit)

    def admit(self, slot: int, num_hit: int, num_new: int, terms: AdmitRow = NO_TERMS) -> AdmitStatus:
        """Admit a waiting request: adopt a hit of `num_hit` tokens and grant `num_new` more."""
        try:
            number, new = _native.change(self._core, "admit", slot, num_hit, num_new, terms)
        except _native.Refused as refused:
            requests = self._replica.requests
            num_tokens = requests.num_tokens[slot] if requests.is_live(slot) else 0
            row = row_of(slot, num_hit, num_new, terms, num_tokens, self._flags)
            raise self._named(refused, Part(admit=admit_section([row]))) from None
        status = _ADMIT_STATUS[number]
        if status is AdmitStatus.GRANTED:
            self.new_blocks = new
        return status

    @property
    def _flags(self) -> int:
        return UNALIGNED if self._replica.spec.align.block_size > 0 else 0

    def _named(self, refused: _native.Refused, part: Part) -> InvalidArgument:
        return Refusal(*refused.args).error(self._replica.spec, part)
