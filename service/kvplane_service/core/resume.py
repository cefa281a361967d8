"""Takes back what held blocks in an engine life before, so that requests run on with the blocks that they have.

    check    the whole image against the requests, the stamps that the memory showed, and the rules of every group
    apply    tables, references, counts; a key that does not name what its page holds by this image is dropped

Whatever an image says, the invariants hold behind it: a block stands in two tables only where it is full and names the
same prefix in both, and no page without a proven stamp is anybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvplane.base.errors import InvalidArgument
from kvplane.base.stamps import Stamp
from kvplane.base.step import Part, Resume, Step
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.dropping import any_key_has
from kvplane_service.core.keys import NULL_BLOCK
from kvplane_service.core.ledger import Ledger
from kvplane_service.core.managers.base import GroupManager, Standing
from kvplane_service.core.requests import MAX_SLOTS, Content

_BY_ROW = ("computed", "launch_end", "num_prompt", "single_group_hit", "loading")
_Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """One running request."""

    slot: int
    standing: Standing
    single_group_hit: int
    loading: bool
    tables: list[list[int]]
    settled: list[int]


class Resumption:
    """One image on a replica that has given out no block in this engine life."""

    def __init__(self, coordinator: Coordinator, ledger: Ledger, shown: Sequence[int]) -> None:
        """`shown`: one stamp per block, as the memory of every rank showed it when this life began."""
        self._blocks = coordinator
        self._pool = coordinator.pool
        self._requests = coordinator.requests
        self._ledger = ledger
        self._shown = shown

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self, step: Step) -> None:
        """Raise InvalidArgument naming the column at fault; changes nothing."""
        (part, *others) = step.parts
        alone = not others and step.part == 0 and step.last and replace(part, resume=None) == Part()
        _require(alone and part.resume is not None, "parts", "an image stands alone in its step")
        assert part.resume is not None
        pool, resume = self._pool, part.resume
        _require(
            pool.is_unused and not self._requests.num_running, "slot", "this engine life has given out blocks already"
        )
        _require(len(self._shown) == pool.num_blocks, "blocks", "this engine life was opened without stamps")
        names = self._check_tables(resume)
        held = self._check_held(resume, names)
        self._check_stamps({*names, *held})
        late = min(self._busy_for_others(resume), default=NULL_BLOCK)
        _require(late == NULL_BLOCK, "loading", f"a load may still write block {late} of a request that does not load")

    def _check_tables(self, resume: Resume) -> dict[int, _Name]:
        """What each block of a table holds, by its owners' word; equal names are equal content."""
        self._check_columns(resume)
        names: dict[int, _Name] = {}
        for row in self._rows(resume):
            for manager, table in zip(self._blocks.managers, row.tables, strict=True):
                where = f"the table of slot {row.slot} in group {manager.group}"
                settled = manager.settle(table, row.standing)
                if settled is None:
                    raise _refused("blocks", f"{where} does not hold what {row.standing.computed} tokens need")
                used = [block for block in settled if block != NULL_BLOCK]
                _require(len(set(used)) == len(used), "blocks", f"{where} has a block twice")
                for index, block in enumerate(settled):
                    if block != NULL_BLOCK:
                        name = self._name(manager, row, index)
                        same = names.setdefault(block, name) == name
                        _require(same, "blocks", f"block {block} of {where} belongs to another one")
        self._check_ids(list(names), "blocks")
        return names

    def _check_columns(self, resume: Resume) -> None:
        rows, requests, longest = len(resume.slot), self._requests, self._blocks.spec.max_model_len
        _require(len(set(resume.slot)) == rows, "slot", "a slot stands twice")
        for name in _BY_ROW:
            column = getattr(resume, name)
            given = len(column) == rows or (not column and name != "computed")
            _require(given, name, f"not one entry for {rows} rows")
        sizes = len(resume.num_blocks) == rows * len(self._blocks.managers)
        _require(sizes and min(resume.num_blocks, default=0) >= 0, "num_blocks", "not one entry per row and group")
        cached = resume.num_cached_blocks
        counted = len(cached) in (0, len(resume.num_blocks)) and min(cached, default=0) >= 0
        _require(counted, "num_cached_blocks", "not one entry per row and group")
        _require(sum(resume.num_blocks) == len(resume.blocks), "blocks", "not as many as num_blocks adds up to")
        for slot in resume.slot:
            waits = requests.is_live(slot) and not requests.held[slot]
            _require(waits and bool(requests.num_tokens[slot]), "slot", f"slot {slot} names no request that waits")
        for row in self._rows(resume):
            at, num_tokens = row.standing, requests.num_tokens[row.slot]
            _require(1 <= at.computed <= longest, "computed", f"{at.computed} tokens")
            _require(at.computed <= at.launch_end <= longest, "launch_end", f"{at.launch_end} for {at.computed} tokens")
            _require(1 <= at.num_prompt <= num_tokens, "num_prompt", f"{at.num_prompt} of {num_tokens} tokens")
            alone = row.single_group_hit
            _require(0 <= alone <= num_tokens, "single_group_hit", f"{alone} of {num_tokens} tokens")

    def _check_held(self, resume: Resume, names: dict[int, _Name]) -> list[int]:
        slots, counts = resume.held_slot, resume.held_count
        taken = set(resume.slot)
        _require(len(set(slots)) == len(slots) and not taken & set(slots), "held_slot", "a slot stands twice")
        _require(len(counts) == len(slots), "held_count", f"not one entry for {len(slots)} rows")
        loading = len(resume.held_loading) in (0, len(slots))
        _require(loading, "held_loading", f"not one entry for {len(slots)} rows")
        total = sum(counts) == len(resume.held_blocks) and min(counts, default=0) >= 0
        _require(total, "held_blocks", "not as many as held_count adds up to")
        for slot, blocks, _ in _held(resume):
            _require(0 <= slot < MAX_SLOTS, "held_slot", f"there is no slot {slot}")
            _require(len(set(blocks)) == len(blocks), "held_blocks", f"slot {slot} holds a block twice")
            for block in blocks:
                shared = block not in names or names[block][0] is not None
                _require(shared, "held_blocks", f"a running request writes block {block}")
        self._check_ids(resume.held_blocks, "held_blocks")
        return resume.held_blocks

    def _check_ids(self, blocks: list[int], column: str) -> None:
        within = not blocks or 0 < min(blocks) <= max(blocks) < self._pool.num_blocks
        _require(within and not set(blocks) & set(self._pool.reserved), column, "a block that no request can have")

    def _check_stamps(self, blocks: set[int]) -> None:
        """Each page shows a stamp of an earlier life on every rank, and no two pages that count show the same."""
        pool, shown = self._pool, self._shown
        stamps = {shown[block] for block in blocks}
        proven = 0 not in stamps and all(Stamp.unpack(stamp).epoch < pool.epoch for stamp in stamps)
        _require(proven, "blocks", "the memory of some rank does not show the page of a block")
        single = len(stamps) == len(blocks) and not any_key_has(pool, stamps, blocks)
        _require(single, "blocks", "two pages show one stamp")

    def _name(self, manager: GroupManager, row: _Row, index: int) -> _Name:
        """What a table's entry holds: a prefix that others may share, or something of this request alone."""
        digest = manager.sealed_prefix(row.slot, index, row.standing)
        domain = self._requests.domain[row.slot]
        return (digest, manager.group, domain) if digest else (None, manager.group, row.slot, index)

    def _busy_for_others(self, resume: Resume) -> set[int]:
        """Blocks under a load of an earlier engine life that the image gives to who is not loading."""
        found = set[int]()
        for row in self._rows(resume) if self._pool.busy else ():
            if not row.loading:
                for manager, table in zip(self._blocks.managers, row.tables, strict=True):
                    found.update(manager.settle(table, row.standing) or ())
        for slot, blocks, loading in _held(resume):
            if not (loading or self._requests.is_live(slot)):
                found.update(blocks)
        return found & self._pool.busy

    def _rows(self, resume: Resume) -> Iterator[_Row]:
        groups = len(self._blocks.managers)
        ends = pairwise(accumulate(resume.num_blocks, initial=0))
        tables = [resume.blocks[start:end] for start, end in ends]
        for number, slot in enumerate(resume.slot):
            computed, num_tokens = resume.computed[number], self._requests.num_tokens[slot]
            yield _Row(
                slot,
                Standing(
                    computed,
                    resume.launch_end[number] if resume.launch_end else computed,
                    resume.num_prompt[number] if resume.num_prompt else num_tokens,
                ),
                resume.single_group_hit[number] if resume.single_group_hit else 0,
                bool(resume.loading and resume.loading[number]),
                tables[number * groups : (number + 1) * groups],
                resume.num_cached_blocks[number * groups : (number + 1) * groups] or [0] * groups,
            )

    # -- apply -------------------------------------------------------------------------------------------------------

    def apply(self, resume: Resume) -> None:
        """Make a checked image true."""
        for row in self._rows(resume):
            self._resume(row)
        for slot, blocks, loading in _held(resume):
            self._hold(slot, blocks, loading)

    def _resume(self, row: _Row) -> None:
        slot, requests, standing = row.slot, self._requests, row.standing
        requests.start(slot)
        requests.computed[slot], requests.ends_at[slot] = standing.computed, standing.launch_end
        requests.num_prompt[slot], requests.single_group_hit[slot] = standing.num_prompt, row.single_group_hit
        if row.loading:
            requests.loading.add(slot)
            requests.not_zeroed.add(slot)
        for manager, table, num_cached_blocks in zip(self._blocks.managers, row.tables, row.settled, strict=True):
            settled = manager.settle(table, standing)
            assert settled is not None, f"slot {slot} was not checked"
            self._take(settled)
            manager.resume(slot, settled, standing, num_cached_blocks)
        requests.wake(slot)

    def _hold(self, slot: int, blocks: list[int], loading: bool) -> None:
        requests = self._requests
        if not requests.is_live(slot):
            requests.add(slot, 0, 0, Content([]))
            self._blocks.grow(slot)
            requests.held[slot] = True
        if loading or not requests.held[slot]:
            requests.loading.add(slot)
        self._take(blocks)
        self._ledger.held[slot] = list(blocks)

    def _take(self, blocks: Sequence[int]) -> None:
        pool = self._pool
        pool.touch(blocks)
        pool.release_busy(sorted(pool.busy.intersection(blocks)))  # under the load of this request from now on
        for block in blocks:
            if block != NULL_BLOCK and Stamp.unpack(pool.stamp[block]).epoch != pool.epoch:  # not renewed since
                pool.stamp[block] = self._shown[block]


def _held(resume: Resume) -> Iterator[tuple[int, list[int], bool]]:
    """Slot, blocks, and whether it ended as held while a load filled these."""
    start = 0
    loading = resume.held_loading or [0] * len(resume.held_slot)
    for slot, count, loads in zip(resume.held_slot, resume.held_count, loading, strict=True):
        yield slot, resume.held_blocks[start : start + count], bool(loads)
        start += count


def _require(holds: bool, column: str, message: str) -> None:
    if not holds:
        raise _refused(column, message)


def _refused(column: str, message: str) -> InvalidArgument:
    field = column if column == "parts" else f"parts[0].resume.{column}"
    return InvalidArgument(message, field=field, remedy="let the requests be preempted instead, by leaving resume out")
