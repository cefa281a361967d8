"""The random engine reads answers: tables, rows to launch, transfers, stays that ended."""

from __future__ import annotations

from random import Random

from kvplane.base.groups import GroupKind
from kvplane.base.step import AdmitStatus, End, Part, PartResult, RowFlag
from kvplane.session.tables import BlockTables
from tests.core.page_memory import SCRATCH, Launch, Left, Memory, Row, WrongPage, first_seen
from tests.core.page_requests import PlannedRow, Request, Texts, Transfer, Truth

MOST_IN_FLIGHT = 4


class Answers:
    """One engine life, as the answers of the service describe it.

    Attributes:
        pending: answered steps whose launch has not run.
        failed: steps whose launch never ran, not reported yet.
        lost: lives that may read garbage since a launch failed.
        launched: steps up to this one have run.
        executed_through: steps up to this one are reported as executed.
        hits: admissions that found a prefix.
        hashes: whether the engine hashes, or the service.
    """

    loads = 20  # percent of admissions with tokens from outside

    def __init__(self, texts: Texts, memories: list[Memory], rng: Random, most_drafts: int = 0) -> None:
        self.spec, self.texts, self.memories = texts.spec, texts, memories
        self.rng, self.most_drafts = rng, most_drafts
        self.has_states = any(group.kind is GroupKind.MAMBA for group in self.spec.groups)
        self.hits = self.stays = 0
        self.digests: dict[tuple[str, str], list[bytes]] = {}
        self.hashes = self.ends_late = False
        self.begin()

    def begin(self) -> None:
        """A new life, without requests."""
        self.seq = self.executed_through = self.launched = 0
        self.requests: dict[int, Request] = {}
        self.tables = BlockTables(len(self.spec.groups))
        self.pending: list[Launch] = []
        self.failed: list[int] = []
        self.lost: dict[tuple[int, int], int] = {}  # lives that may have lost content: from which step on
        self.asked: dict[int, tuple[int, bool]] = {}
        self.luck: dict[int, tuple[bool, ...]] = {}
        self.known: dict[int, int] = {}
        self.late_ends: dict[int, list[tuple[int, End]]] = {}

    def take_answer(self, parts: list[Part], results: list[PartResult]) -> None:
        """Apply the answer of the step; its launch is pending from now on."""
        self._take(parts, results)
        self.failed = []

    def fail(self, first: int = 0) -> None:
        """The launch of a pending step, not before `first`, will never run; those behind it either fail too, or run
        without what was lost.
        """
        first = self.rng.randrange(first, len(self.pending))
        last = len(self.pending) if self._chance(50) else first + 1
        self.failed = [launch.seq for launch in self.pending[first:last]]
        del self.pending[first:last]
        for request in self.requests.values():
            request.checked = 0

    def note_launched(self) -> None:
        """The oldest pending launch has run."""
        self.pending.pop(0)
        self.launched = self.pending[0].seq - 1 if self.pending else self.seq

    # -- reading the answer ------------------------------------------------------------------------------------------

    def _take(self, parts: list[Part], results: list[PartResult]) -> None:
        rows: dict[int, Row] = {}
        for number, (part, result) in enumerate(zip(parts, results, strict=True)):
            self.tables.update(part, result)
            for slot, end in self.late_ends.get(number, ()):
                rows.pop(slot, None)
                self._ends_stay(slot)
                if end is End.FREE:
                    self.requests.pop(slot, None)
            for slot in result.preempted:
                rows.pop(slot, None)
                self._ends_stay(slot)
            for slot, granted in zip(part.run.slot, result.granted, strict=True):
                if granted:
                    rows[slot] = self._ran(slot, granted)
            admitted = zip(part.admit.slot, result.admit_status, result.admit_hit, result.admit_granted, strict=True)
            for row, (slot, status, hit, granted) in enumerate(admitted):
                if status == AdmitStatus.GRANTED:
                    rows[slot] = self._admitted(slot, hit, granted)
                    load = self.requests[slot].load
                    if load is not None:
                        load.after = result.admit_load_after[row] if result.admit_load_after else 0
        if self.failed:  # lives that have ended may have lost content to it, and get no further answers
            current = {request.life for request in self.requests.values() if not request.is_held}
            ended = {row.life for launch in self.pending for row in launch.rows} - current
            self.lost |= dict.fromkeys(ended - self.lost.keys(), min(self.failed))
        self.pending.append(Launch(self.seq, [result.orders for result in results], list(rows.values())))

    def lost_at(self, seq: int) -> set[tuple[int, int]]:
        """The lives whose launch of this step may read garbage."""
        return {life for life, since in self.lost.items() if since <= seq}

    def _ran(self, slot: int, granted: int) -> Row:
        request = self.requests[slot]
        assert request.truth is not None
        request.may_hold = False
        start, request.computed = request.computed, request.computed + granted
        request.has_run |= granted > 0
        row = self._planned(request, start, start, granted)
        if row.guesses or request.rows:
            request.rows.append(row)
        return row

    def _planned(self, request: Request, loaded: int, start: int, count: int) -> PlannedRow:
        slot = request.life[0]
        assert request.truth is not None
        return PlannedRow(
            request.life,
            request.script,
            "",
            start,
            loaded,
            self._tables(slot),
            truth=request.truth,
            count=count,
            known=self.known.get(slot, request.known),
            luck=self.luck.get(slot, ()),
            seq=self.seq,
            prompt=request.prompt,
        )

    def _admitted(self, slot: int, hit: int, granted: int) -> Row:
        request, (external, late) = self.requests[slot], self.asked[slot]
        start, tables = hit + external, self._tables(slot)
        self.hits += hit > 0
        request.running, request.computed, request.rows = True, start + granted, []
        request.truth, request.has_run = Truth(start, Left(tables, start, start), start), granted > 0
        if late:
            request.load, request.tables = self._transfer(tables, request.script, hit, start), tables
        row = self._planned(request, start if late else hit, start, granted)
        row.load = request.load
        if row.guesses:
            request.rows.append(row)
        return row

    def _ends_stay(self, slot: int) -> None:
        """The request loses its blocks; a transfer that writes to them continues."""
        request = self.requests.get(slot)
        if request is None:
            return
        self.stays += 1
        request.life, request.rows, request.truth = (slot, self.stays), [], None
        request.running, request.computed = False, 0

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _read_held(self, request: Request) -> None:
        """A transfer has read a held request's pages: they are still what they were."""
        assert request.tables is not None
        if request.truth is None or not request.checked:
            return
        end = min(request.truth.end, request.known, request.reached)
        for number, group in enumerate(self.spec.groups):
            if group.kind in SCRATCH:
                continue
            first = first_seen(group, request.reached) // group.block_size
            for index, block in list(enumerate(request.tables[number]))[first:]:
                stop = min((index + 1) * group.block_size, end)
                begin = index * group.block_size
                in_gap = begin >= request.prompt and begin + group.block_size <= request.reached - group.window
                if block and stop > begin and not (group.kind is GroupKind.R_SWA and in_gap):
                    self._check_held(request, number, block, stop)

    def _check_held(self, request: Request, number: int, block: int, end: int) -> None:
        for memory in self.memories:
            if not memory.holds(number, block, end, request.script[:end]):
                raise WrongPage(f"{request.life}: held block {block} holds {memory.pages.get(block)}")

    def _may_start(self, load: Transfer) -> bool:
        """Whether the transfer may write: `after` is executed on all ranks, and the orders of its step are done."""
        return self.launched >= load.after and self._has_obeyed(load.seq)

    def _may_end(self, request: Request) -> bool:
        """Whether the engine may say now that all of it came."""
        load = request.load
        return load is not None and load.after <= self.executed_through and self._may_start(load)

    def _has_obeyed(self, seq: int) -> bool:
        """Whether every rank has carried out the orders of a step."""
        return seq <= self.launched

    def _transfer(self, tables: list[list[int]], script: str, first: int, end: int) -> Transfer:
        return Transfer(self.memories, tables, script, first, end, 0, self.seq, first)

    def _end_load(self, request: Request) -> None:
        """The transfer has come to its end."""
        self._finish_load(request)
        request.load, request.tables, request.may_hold = None, None, True

    def _finish_load(self, request: Request) -> None:
        """The transfer writes what it has left."""
        assert request.load is not None
        request.load.write(request.load.end)

    def _busy_blocks(self) -> list[int]:
        """Blocks to which a load of an earlier engine life may write."""
        return []

    def _loads_over(self) -> list[int]:
        """Blocks of earlier engine lives to which nothing writes any more."""
        return []

    # -- small words -------------------------------------------------------------------------------------------------

    def _chance(self, percent: int) -> bool:
        return self.rng.randrange(100) < percent

    def _some(self, slots: list[int]) -> list[int]:
        return self.rng.sample(slots, self.rng.randint(0, len(slots)))

    def _unaligned(self) -> int:
        return int(RowFlag.UNALIGNED) if self.spec.align.block_size and self._chance(20) else 0

    def _tables(self, slot: int) -> list[list[int]]:
        return [list(table) for table in self.tables[slot]]

    def _is_running(self, slot: int) -> bool:
        return slot in self.requests and self.requests[slot].running

    def _is_launched(self, request: Request) -> bool:
        return not any(row.life == request.life for launch in self.pending for row in launch.rows)
