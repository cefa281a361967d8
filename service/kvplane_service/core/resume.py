"""Resumes requests of an earlier engine life (time of one epoch) with the blocks that they had.

The engine sends these in an image (`Part.resume`): its running and held requests with their block tables.

    check    compares the whole image with the requests, the stamps of the memory, and the rules of every group
    apply    installs tables, references and counts; drops keys that do not match the content of their page

An accepted image cannot violate the invariants of the pool, whatever an engine sends: a block is in two tables only
where it is full and has the same prefix in both, and the memory of every rank has the same stamp (version number of the
content) for each block of the image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvplane.base.errors import InvalidArgument
from kvplane.base.stamps import Stamp
from kvplane.base.step import Part, Resume, Step
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.dropping import any_key_has
from kvplane_service.core.in_flight import InFlightTracker
from kvplane_service.core.keys import NULL_BLOCK
from kvplane_service.core.managers.base import GroupManager
from kvplane_service.core.managers.questions import RequestProgress
from kvplane_service.core.requests import MAX_SLOTS, Content
from kvplane_service.core.split import SplitPool

_BY_ROW = ("computed", "launch_end", "num_prompt", "single_group_hit", "loading")
_LOADS, _LOADED = 1, 2  # values of Resume.loading
_TWO_STAMPS = "two blocks have the same stamp, which proves neither content"
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


@dataclass(frozen=True, slots=True)
class ImagePool:
    """What a check of an image reads of the pool; `is_unused`: no request holds a block."""

    num_blocks: int
    epoch: int
    reserved: Collection[int]
    busy: Set[int]
    is_unused: bool


class Resumption:
    """Checks and applies an image: the requests, with their block tables, that an engine resumes.

    The replica must not have allocated a block in this engine life (the time of one epoch).
    """

    def __init__(self, coordinator: Coordinator, shown: Sequence[int], pool: ImagePool | None = None) -> None:
        """`shown`: by block, the stamp (version of the content) that all ranks had when this engine life began; 0: they
        differ. `pool`: of `check_requests`, where the coordinator has no state of blocks.
        """
        self._blocks = coordinator
        own = self._pool = coordinator.pool
        self._image_pool = pool or ImagePool(own.num_blocks, own.epoch, own.reserved, own.busy, own.is_unused)
        self._requests = coordinator.requests
        self._shown = shown

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self, step: Step) -> None:
        """Raise InvalidArgument, naming the column at fault, if the image cannot be accepted. Changes nothing."""
        names, held = self.check_requests(step)
        if isinstance(self._pool, SplitPool):
            self._check_superblocks(self._pool, names, held)
        blocks = {*names, *held}
        stamps = {self._shown[block] for block in blocks}
        _require(not any_key_has(self._pool, stamps, blocks), "blocks", _TWO_STAMPS)

    def check_requests(self, step: Step) -> tuple[dict[int, _Name], list[int]]:
        """Check all of an image but for other blocks of the pool; returns names for the contents of its blocks, and
        those that are held. Raises as `check`.
        """
        (part, *others) = step.parts
        alone = not others and step.part == 0 and step.last and replace(part, resume=None) == Part()
        _require(alone and part.resume is not None, "parts", "an image is alone in its step, behind its requests")
        assert part.resume is not None
        pool, resume = self._image_pool, part.resume
        _require(
            pool.is_unused and not self._requests.num_running,
            "slot",
            "this engine life has allocated blocks already: an image must come first",
        )
        _require(len(self._shown) == pool.num_blocks, "blocks", "the session was opened without a stamp table")
        names = self._check_tables(resume)
        held = self._check_held(resume, names)
        self._check_stamps({*names, *held})
        late = min(self._busy_for_others(resume), default=NULL_BLOCK)
        _require(late == NULL_BLOCK, "loading", f"a load may still write block {late}; mark its request as loading")
        return names, held

    def _check_tables(self, resume: Resume) -> dict[int, _Name]:
        """Check the tables; returns a name for the content of each block: blocks with equal names must have equal
        content.
        """
        self._check_columns(resume)
        names: dict[int, _Name] = {}
        for row in self._rows(resume):
            for manager, table in zip(self._blocks.managers, row.tables, strict=True):
                where = f"the table of slot {row.slot} in group {manager.group}"
                normalized = manager.normalize_table(table, row.progress)
                if normalized is None:
                    raise _refused("blocks", f"{where} lacks a block that {row.progress.computed} tokens need")
                used = [block for block in normalized if block != NULL_BLOCK]
                _require(len(set(used)) == len(used), "blocks", f"{where} has a block twice")
                for index, block in enumerate(normalized):
                    if block != NULL_BLOCK:
                        name = self._name(manager, row, index)
                        same = names.setdefault(block, name) == name
                        _require(same, "blocks", f"block {block} of {where} has other content in another table")
        self._check_ids(list(names), "blocks")
        return names

    def _check_columns(self, resume: Resume) -> None:
        rows, requests, longest = len(resume.slot), self._requests, self._blocks.spec.max_model_len
        _require(len(set(resume.slot)) == rows, "slot", "a slot is listed twice")
        for name in _BY_ROW:
            column = getattr(resume, name)
            given = len(column) == rows or (not column and name != "computed")
            _require(given, name, f"{len(column)} entries for {rows} rows, expected one per row")
        known = {0, _LOADS, _LOADED}.issuperset(resume.loading)
        _require(known, "loading", "a value is not 0, 1 (a load writes) or 2 (it is over, no grant since)")
        sizes = len(resume.num_blocks) == rows * len(self._blocks.managers)
        _require(
            sizes and min(resume.num_blocks, default=0) >= 0,
            "num_blocks",
            f"expected one entry of at least 0 per row and group, found {len(resume.num_blocks)} entries",
        )
        given = (
            len(resume.num_cached_blocks) in (0, len(resume.num_blocks))
            and min(resume.num_cached_blocks, default=0) >= 0
        )
        _require(
            given,
            "num_cached_blocks",
            f"expected one entry of at least 0 per row and group, found {len(resume.num_cached_blocks)} entries",
        )
        _require(
            sum(resume.num_blocks) == len(resume.blocks),
            "blocks",
            f"{len(resume.blocks)} blocks, num_blocks adds up to {sum(resume.num_blocks)}",
        )
        for slot in resume.slot:
            waits = requests.is_live(slot) and not requests.held[slot]
            _require(waits and bool(requests.num_tokens[slot]), "slot", f"slot {slot} has no waiting request")
        for row in self._rows(resume):
            at, num_tokens = row.progress, requests.num_tokens[row.slot]
            _require(1 <= at.computed <= longest, "computed", f"{at.computed} tokens are not 1 to {longest}")
            _require(
                at.computed <= at.launch_end <= longest,
                "launch_end",
                f"{at.launch_end} tokens are not {at.computed} (computed) to {longest} (max_model_len)",
            )
            _require(
                1 <= at.num_prompt <= num_tokens,
                "num_prompt",
                f"{at.num_prompt} tokens are not 1 to {num_tokens}, the tokens of the request",
            )
            _require(
                0 <= row.single_group_hit <= longest,
                "single_group_hit",
                f"{row.single_group_hit} tokens are not 0 to {longest} (max_model_len)",
            )

    def _check_held(self, resume: Resume, names: dict[int, _Name]) -> list[int]:
        slots, counts = resume.held_slot, resume.held_count
        taken = set(resume.slot)
        _require(len(set(slots)) == len(slots) and not taken & set(slots), "held_slot", "a slot is listed twice")
        _require(len(counts) == len(slots), "held_count", f"{len(counts)} entries for {len(slots)} held slots")
        loading = len(resume.held_loading) in (0, len(slots))
        _require(loading, "held_loading", f"{len(resume.held_loading)} entries for {len(slots)} held slots")
        total = sum(counts) == len(resume.held_blocks) and min(counts, default=0) >= 0
        _require(total, "held_blocks", f"{len(resume.held_blocks)} blocks, held_count adds up to {sum(counts)}")
        for slot, blocks, _ in _held(resume):
            _require(0 <= slot < MAX_SLOTS, "held_slot", f"there is no slot {slot}")
            _require(len(set(blocks)) == len(blocks), "held_blocks", f"slot {slot} lists a block twice")
            for block in blocks:
                shared = block not in names or names[block][0] is not None
                _require(shared, "held_blocks", f"a running request writes block {block}")
        blocks = list(resume.held_blocks)
        self._check_ids(blocks, "held_blocks")
        return blocks

    def _check_ids(self, blocks: list[int], column: str) -> None:
        within = not blocks or 0 < min(blocks) <= max(blocks) < self._image_pool.num_blocks
        _require(
            within and not set(blocks) & set(self._image_pool.reserved),
            column,
            "a block is the null block, reserved, or not in the pool",
        )

    def _check_stamps(self, blocks: set[int]) -> None:
        """Check the stamps (version numbers of contents) of these blocks.

        Every block must have, on all ranks, the same stamp of an earlier engine life (epoch), and no other block may
        have this stamp.
        """
        epoch, shown = self._image_pool.epoch, self._shown
        stamps = {shown[block] for block in blocks}
        proven = 0 not in stamps and all(Stamp.unpack(stamp).epoch < epoch for stamp in stamps)
        _require(proven, "blocks", "a block has no stamp of an earlier life that all ranks agree on")
        _require(len(stamps) == len(blocks), "blocks", _TWO_STAMPS)

    def _check_superblocks(self, pool: SplitPool, names: dict[int, _Name], held: Sequence[int]) -> None:
        """Check that states begin their superblocks, and that no other block of these is in use."""
        states = {block for block, (_, group, *_) in names.items() if group in pool.state_groups}
        aligned = all(block % pool.size == 0 for block in states)
        _require(aligned, "blocks", f"a state is at a block that is no multiple of {pool.size}")
        others = {block // pool.size for block in {*names, *held, *pool.busy} - states}
        shared = {block for block in states if block // pool.size in others}
        _require(not shared, "blocks", f"another block in use has memory of state {min(shared, default=0)}")

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
        for row in self._rows(resume) if self._image_pool.busy else ():
            if not row.progress.loading:
                for manager, table in zip(self._blocks.managers, row.tables, strict=True):
                    found.update(manager.normalize_table(table, row.progress) or ())
        for slot, blocks, loading in _held(resume):
            if not (loading or self._requests.is_live(slot)):
                found.update(blocks)
        return found & self._image_pool.busy

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
        requests.invalidate_fast_path(slot)

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
        for block in blocks:
            if block != NULL_BLOCK and Stamp.unpack(pool.stamp[block]).epoch != pool.epoch:  # not restamped since
                pool.stamp[block] = self._shown[block]


def _held(resume: Resume) -> Iterator[tuple[int, list[int], bool]]:
    """Yield each held slot, its blocks, and whether a load may still write them."""
    start = 0
    loading = resume.held_loading or [0] * len(resume.held_slot)
    for slot, count, loads in zip(resume.held_slot, resume.held_count, loading, strict=True):
        yield slot, list(resume.held_blocks[start : start + count]), bool(loads)
        start += count


def _require(holds: bool, column: str, message: str) -> None:
    if not holds:
        raise _refused(column, message)


def _refused(column: str, message: str) -> InvalidArgument:
    field = column if column == "parts" else f"parts[0].resume.{column}"
    return InvalidArgument(message, field=field, remedy="leave resume out; the requests are preempted then")
