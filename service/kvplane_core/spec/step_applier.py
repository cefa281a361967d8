"""Applies the run and admit sections of a part: grants tokens to rows in order, within budgets and free blocks.

The number of tokens of a row depends on refusals before the row, and refusals depend on earlier numbers. The engine
sends the order of its rows and its budgets, and this loop decides the numbers, so that a step takes one message. A row
gets the least of what it wants and what the budgets leave; a preempted row's tokens return to the budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import replace

from kvplane.base.sections import AdmitRow
from kvplane.base.step import (
    ANY_HIT,
    UNLIMITED,
    Admit,
    AdmitStatus,
    Budget,
    OnRefusal,
    PartResult,
    RowFlag,
    Run,
    Watermark,
)
from kvplane.base.values import WhyDeclined
from kvplane_core.face.interface import Hit
from kvplane_core.face.part_rows import admit_rows
from kvplane_core.spec.coordinator import Admission, Coordinator, Growth
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.requests import Requests
from kvplane_core.spec.split import NEVER
from kvplane_core.spec.tiers.loads import Choice, TierLoads

# Plain integers: an enum's operators cost more than the rest of a row.
UNALIGNED, DELAY_CACHING, FULL_FIT = int(RowFlag.UNALIGNED), int(RowFlag.DELAY_CACHING), int(RowFlag.FULL_FIT)
WHOLE, LOAD = int(RowFlag.WHOLE), int(RowFlag.LOAD)
GRANTED_OR_NOT_WAITING = AdmitStatus.GRANTED, AdmitStatus.NOT_WAITING

PATIENT_ROWS = 64  # more rows than this in sequence without room for a state block count as starved


class StepApplier:
    """Applies the run and admit rows of one part, and adds the granted tokens and blocks to the result.

    Args:
        coordinator: allocates and releases the blocks.
        tracker: records grants, and removes them on preemption.
        budget: tokens that the rows of the part may have in total.
        result: result of the part; the answers to the rows are added to it.
        seq: number of the step being applied.
    """

    def __init__(
        self, coordinator: Coordinator, tracker: InFlightTracker, budget: Budget, result: PartResult, seq: int
    ) -> None:
        self._blocks = coordinator
        self._requests: Requests = coordinator.requests
        self._tracker = tracker
        self._tokens_left = budget.tokens
        self._input_left = budget.input - budget.overhead  # tokens of input that the next row may have
        self._overhead = budget.overhead
        self._result = result
        self._seq = seq
        self._aligns = coordinator.spec.align.block_size > 0
        self._unnoted: list[int] = []  # tokens of run rows that the tracker has not recorded yet
        self.unaligned_chunks = self.starved_chunks = 0
        self.new_blocks: list[list[int]] = []  # of the last admit row that was granted, per group
        self._run_slots: Sequence[int] = []
        self._new: dict[int, Sequence[list[int]]] = {}  # by run row

    def _room(self) -> int:
        """Return how many tokens the budget leaves for the next row."""
        return min(self._tokens_left, self._input_left)

    def _spend(self, num_tokens: int) -> int:
        """Subtract a row's tokens from the budget; returns how many tokens the next row may have."""
        self._tokens_left -= num_tokens
        self._input_left -= num_tokens + self._overhead
        return min(self._tokens_left, self._input_left)

    # -- run ---------------------------------------------------------------------------------------------------------

    def run(self, rows: Run) -> None:
        """Grant tokens to running requests in row order.

        If too few blocks are free, victims are preempted, or the row is refused, as `on_refusal` states.
        """
        requests = self._requests
        running, num_tokens, computed = requests.running, requests.num_tokens, requests.computed
        self._run_slots = rows.slot
        if rows.extra and self._blocks.has_states:
            for slot, extra in zip(rows.slot, rows.extra, strict=True):
                requests.asked[slot] = (self._seq, num_tokens[slot] + extra)
        granted = self._result.granted = self._unnoted = [0] * len(rows.slot)
        victims, cannot_run = self._victims(rows), self._tracker.cannot_run(self._seq)
        room = self._room()
        for row, slot in enumerate(rows.slot):
            if room <= 0:
                break
            if not running[slot] or slot in cannot_run:
                continue
            wanted = self._limited(rows, row, slot, num_tokens[slot] - computed[slot], room)
            if wanted <= 0:
                continue
            if not self._extend(rows, row, wanted, victims):
                if rows.on_refusal is OnRefusal.STOP:
                    break
                room = self._room()
                continue
            granted[row] = wanted
            computed[slot] += wanted
            room = self._spend(wanted)
        pad(self._result.run_needed, len(granted))
        self._note_grants(rows.slot, granted)
        self._unnoted = []
        for row, blocks in sorted(self._new.items()):
            self._report_new_blocks(row, blocks)

    def _limited(self, rows: Run, row: int, slot: int, wanted: int, room: int) -> int:
        """Return how many tokens a row can get at most, free blocks aside.

        `wanted` and the `extra` of the row, limited by its `cap`, max_model_len and `room`, then aligned for recurrent
        states.
        """
        computed = self._requests.computed[slot]
        aligns = self._aligns and (wanted > 1 or computed < self._requests.num_prompt[slot])
        wanted += rows.extra[row] if rows.extra else 0
        wanted = min(wanted, self._blocks.spec.max_model_len - computed, room)
        if rows.cap:
            wanted = min(wanted, rows.cap[row])
        if aligns and not (rows.flags and rows.flags[row] & UNALIGNED):
            return self._aligned(slot, computed, wanted, rows.cap[row] if rows.cap else UNLIMITED)
        return wanted

    def _aligned(self, slot: int, start: int, wanted: int, cap: int) -> int:
        """Return the number of tokens of a chunk, shortened so that it ends where recurrent states can be cached.

        The chunk ends inside a state block only if the budget of the whole step is below one block. If other rows leave
        less than a block of budget, the row gets 0 tokens, as in vLLM; such rows are counted.
        """
        clipped = align_chunk(self._blocks, slot, start, wanted)
        if clipped <= 0 < wanted:
            most = min(self._budget_of_step(), cap)
            clipped = align_chunk(self._blocks, slot, start, wanted, most)
            self.unaligned_chunks += clipped > 0
        unserved = self._requests.unserved
        if clipped <= 0 < wanted:
            unserved[slot] = unserved.get(slot, 0) + 1
            self.starved_chunks += unserved[slot] > PATIENT_ROWS
        elif slot in unserved:
            del unserved[slot]
        return clipped

    def _budget_of_step(self) -> int:
        """Return how many tokens a row of this step could have had if it were the only row of the step."""
        rows, tokens = self._tracker.granted_in(self._seq)
        rows += len(self._unnoted) - self._unnoted.count(0)
        tokens += sum(self._unnoted)
        return tokens + min(self._tokens_left, self._input_left + rows * self._overhead)

    def _note_grants(self, slots: Sequence[int], granted: list[int]) -> None:
        if 0 in granted:
            slots = [slot for slot, count in zip(slots, granted, strict=True) if count]
            granted = [count for count in granted if count]
        if slots:
            self._tracker.note_grants(slots, granted, self._seq)

    def _extend(self, rows: Run, row: int, wanted: int, victims: Iterator[int]) -> bool:
        """Allocate the blocks of the row, preempting victims until enough blocks are free; returns False if that is not
        enough.
        """
        slot = rows.slot[row]
        in_flight = rows.in_flight[row] if rows.in_flight else -1
        if in_flight < 0:
            in_flight = self._requests.in_flight[slot]
        lookahead = rows.lookahead[row] if rows.lookahead else 0
        flags, reserved = rows.flags[row] if rows.flags else 0, rows.reserved[row] if rows.reserved else 0
        delays, full_fit = bool(flags & DELAY_CACHING), bool(flags & FULL_FIT)
        while True:
            new = self._blocks.extend(slot, Growth(wanted, lookahead, in_flight, delays, reserved, full_fit))
            if not isinstance(new, int):
                self._tracker.note_keys(slot, self._seq)
                self._new[row] = new
                return True
            victim = next(victims, None) if rows.on_refusal is OnRefusal.PREEMPT else None
            if victim is not None:
                self._preempt(victim, row)
            if victim is None or not self._requests.running[slot]:
                note_run_needed(self._result, row, new)
                return False

    def _victims(self, rows: Run) -> Iterator[int]:
        """Yield the slots to preempt, in order, leaving out those that do not run any more."""
        order = rows.victims or reversed(rows.slot)
        return (slot for slot in order if self._requests.running[slot])

    def _preempt(self, slot: int, row: int) -> None:
        """Preempt a request for run row `row`, and the requests that adopted keys which it registered in this step.

        Tokens that this step granted to the preempted requests return to the budget.
        """
        granted = self._result.granted
        row_of = {self._run_slots[at]: at for at in range(row) if granted[at]}
        self._tracker.end_loads(row_of)  # a grant ends a load, also where it is recorded after this
        if slot in row_of:  # its grant is not recorded yet, and it will not run
            self._requests.granted_step[slot] = self._seq
        self._tracker.prepare_return(slot)
        gone = self._tracker.preempt(slot, self._seq)
        self._result.preempted.extend(gone)
        for at in [row_of.pop(one) for one in gone if one in row_of]:
            self._tokens_left += granted[at]
            self._input_left += granted[at] + self._overhead
            granted[at] = 0
            self._new.pop(at, None)

    def _report_new_blocks(self, row: int, blocks: Sequence[list[int]]) -> None:
        for group, ids in enumerate(blocks):
            if ids:
                self._result.new_blocks.add(row, group, ids)

    # -- admit -------------------------------------------------------------------------------------------------------

    def admit(self, rows: Admit) -> None:
        """Admit waiting requests in row order, each with the longest prefix that is cached at that moment."""
        result = self._result
        reached = not (rows.only_if_no_preemption and result.preempted)
        for row in admit_rows(rows) if reached else ():
            if self._room() <= 0 or self._requests.num_running >= rows.max_running:
                break
            status = self.admit_row(row)
            if status not in GRANTED_OR_NOT_WAITING and rows.on_refusal is not OnRefusal.SKIP:
                break
        left = len(rows.slot) - len(result.admit_status)
        result.admit_status += [int(AdmitStatus.NOT_REACHED)] * left
        for column in (result.admit_hit, result.admit_granted, result.admit_single_group_hit):
            column += [0] * left
        for column in self._rare_columns():
            pad(column, len(rows.slot))

    def admit_row(self, row: AdmitRow) -> AdmitStatus:
        """Admit one waiting request, or refuse it; appends the answer to the result."""
        result, slot = self._result, row.slot
        at = len(result.admit_status)
        result.admit_status.append(0)
        result.admit_hit.append(0)
        result.admit_granted.append(0)
        result.admit_single_group_hit.append(0)
        for column in self._rare_columns():
            pad(column, at + 1)
        if self._requests.running[slot] or self._requests.held[slot]:
            status = AdmitStatus.NOT_WAITING
        else:
            status = self._admit_row(row, at)
        result.admit_status[at] = int(status)
        return status

    def _set_single_group_hit(self, row: AdmitRow, at: int, found: int) -> None:
        """Report the single-group hit that the look-up found, and set that of the request: as the row gives it, or as
        found.
        """
        self._result.admit_single_group_hit[at] = found
        given = row.single_group_hit
        self._requests.single_group_hit[row.slot] = found if given == UNLIMITED else given

    def _admit_row(self, row: AdmitRow, at: int) -> AdmitStatus:
        requests, result, slot = self._requests, self._result, row.slot
        if slot in requests.loading:
            return AdmitStatus.DEFERRED
        hit = self._blocks.find_hit(slot, row.hit_limit)
        if row.flags & LOAD:
            loads = TierLoads(self._blocks, self._tracker)
            choice = loads.choose(slot, row.hit_limit, hit)
            if choice.passed is not None and choice.why is not None:
                passed = choice.passed
                times = passed.load_ns, passed.compute_ns
                result.declined.add(at, choice.why, passed.farthest, passed.hit.num_tokens, *times)
            if choice.plan is not None:
                return self._admit_with_load(row, at, loads, choice)
        result.admit_hit[at] = hit.num_tokens
        result.admit_single_group_hit[at] = hit.single_group_hit
        start = hit.num_tokens + row.external
        if row.expected_hit not in (ANY_HIT, hit.num_tokens) or start > requests.num_tokens[slot]:
            return AdmitStatus.STALE_HIT
        self._set_single_group_hit(row, at, hit.single_group_hit)
        wanted = self._wanted_at_admission(row, start)
        late = bool(row.external and row.flags & DELAY_CACHING)
        # The fewest tokens: 0 if the row waits for a load, or if its `min_new` is 0 and it has tokens to adopt.
        if wanted < (0 if late else row.min_new if start else max(1, row.min_new)):
            return AdmitStatus.NO_ROOM
        if not self._blocks.hit_is_ready(hit):
            return AdmitStatus.DEFERRED
        admission = self._admission(row, wanted, hit)
        free_wanted = self._blocks.free_wanted(admission)
        if free_wanted > self._blocks.pool.num_free:
            if free_wanted >= NEVER and self._blocks.pool.is_unused and self._blocks.give_up(hit):
                return self._admit_row(row, at)  # with a shorter hit, if the row permits it
            return self._refuse(row, at, free_wanted)
        self.new_blocks = new = self._blocks.admit(admission)
        requests.start(slot)
        requests.computed[slot] = start + wanted
        self._spend(wanted)
        self._tracker.note_grants([slot], [wanted], self._seq)
        if late:
            self._set_of_row("admit_load_after", at, self._tracker.note_load(slot, hit.blocks))
        elif row.external:
            self._tracker.note_filling(slot, hit.blocks, self._seq)
        self._tracker.note_keys(slot, self._seq)
        self._tracker.note_admission(slot, hit.num_tokens, hit.blocks)
        result.admit_granted[at] = wanted
        self._report_admission(at, new, slot)
        return AdmitStatus.GRANTED

    def _admit_with_load(self, row: AdmitRow, at: int, loads: TierLoads, choice: Choice) -> AdmitStatus:
        """Admit a request with a hit that is partly in the tiers. It gets its blocks, and no tokens before the load is
        done.
        """
        plan = choice.plan
        assert plan is not None, "the caller has looked"
        requests, result, slot, hit = self._requests, self._result, row.slot, plan.hit
        result.admit_hit[at] = hit.num_tokens
        result.admit_single_group_hit[at] = hit.single_group_hit
        if row.expected_hit not in (ANY_HIT, hit.num_tokens):
            return AdmitStatus.STALE_HIT
        self._set_single_group_hit(row, at, hit.single_group_hit)
        if choice.why is WhyDeclined.WAITS or not self._blocks.hit_is_ready(hit):
            return AdmitStatus.DEFERRED
        # No keys are registered before the load is done, and none of its blocks is zeroed or copied.
        admission = replace(self._admission(row, 0, hit), lookahead=0, delay_caching=True, full_fit=True)
        free_wanted = self._blocks.free_wanted(admission) + len(plan.missing)
        if free_wanted > self._blocks.pool.num_free:
            return self._refuse(row, at, free_wanted)
        job, self.new_blocks, filled = loads.begin(admission, plan)
        requests.start(slot)
        self._tracker.note_grants([slot], [0], self._seq)
        self._tracker.note_admission(slot, filled.num_tokens, filled.blocks)
        self._set_of_row("admit_load_after", at, self._blocks.tiers.jobs.loads[job].after)
        self._set_of_row("admit_job", at, job)
        self._set_of_row("admit_tier_tokens", at, plan.gained)
        self._report_admission(at, self.new_blocks, slot)
        return AdmitStatus.GRANTED

    def _set_of_row(self, name: str, at: int, value: int) -> None:
        """Set the entry of an admit row in a column that is empty while all its entries are 0."""
        if value:
            column = getattr(self._result, name) or [0] * len(self._result.admit_status)
            column[at] = value
            setattr(self._result, name, column)

    def _rare_columns(self) -> tuple[MutableSequence[int], ...]:
        """Return the columns of admit rows that are empty while all their entries are 0."""
        result = self._result
        return result.admit_load_after, result.admit_job, result.admit_tier_tokens, result.admit_needed

    def _report_admission(self, at: int, new: Sequence[list[int]], slot: int) -> None:
        number = len(self._result.granted) + at
        self._report_new_blocks(number, new)
        for group, manager in enumerate(self._blocks.managers):
            self._result.tables.add(number, group, manager.table[slot])

    def _wanted_at_admission(self, row: AdmitRow, start: int) -> int:
        """Return the tokens of the first chunk; -1 if a row with the flag WHOLE exceeds the budget."""
        slot = row.slot
        wanted = min(self._requests.num_tokens[slot] + row.extra - start, row.cap)
        room = self._room()
        if wanted > room and row.flags & WHOLE:
            return -1
        wanted = min(wanted, room)
        if not row.flags & UNALIGNED:
            wanted = self._aligned(slot, start, wanted, row.cap)
        return min(wanted, self._blocks.spec.max_model_len - start)

    def _admission(self, row: AdmitRow, wanted: int, hit: Hit) -> Admission:
        runs = self._requests.num_running > 0
        leaves = row.watermark == Watermark.ALWAYS or (row.watermark == Watermark.AUTO and runs)
        return Admission(
            row.slot,
            wanted,
            hit,
            num_external=row.external,
            lookahead=row.lookahead,
            num_encoder=row.encoder_tokens,
            delay_caching=bool(row.flags & DELAY_CACHING),
            full_fit=bool(row.flags & FULL_FIT),
            leave_free=row.reserved,
            watermark=self._blocks.spec.watermark_blocks if leaves else 0,
            loaded_groups=row.skip_zero_groups,
        )

    def _refuse(self, row: AdmitRow, at: int, free_wanted: int) -> AdmitStatus:
        """Report how many blocks a row needs that has too few."""
        alone = self._blocks.blocks_when_alone(self._requests.num_tokens[row.slot], row.encoder_tokens)
        usable = self._blocks.spec.num_blocks - 1 - len(self._blocks.pool.reserved)
        never_fits = alone > usable
        self._set_of_row("admit_needed", at, min(alone if never_fits else free_wanted, UNLIMITED))
        return AdmitStatus.NEVER_FITS if never_fits else AdmitStatus.REFUSED


def note_run_needed(result: PartResult, row: int, needed: int) -> None:
    """Report how many blocks had to be free for a run row that has too few."""
    result.run_needed += [0] * (row - len(result.run_needed))
    result.run_needed.append(min(needed, UNLIMITED))


def pad(column: MutableSequence[int], rows: int) -> None:
    """Give a column that has entries one for each row."""
    if column:
        column += [0] * (rows - len(column))


def align_chunk(coordinator: Coordinator, slot: int, start: int, wanted: int, most: int = UNLIMITED) -> int:
    """Shorten a prefill chunk so that recurrent states end where they can be cached (conformance STEPS, section 7).

    Chunks end at multiples of the state block, at the prompt's last block and hash boundaries, and at the longest hit
    of a single group. A chunk ends inside a block only if `most`, the most tokens of a chunk, is less than a block. The
    last chunk of a prompt needs no end at a boundary if its launch writes the state there as a checkpoint.
    Returns the number of tokens of the chunk; 0 if none is left.
    """
    requests, align, boundaries = coordinator.requests, coordinator.spec.align, coordinator.boundaries
    size, prompt, num_tokens = align.block_size, requests.num_prompt[slot], requests.num_tokens[slot]
    prefill_end = max(prompt, num_tokens - 1)
    if size == 0 or start >= prefill_end or wanted <= 0:
        return wanted
    end = start + wanted
    has_checkpoint = end >= prefill_end and coordinator.writes_checkpoints(start, end, prefill_end)
    if end < prefill_end:
        aligned = end // size * size
        if aligned > start or size <= min(align.chunk_limit, most):
            end = aligned
    stops = []
    if not has_checkpoint:
        if start % size:
            stops.append(-(-start // size) * size)
        last = boundaries.last_boundary(num_tokens, size)
        stops.append(last)
        tail = boundaries.last_boundary(prompt, coordinator.spec.hash_block_size)
        if align.stop_at_tail and last < tail < prompt:
            stops.append(tail)
    single_group_hit = requests.single_group_hit[slot]
    if start < single_group_hit < end:
        inside = coordinator.checkpoints_single_group_hits and single_group_hit <= prompt
        stops.append(single_group_hit if inside else start + (single_group_hit - start) // size * size)
    end = min([end, *(stop for stop in stops if start < stop < end)])
    return max(end - start, 0)
