"""Resumes requests of an earlier engine life with the blocks that they had.

The engine sends these in an image (`Part.resume`): its running and held requests with their block tables.

    check    compares the whole image with the requests, the stamps of the memory, and the rules of every group
    apply    installs tables, references and counts; drops keys that do not match the content of their page

An accepted image cannot violate the invariants of the pool, whatever an engine sends: a block is in two tables only
where it is full and has the same prefix in both, and the memory of every rank has the same stamp for each block of the
image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvplane.base.stamps import Stamp
from kvplane.base.step import Part, Resume, Step
from kvplane_core.face.contents import Content
from kvplane_core.face.interface import MAX_SLOTS
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.face.reasons import NONE, Refusal
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.questions import RequestProgress
from kvplane_core.spec.split import SplitPool

_BY_ROW = ("computed", "launch_end", "num_prompt", "single_group_hit", "loading")
_LOADS, _LOADED = 1, 2  # values of Resume.loading
_Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """One running request of an image (the requests and block tables that an engine resumes)."""

    slot: int
    progress: RequestProgress
    single_group_hit: int
    is_zeroed: bool  # its new blocks were zeroed, or written by a load or a launch
    tables: list[list[int]]
    num_cached_blocks: Sequence[int | None]


class Resumption:
    """Checks and applies an image: the requests, with their block tables, that an engine resumes.

    The replica must not have allocated a block in this engine life.
    """

    def __init__(self, coordinator: Coordinator, shown: Sequence[int]) -> None:
        """`shown`: by block, the stamp (version of the content) that all ranks had when this engine life began; 0: they
        differ.
        """
        self._blocks = coordinator
        self._pool = coordinator.pool
        self._requests = coordinator.requests
        self._shown = shown
        self._taken = set[int]()  # blocks of the image that was applied

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self, step: Step) -> None:
        """Raise InvalidArgument, naming the column at fault, if the image cannot be accepted. Changes nothing."""
        (part, *others) = step.parts
        alone = not others and step.part == 0 and step.last and replace(part, resume=None) == Part()
        self._require(alone and part.resume is not None, "image alone", "parts", part=NONE)
        assert part.resume is not None
        pool, resume = self._pool, part.resume
        self._require(pool.is_unused and not self._requests.num_running, "image late", "slot")
        self._require(len(self._shown) == pool.num_blocks, "no stamps", "blocks")
        names = self._check_tables(resume)
        held = self._check_held(resume, names)
        blocks = {*names, *held}
        stamps = self._check_stamps(blocks)
        late = min(self._busy_for_others(resume), default=NULL_BLOCK)
        self._require(late == NULL_BLOCK, "load may write", "loading", late)
        if isinstance(pool, SplitPool):
            self._check_superblocks(pool, names, held)
        kept = (pool.stamp[block] for block in pool.keyed() if block not in blocks)
        self._require(stamps.isdisjoint(kept), "two stamps", "blocks")

    def _check_tables(self, resume: Resume) -> dict[int, _Name]:
        """Check the tables; returns a name for the content of each block: blocks with equal names must have equal
        content.
        """
        self._check_columns(resume)
        names: dict[int, _Name] = {}
        for row in self._rows(resume):
            for manager, table in zip(self._blocks.managers, row.tables, strict=True):
                where = row.slot, manager.group
                normalized = manager.normalize_table(table, row.progress)
                self._require(normalized is not None, "image lacks", "blocks", *where, row.progress.computed)
                assert normalized is not None
                used = [block for block in normalized if block != NULL_BLOCK]
                self._require(len(set(used)) == len(used), "block twice", "blocks", *where)
                for index, block in enumerate(normalized):
                    if block != NULL_BLOCK:
                        name = self._name(manager, row, index)
                        same = names.setdefault(block, name) == name
                        self._require(same, "other content", "blocks", block, *where)
        self._check_ids(list(names), "blocks")
        return names

    def _check_columns(self, resume: Resume) -> None:
        rows, requests, require = len(resume.slot), self._requests, self._require
        longest = self._blocks.spec.max_model_len
        require(len(set(resume.slot)) == rows, "slot twice", "slot")
        for name in _BY_ROW:
            column = getattr(resume, name)
            given = len(column) == rows or (not column and name != "computed")
            require(given, "row count", name, len(column), rows)
        require({0, _LOADS, _LOADED}.issuperset(resume.loading), "loading value", "loading")
        counts, registered = resume.num_blocks, resume.num_cached_blocks
        sizes = len(counts) == rows * len(self._blocks.managers) and min(counts, default=0) >= 0
        require(sizes, "table count", "num_blocks", len(counts))
        sizes = len(registered) in (0, len(counts)) and min(registered, default=0) >= 0
        require(sizes, "table count", "num_cached_blocks", len(registered))
        require(sum(counts) == len(resume.blocks), "block count", "blocks", len(resume.blocks), sum(counts))
        for slot in resume.slot:
            waits = requests.is_live(slot) and not requests.held[slot]
            require(waits and bool(requests.num_tokens[slot]), "not waiting", "slot", slot)
        for row in self._rows(resume):
            at, num_tokens, single = row.progress, requests.num_tokens[row.slot], row.single_group_hit
            computed, launch_end, num_prompt = at.computed, at.launch_end, at.num_prompt
            require(1 <= computed <= longest, "image computed", "computed", computed, longest)
            fits = computed <= launch_end <= longest
            require(fits, "image launch", "launch_end", launch_end, computed, longest)
            require(1 <= num_prompt <= num_tokens, "image prompt", "num_prompt", num_prompt, num_tokens)
            require(0 <= single <= longest, "image single", "single_group_hit", single, longest)

    def _check_held(self, resume: Resume, names: dict[int, _Name]) -> list[int]:
        slots, counts, require = resume.held_slot, resume.held_count, self._require
        taken = set(resume.slot)
        require(len(set(slots)) == len(slots) and not taken & set(slots), "slot twice", "held_slot")
        require(len(counts) == len(slots), "held count", "held_count", len(counts), len(slots))
        loading = len(resume.held_loading)
        require(loading in (0, len(slots)), "held count", "held_loading", loading, len(slots))
        total = sum(counts) == len(resume.held_blocks) and min(counts, default=0) >= 0
        require(total, "held sum", "held_blocks", len(resume.held_blocks), sum(counts))
        for slot, blocks, _ in _held(resume):
            require(0 <= slot < MAX_SLOTS, "no slot", "held_slot", slot)
            require(len(set(blocks)) == len(blocks), "held twice", "held_blocks", slot)
            for block in blocks:
                shared = block not in names or names[block][0] is not None
                require(shared, "written", "held_blocks", block)
        held = list(resume.held_blocks)
        self._check_ids(held, "held_blocks")
        return held

    def _check_ids(self, blocks: list[int], column: str) -> None:
        within = not blocks or 0 < min(blocks) <= max(blocks) < self._pool.num_blocks
        self._require(within and not set(blocks) & set(self._pool.reserved), "no block", column)

    def _check_stamps(self, blocks: set[int]) -> set[int]:
        """Check and return the stamps of these blocks.

        Every block must have, on all ranks, the same stamp of an earlier engine life (epoch), and no other block may
        have this stamp.
        """
        epoch, shown = self._pool.epoch, self._shown
        stamps = {shown[block] for block in blocks}
        proven = 0 not in stamps and all(Stamp.unpack(stamp).epoch < epoch for stamp in stamps)
        self._require(proven, "unproven", "blocks")
        self._require(len(stamps) == len(blocks), "two stamps", "blocks")
        return stamps

    def _check_superblocks(self, pool: SplitPool, names: dict[int, _Name], held: Sequence[int]) -> None:
        """Check that states begin their superblocks, and that no other block of these is in use."""
        states = {block for block, (_, group, *_) in names.items() if group in pool.state_groups}
        aligned = all(block % pool.size == 0 for block in states)
        self._require(aligned, "state inside", "blocks", pool.size)
        others = {block // pool.size for block in {*names, *held, *pool.busy} - states}
        shared = {block for block in states if block // pool.size in others}
        self._require(not shared, "state shared", "blocks", min(shared, default=0))

    def _require(self, holds: bool, reason: str, column: str, *values: int, part: int = 0) -> None:
        if not holds:
            field = column if part == NONE else f"resume.{column}"
            raise Refusal(reason, part, field, NONE, values).error(self._blocks.spec, Part())

    def _name(self, manager: GroupManager, row: _Row, index: int) -> _Name:
        """Return a name for the content of a table entry: equal names mean equal content.

        A block that requests may share is named by its prefix; any other entry gets a name that no other entry has.
        """
        digest = manager.sealed_prefix(row.slot, index, row.progress)
        domain = self._requests.domain[row.slot]
        return (digest, manager.group, domain) if digest else (None, manager.group, row.slot, index)

    def _busy_for_others(self, resume: Resume) -> set[int]:
        """Return blocks of the image that a load of an earlier engine life (epoch) may write, though the image does not
        mark their request as loading.
        """
        found = set[int]()
        for row in self._rows(resume) if self._pool.busy else ():
            if not row.progress.loading:
                for manager, table in zip(self._blocks.managers, row.tables, strict=True):
                    found.update(manager.normalize_table(table, row.progress) or ())
        for slot, blocks, loading in _held(resume):
            if not (loading or self._requests.is_live(slot)):
                found.update(blocks)
        return found & self._pool.busy

    def _rows(self, resume: Resume) -> Iterator[_Row]:
        groups = len(self._blocks.managers)
        ends = pairwise(accumulate(resume.num_blocks, initial=0))
        tables = [list(resume.blocks[start:end]) for start, end in ends]
        for number, slot in enumerate(resume.slot):
            computed, num_tokens = resume.computed[number], self._requests.num_tokens[slot]
            loading = resume.loading[number] if resume.loading else 0
            yield _Row(
                slot,
                RequestProgress(
                    computed,
                    resume.launch_end[number] if resume.launch_end else computed,
                    resume.num_prompt[number] if resume.num_prompt else num_tokens,
                    loading == _LOADS,
                ),
                resume.single_group_hit[number] if resume.single_group_hit else 0,
                loading == 0,
                tables[number * groups : (number + 1) * groups],
                resume.num_cached_blocks[number * groups : (number + 1) * groups] or [None] * groups,
            )

    # -- apply -------------------------------------------------------------------------------------------------------

    def apply(self, resume: Resume, tracker: InFlightTracker) -> None:
        """Apply an image that passed `check`."""
        for row in self._rows(resume):
            self._resume(row)
        for slot, blocks, loading in _held(resume):
            self._hold(slot, blocks, loading)
            tracker.held[slot] = list(blocks)
        self._forget_others()

    def _resume(self, row: _Row) -> None:
        slot, requests, progress = row.slot, self._requests, row.progress
        requests.start(slot)
        requests.computed[slot], requests.ends_at[slot] = progress.computed, progress.launch_end
        requests.num_prompt[slot], requests.single_group_hit[slot] = progress.num_prompt, row.single_group_hit
        if row.progress.loading:
            requests.loading.add(slot)
        if not row.is_zeroed:
            requests.not_zeroed.add(slot)
        for manager, table, num_cached in zip(self._blocks.managers, row.tables, row.num_cached_blocks, strict=True):
            normalized = manager.normalize_table(table, progress)
            assert normalized is not None, f"slot {slot} was not checked"
            if isinstance(self._pool, SplitPool):
                self._pool.assign(normalized, manager.group in self._pool.state_groups)
            self._take(normalized)
            manager.resume(slot, normalized, progress, num_cached)

    def _hold(self, slot: int, blocks: list[int], loading: bool) -> None:
        requests = self._requests
        if not requests.is_live(slot):
            requests.add(slot, 0, 0, Content([]))
            self._blocks.grow(slot)
            requests.held[slot] = True
        if loading or not requests.held[slot]:
            requests.loading.add(slot)
        if isinstance(self._pool, SplitPool):
            self._pool.assume(blocks)
        self._take(blocks)

    def _take(self, blocks: Sequence[int]) -> None:
        pool = self._pool
        pool.touch(blocks)
        pool.release_busy(sorted(pool.busy.intersection(blocks)))  # this request's load may write them
        self._taken.update(set(blocks) - {NULL_BLOCK})
        for block in blocks:
            if block != NULL_BLOCK and Stamp.unpack(pool.stamp[block]).epoch != pool.epoch:  # not restamped since
                pool.stamp[block] = self._shown[block]

    def _forget_others(self) -> None:
        """Remove the stamps of the image from all other blocks, which have no keys.

        Two services may have begun one epoch, and the memory obeyed the other one: a stamp that this pool gave to one
        block is then the stamp of another block in the memory.
        """
        stamps, pool = {self._shown[block] for block in self._taken}, self._pool
        for block, stamp in enumerate(pool.stamp):
            if stamp in stamps and block not in self._taken:
                pool.stamp[block] = 0


def _held(resume: Resume) -> Iterator[tuple[int, list[int], bool]]:
    """Yield each held slot, its blocks, and whether a load may still write them."""
    start = 0
    loading = resume.held_loading or [0] * len(resume.held_slot)
    for slot, count, loads in zip(resume.held_slot, resume.held_count, loading, strict=True):
        yield slot, list(resume.held_blocks[start : start + count]), bool(loads)
        start += count
