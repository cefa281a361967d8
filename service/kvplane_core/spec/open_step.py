"""A step that an engine applies row by row, in its own process, as its scheduler decides the rows.

    open  ->  append | commit | end | evict | add | extend | admit ...  ->  close: the step and its result

Each method applies one row at once and records it. The recorded step, applied whole to a replica in the same state, has
the same result, because the effects of a row are complete before the next row starts. So a replica in a service can
follow a replica in the engine's process with one message per step.

Rows of a section are recorded in one part as long as their order is that of the sections of a part; a row of an earlier
section starts the next part. The scheduler decides every amount: a row states its amount exactly and is not limited by
a budget; if blocks are missing, the row is refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import CommitRule
from kvplane.base.sections import AdmitRow
from kvplane.base.step import (
    UNCHANGED,
    UNLIMITED,
    AdmitStatus,
    Budget,
    Cache,
    End,
    News,
    Part,
    PartResult,
    Step,
    StepResult,
)
from kvplane_core.face.contents import Content
from kvplane_core.face.interface import Hit
from kvplane_core.face.part_rows import (
    DELAY_CACHING,
    FULL_FIT,
    NO_TERMS,
    UNALIGNED,
    PartRows,
    RunRow,
    Update,
    admit_section,
    facts_section,
    row_of,
    run_section,
)
from kvplane_core.face.reasons import NONE, Refusal
from kvplane_core.spec.coordinator import Growth
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.step_applier import StepApplier, note_run_needed, pad
from kvplane_core.spec.validate import StepValidator

NO_SLOT = -1


class _Section(IntEnum):
    FACTS = 0
    CACHE = 1
    NEWS = 2
    RUN = 3
    ADMIT = 4


RUN = _Section.RUN


class OpenStep:
    """A step of a replica that is applied row by row, while the scheduler decides the rows.

    A method raises InvalidArgument, and applies no row, if the slot has no request or one in the wrong state.
    """

    def __init__(self, replica: Replica, executed_through: int) -> None:
        """Begin the next step of the replica; all steps up to `executed_through` have finished on all ranks."""
        self._replica = replica
        self._requests = replica.requests
        self._blocks = replica.coordinator
        self._tracker = replica.tracker
        self._aligns = replica.spec.align.block_size > 0
        self._safe = replica.spec.commit is CommitRule.SAFE
        self.seq = replica.seq + 1
        self._executed_through = executed_through
        self._parts: list[PartRows] = []
        self._results: list[PartResult] = []
        self._begun = False  # `new_step` was called
        self.new_blocks: list[list[int]] = []  # of the last admit row that was granted, per group
        self.granted: set[int] = set()  # slots that run in this step; read only
        self.loads: set[int] = set()  # slots whose load begins in this step
        self._row_in: dict[int, int] = {}  # by slot: number of the part with its last run or admit row
        self._decode_flags = UNALIGNED if self._aligns else 0
        pool = self._blocks.pool
        self._epoch = pool.epoch
        through = max(executed_through, pool.executed_through)
        self._validator = StepValidator(replica.spec, self._requests, through, pool.busy, self._blocks.tiers)
        self._open_part()
        replica.begin_step(self.seq, executed_through)

    def close(self) -> StepResult:
        """End the step; returns the result of the step."""
        self._close_part()
        self._replica.complete_step(self.seq, self._results[-1])
        return StepResult(self.seq, 0, self._results, self._blocks.pool.executed_through)

    def recorded(self) -> Step:
        """Return the step that has the rows of this closed step. Any thread may call it, also while later steps run."""
        parts = [rows.part() for rows in self._parts]
        return Step(self._epoch, self.seq, parts, executed_through=self._executed_through)

    def flush(self) -> list[PartResult]:
        """Complete the results of the rows so far, with their orders and events; further rows start the next part."""
        if self._rows:
            self._close_part()
            self._open_part()
        return self._results

    @property
    def has_events(self) -> bool:
        """Whether there are cache events that no complete result has."""
        return bool(self._blocks.pool.events.runs)

    @property
    def any_granted(self) -> bool:
        """Whether a slot runs in this step."""
        return bool(self.granted)

    def is_granted(self, slot: int) -> bool:
        """Whether the slot runs in this step."""
        return slot in self.granted

    @property
    def results(self) -> list[PartResult]:
        """The results that are complete."""
        return self._results

    # -- parts -------------------------------------------------------------------------------------------------------

    def _open_part(self) -> None:
        self._section = _Section.FACTS
        self._rows = PartRows()
        self._result = PartResult()
        self._applier: StepApplier | None = None  # of the admit rows of the open part

    def _close_part(self) -> None:
        self._leave_section()
        if not self._begun:
            self._begin_to_allocate()
        self._replica.complete_part(self._result)
        self._parts.append(self._rows)
        self._results.append(self._result)

    def _enter(self, section: _Section, slot: int = NO_SLOT) -> None:
        """Begin a row of this section. Starts the next part if this part is past the section, or already has a row of
        this slot.
        """
        if section < self._section or (section is self._section and self._row_in.get(slot) == len(self._parts)):
            self._close_part()
            self._open_part()
        if section > self._section:
            self._leave_section()
            self._section = section
        if slot != NO_SLOT:
            self._row_in[slot] = len(self._parts)
        if section >= _Section.RUN and not self._begun:
            self._begin_to_allocate()

    def _begin_to_allocate(self) -> None:
        self._begun = True
        self._blocks.new_step()

    def _leave_section(self) -> None:
        """Record the grants of the run section at the end of the section, in one call, as `Replica.apply` does."""
        runs = self._rows.runs
        if self._section is not RUN or not runs:
            return
        granted = self._result.granted
        pad(self._result.run_needed, len(granted))
        if self._blocks.has_states and any(row[1] for row in runs):
            for slot, extra, *_ in runs:
                self._requests.asked[slot] = (self.seq, self._requests.num_tokens[slot] + extra)
        slots = [row[0] for row in runs]
        if 0 in granted:
            slots = [slot for slot, tokens in zip(slots, granted, strict=True) if tokens]
            granted = [tokens for tokens in granted if tokens]
        if slots:
            self._tracker.note_grants(slots, granted, self.seq)

    # -- facts, cache, news ------------------------------------------------------------------------------------------

    def update(self, update: Update) -> list[int]:
        """Apply one row of facts; returns the slots that are preempted by it."""
        if not self._is_plain_growth(update):
            self._validator.check_row(Part(facts=facts_section([update])), self.seq)
            self._enter(_Section.FACTS)
        elif self._row_in.get(update.slot) == len(self._parts):
            self._enter(_Section.FACTS)
        before = len(self._result.preempted)
        self._replica.facts.apply_update(update, (), self.seq, self._result)
        self._rows.facts.append(update)
        if update.end is not End.NONE:
            self.granted.discard(update.slot)
        return self._taken_back(before)

    def _is_plain_growth(self, update: Update) -> bool:
        """Whether the row only adds tokens and block hashes to a running request, within the limits, as most rows do.

        Such a row is recorded among the facts of the open part even if the part has rows of later sections: it changes
        what only rows of this request read, and the request has none in this part.
        """
        slot, requests = update.slot, self._requests
        if not 0 <= slot < len(requests.running) or not requests.running[slot] or requests.by_service[slot]:
            return False
        others = (update.computed, update.commit, update.release_skipped, update.hint)
        if others.count(UNCHANGED) < len(others) or update.end or update.fence:
            return False
        num_tokens = requests.num_tokens[slot] + update.appended
        if not 0 <= update.appended <= requests.limit[slot] - requests.num_tokens[slot]:
            return False
        return not update.digests or self._are_next(slot, num_tokens, update.digests)

    def _are_next(self, slot: int, num_tokens: int, digests: Sequence[bytes]) -> bool:
        """Whether the request may append these hashes when it has `num_tokens` tokens."""
        known = self._requests.content[slot].digests
        is_due = len(known) + len(digests) <= num_tokens // self._replica.spec.hash_block_size
        return is_due and bool(known) and set(map(len, digests)) == {len(known[0])}

    def change_cache(self, cache: Cache) -> list[int]:
        """Apply a cache section; returns the slots that are preempted by it. If it resets the cache, read `reset_done`
        after it.
        """
        self._validator.check_row(Part(cache=cache), self.seq)
        self._require(not self.loads.intersection(cache.released), "load released", "cache.released")
        if self._section > _Section.CACHE or self._rows.cache is not None:
            self._close_part()
            self._open_part()
        self._enter(_Section.CACHE)
        before = len(self._result.preempted)
        self._rows.cache = cache
        self._replica.facts.apply_cache(cache, self._result)
        return self._taken_back(before)

    def _taken_back(self, before: int) -> list[int]:
        preempted = list(self._result.preempted[before:])
        self.granted.difference_update(preempted)
        self._result.taken_back += len(preempted)
        return preempted

    @property
    def reset_done(self) -> bool:
        """Whether the last cache section reset the cache, which drops every key."""
        return self._result.reset_done

    def add(self, slot: int, num_tokens: int, digests: Sequence[bytes], **columns: str | int) -> None:
        """Put a new request of `num_tokens` tokens into a free slot.

        Args:
            slot: a free slot.
            num_tokens: number of tokens of the prompt.
            digests: hashes of the prompt's full hash blocks.
            columns: entries of the row in further columns of `News`, such as `request_id`.
        """
        news = News([slot], [num_tokens], num_hashes=[len(digests)], hashes=b"".join(digests))
        for name, value in columns.items():
            setattr(news, name, [value])
        self._validator.check_row(Part(news=news), self.seq)
        # The row may be recorded before rows of other requests, which neither read nor change what it changes: its slot
        # was free in the whole part, since the row that ends a request is the first of its part that names the request.
        self._section = max(self._section, _Section.NEWS)
        self._replica.apply_news(news, [Content(list(digests))])
        self._rows.news.append(news)

    # -- run, admit --------------------------------------------------------------------------------------------------

    def decode(
        self, slot: int, num_tokens: int, digests: Sequence[bytes], num_new: int, lookahead: int, in_flight: int
    ) -> Literal[False]:
        """Leave the row to `update` and `extend`, whose rows it stands for: return False, and change nothing.

        A compiled core does the work of both in one call, for the usual row: one that computes all tokens of a request,
        without flags. It then returns what `extend` returns.

        Args:
            slot: slot of a request that `add` put there and that has not ended.
            num_tokens: number of tokens of the request.
            digests: hashes of the blocks that became full.
            num_new: number of tokens to grant: all that are not computed, and drafts behind them.
            lookahead: further token positions that must have a block.
            in_flight: as in the columns of `Run`.
        """
        return False

    def extend(
        self,
        slot: int,
        num_new: int,
        lookahead: int = 0,
        in_flight: int = -1,
        flags: int = 0,
        reserved: int = 0,
    ) -> Sequence[list[int]] | None:
        """Grant `num_new` tokens to a running request; returns the new blocks per group, () if no block is needed.

        Returns None, and allocates nothing, if too few blocks are free. The other arguments are the row's entries in
        the columns of `Run`.
        """
        requests = self._requests
        end = self._end_of_run(slot, num_new)
        extra = end - requests.num_tokens[slot]
        if self._aligns:
            flags |= UNALIGNED
        row = RunRow(slot, extra, lookahead, in_flight, flags, reserved)
        self._validator.check_row(Part(run=run_section([row])), self.seq)
        self._enter(_Section.RUN, slot)
        self._rows.runs.append(row)
        flying = requests.in_flight[slot] if in_flight < 0 else in_flight
        delays, full_fit = bool(flags & DELAY_CACHING), bool(flags & FULL_FIT)
        new = self._blocks.extend(slot, Growth(num_new, lookahead, flying, delays, reserved, full_fit))
        result = self._result
        if isinstance(new, int):
            note_run_needed(result, len(result.granted), new)
            result.granted.append(0)
            return None
        self._tracker.note_keys(slot, self.seq)
        for group, ids in enumerate(new):
            if ids:
                result.new_blocks.add(len(result.granted), group, ids)
        result.granted.append(num_new)
        requests.computed[slot] += num_new
        self.granted.add(slot)
        return new

    def _end_of_run(self, slot: int, num_new: int) -> int:
        """Return where a row of a running request ends; raise InvalidArgument if it cannot be granted the tokens."""
        spec, requests = self._replica.spec, self._requests
        self._require(not self._tracker.loads_from_tiers(slot), "waits", "slot", slot)
        self._require(requests.is_live(slot) and requests.running[slot], "not running", "slot", slot)
        granted = spec.commit is CommitRule.SAFE and self.is_granted(slot)
        self._require(not granted, "granted", "slot", slot)
        computed = requests.computed[slot]
        self._require(0 < num_new <= spec.max_model_len - computed, "new after", "num_new", num_new, computed)
        return computed + num_new

    def _require(self, holds: bool, reason: str, column: str, *values: int) -> None:
        if not holds:
            raise Refusal(reason, NONE, column, NONE, values).error(self._replica.spec, Part())

    def look_up(self, slot: int, limit: int = UNLIMITED) -> Hit:
        """Find the request's longest cached prefix of at most `limit` tokens. Changes nothing and is not recorded."""
        if not self._requests.is_live(slot):
            raise InvalidArgument(f"slot {slot} has no request", field="slot")
        return self._blocks.find_hit(slot, limit)

    def admit(self, slot: int, num_hit: int, num_new: int, terms: AdmitRow = NO_TERMS) -> AdmitStatus:
        """Admit a waiting request: adopt a hit of `num_hit` tokens and grant `num_new` more.

        `num_hit` must be what `look_up` returned for `terms.hit_limit`; if the hit has changed since, the status is
        STALE_HIT. `new_blocks` has the new blocks of a granted row per group.
        """
        row = row_of(slot, num_hit, num_new, terms, self._num_tokens(slot), self._decode_flags)
        self._validator.check_row(Part(admit=admit_section([row])), self.seq)
        start = num_hit + terms.external
        fits = 0 <= num_new <= self._replica.spec.max_model_len - start
        self._require(fits, "new behind hit", "num_new", num_new, num_hit, terms.external)
        self._enter(_Section.ADMIT, slot)
        if self._applier is None:
            self._applier = StepApplier(self._blocks, self._tracker, Budget(), self._result, self.seq)
        status = self._applier.admit_row(row)
        self._rows.admits.append(row)
        if status is AdmitStatus.GRANTED:
            self.granted.add(slot)
            self.new_blocks = self._applier.new_blocks
            if row.external and row.flags & DELAY_CACHING:
                self.loads.add(slot)
        return status

    def _num_tokens(self, slot: int) -> int:
        return self._requests.num_tokens[slot] if self._requests.is_live(slot) else 0
