"""Page memory that remembers what was written into it: an independent picture of what ranks do with a step.

What a layer writes for a token depends on every token before it, so a slot of an attention page holds a *prefix*: the
text up to and with its token. A draft layer also reads the token behind (EAGLE), so its slot holds one token more. A
recurrent state is the prefix that it was computed over. Content is compared by these texts; None is garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvplane.base.checkpoints import CheckpointRule
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.step import Orders

SCRATCH = (GroupKind.MAMBA, GroupKind.RING, GroupKind.CROSS)  # no slot per token


class WrongPage(AssertionError):
    """A launch read, or a key names, a page that holds something else."""


@dataclass
class Page:
    """The content of one block: slots of the group that wrote it last."""

    group: int
    slots: list[str | None]


@dataclass(frozen=True)
class Left:
    """Where a launch left its states: the last one in the block of its last token, those before it right behind.

    Attributes:
        tables: as the launch saw them.
        end: length of its last state.
        planned: the plan by the answer, which determines the block that has the state.
    """

    tables: list[list[int]]
    end: int
    planned: int

    def block(self, number: int, block_size: int, length: int) -> int:
        """The block of the state of this length in a group."""
        table, index = self.tables[number], (self.planned - 1) // block_size + self.end - length
        return table[index] if 0 <= index < len(table) else 0


@dataclass
class Row:
    """The tokens that one request computes in one launch: tokens [start, end) of a text that may end in drafts.

    Attributes:
        life: (slot, stay): who.
        script: all that the request will ever say; what is computed past a wrong draft is garbage.
        launched: the text that is computed, drafts included; as long as `end`.
        start: first token.
        loaded: tokens from here to `start` are loaded from outside before the launch.
        tables: per group, as the launch sees them.
        left: the block that has the state of `start` tokens.
        certain: tokens that are no drafts; behind them each length leaves a state.
        prompt: tokens of the prompt, which R-SWA reads in addition to the window.
    """

    life: tuple[int, int]
    script: str
    launched: str
    start: int
    loaded: int
    tables: list[list[int]]
    left: Left | None = None
    certain: int = 1 << 30
    planned: int = 0  # where it was to end by the answer; 0 = there
    planned_start: int = -1  # and to start; -1 = there
    is_lost: bool = False  # it may read garbage
    prompt: int = 1 << 30

    def reads(self, group: GroupSpec, at: int, begin: int) -> bool:
        """Whether the token at `begin` attends to this earlier one."""
        in_gap = self.prompt <= at <= begin - group.window
        return at >= first_seen(group, begin) and not (group.kind is GroupKind.R_SWA and in_gap)

    @property
    def end(self) -> int:
        return len(self.launched)

    @property
    def bounds(self) -> tuple[int, int]:
        """First token that the launch may compute, and the end of the last one."""
        return self.start, self.end

    def used_blocks(self, spec: ReplicaSpec) -> set[int]:
        """Blocks that the launch, and the load in front of it, may read or write."""
        used = set[int]()
        begin, stop = self.bounds
        for group, table in zip(spec.groups, self.tables, strict=True):
            size = group.block_size
            if group.kind in (GroupKind.RING, GroupKind.CROSS):
                used.update(table)
            elif group.kind is GroupKind.MAMBA:  # from the state before it up to those of its last drafts
                used.update(table[self.first_state(max(0, begin - 1), size) :])
            else:
                used.update(table[min(begin, self.loaded) // size : -(-stop // size)])
                used.update(Memory._block(table, at, group) for at in range(begin) if self.reads(group, at, begin))
        return used - {0}

    def first_state(self, last: int, block_size: int) -> int:
        """The index of the first block that may have a state which the launch reads, which ends with token `last`."""
        return last // block_size

    def resolve(self, lost: Container[tuple[int, int]]) -> None:
        """The launch begins, everything before it has run: what it computes is certain now."""


@dataclass
class Launch:
    """One step on its way to the ranks."""

    seq: int
    orders: list[Orders]
    rows: list[Row]


@dataclass
class Memory:
    """Pages by block id, and their stamp table. Moves pages as `kvplane.rank.PageMover` does."""

    spec: ReplicaSpec
    pages: dict[int, Page] = field(default_factory=dict)
    stamps: list[int] = field(default_factory=list)
    read: Callable[[int], None] = lambda block: None  # the oracle compared what this block holds

    def __post_init__(self) -> None:
        self.stamps = [0] * self.spec.num_stamps

    def run(self, launch: Launch, lost: set[tuple[int, int]]) -> None:
        """Carry out a step: orders, loads, then all rows together.

        Rows of `lost` lives may read garbage, and write garbage then. States are read before any is written; a row may
        attend to what an earlier row of the same launch writes, layer by layer, and no later row may spoil it.
        """
        for orders in launch.orders:
            self._obey(orders)
        for row in launch.rows:
            row.resolve(lost)
            self.load(row.tables, row.script, row.loaded, row.start)
        rows = [row for row in launch.rows if row.end > row.start]
        no_state = {
            row.life for row in rows if (wrong := self._wrong_state(row)) and self._must_be_lost(row, wrong, lost)
        }
        good = []
        for row in rows:
            wrong = self._wrong_token(row)
            if (wrong and self._must_be_lost(row, wrong, lost)) or row.life in no_state:
                self._write(row, good=False)
            else:
                self._write(row, good=True)
                good.append(row)
        for row in good:
            if wrong := self._wrong_token(row):
                raise WrongPage(wrong + ", spoilt by a later row")

    @property
    def num_groups(self) -> int:
        return len(self.spec.groups)

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Blank pages."""
        for block in blocks:
            self._overwrite(group, block)
            self.pages[block] = self._blank(group)

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Pages one after the other, whatever group they are of."""
        del group
        for source, target in zip(src, dst, strict=True):
            page = self.pages.get(source)
            self.pages.pop(target, None)
            if page is not None:
                self._overwrite(page.group, target)
                self.pages[target] = Page(page.group, list(page.slots))

    def moves(self) -> None:
        """Calls end before they return."""

    def load(self, tables: list[list[int]], script: str, first: int, end: int, is_last: bool = True) -> None:
        """A transfer writes: tokens [first, end) where the tables have blocks, and the state at the end."""
        for number, group in enumerate(self.spec.groups):
            if group.kind is GroupKind.MAMBA and end > first:
                block = tables[number][(end - 1) // group.block_size]
                if is_last:
                    self._put(number, block, 0, script[:end])
            if group.kind in SCRATCH:
                continue
            for at in range(first, end):
                block = self._block(tables[number], at, group)
                if block:
                    self._put(number, block, at % group.block_size, script[: at + 1 + _sees_ahead(group)])

    def holds(self, number: int, block: int, num_tokens: int, text: str) -> bool:
        """Whether the block holds what a request with `num_tokens` computed tokens needs of it: slots, or its state.

        The text may be longer, when more is known of what a draft layer has seen.
        """
        group, page = self.spec.groups[number], self.pages.get(block)
        self.read(block)
        if page is None or page.group != number:
            return False
        if group.kind is GroupKind.MAMBA:
            return page.slots[0] == text[:num_tokens]
        first = (num_tokens - 1) // group.block_size * group.block_size
        wanted = [text[: at + 1 + self._proven_ahead(group, at)] for at in range(first, num_tokens)]
        return all(got is not None and got.startswith(want) for want, got in zip(wanted, page.slots, strict=False))

    # -- the parts of a launch ---------------------------------------------------------------------------------------

    def _obey(self, orders: Orders) -> None:
        self.stamp(orders)
        self.move(orders)

    def stamp(self, orders: Orders) -> None:
        """Write stamps: as early as the order of steps allows."""
        for block, stamp in zip(orders.stamp_block, orders.stamp, strict=True):
            self.stamps[block] = stamp

    def move(self, orders: Orders) -> None:
        """Zeroes, then copies; behind every launch of an earlier step."""
        for block, group in zip(orders.zero_block, orders.zero_group, strict=True):
            self.zero(group, [block])
        self.copy(0, orders.copy_src, orders.copy_dst)

    @staticmethod
    def _must_be_lost(row: Row, wrong: str, lost: set[tuple[int, int]]) -> bool:
        if row.life not in lost and not row.is_lost:
            raise WrongPage(wrong)
        return True

    def _wrong_state(self, row: Row) -> str:
        if row.start == 0:
            return ""
        left = row.left or Left(row.tables, row.start, row.start)
        for number, group in enumerate(self.spec.groups):
            if group.kind is GroupKind.MAMBA:
                block = left.block(number, group.block_size, row.start)
                if not self.holds(number, block, row.start, row.script):
                    return f"{row.life}: group {number}, block {block}: {self.pages.get(block)}, not state {row.start}"
        return ""

    def _wrong_token(self, row: Row) -> str:
        for number, group in enumerate(self.spec.groups):
            if group.kind in SCRATCH:
                continue
            for at in (at for at in range(row.start) if row.reads(group, at, row.start)):
                block = self._block(row.tables[number], at, group)
                page = self.pages.get(block)
                self.read(block)
                want = row.script[: at + 1 + self._proven_ahead(group, at)]
                got = page.slots[at % group.block_size] if page and page.group == number else None
                if block == 0 or got is None or not got.startswith(want):
                    return f"{row.life}: group {number}, token {at}, block {block}: {got!r}, not {want!r}"
        return ""

    def _write(self, row: Row, good: bool) -> None:
        for number, group in enumerate(self.spec.groups):
            if group.kind is GroupKind.MAMBA:
                self._write_states(number, group, row, good)
            elif group.kind not in SCRATCH:
                self._write_attention(number, group, row, good)

    def _write_states(self, number: int, group: GroupSpec, row: Row, good: bool) -> None:
        left = Left(row.tables, row.end, row.planned or row.end)
        for length in range(row.end, max(row.start, min(row.certain, row.end) - 1), -1):
            self._put(number, left.block(number, group.block_size, length), 0, row.launched[:length] if good else None)
        rule, as_planned = CheckpointRule.of(self.spec, group), row.planned_start in (-1, row.start)
        start = row.start if as_planned else row.planned_start
        position, index = rule.position(start, left.planned), rule.index(left.planned)
        block = row.tables[number][index] if position and index < len(row.tables[number]) else 0
        if block:
            self._put(number, block, 0, row.launched[:position] if good and as_planned else None)

    def _write_attention(self, number: int, group: GroupSpec, row: Row, good: bool) -> None:
        for at in range(row.start, row.end):
            right = row.launched[: at + 1] == row.script[: at + 1]
            text = row.script[: at + 1 + _sees_ahead(group)] if right else row.launched[: at + 1] + "?"
            block = self._block(row.tables[number], at, group)
            self._put(number, block, at % group.block_size, text if good else None)

    def _proven_ahead(self, group: GroupSpec, at: int) -> int:
        """Tokens behind this one that a draft layer must have seen. What follows a block, or where hits end inside
        blocks a hash block, is in its hash only if hashes look ahead; without, the draft for that one token is a worse
        guess, and is verified as any draft is.
        """
        unit = self.spec.hash_block_size if self.spec.partial_hits else group.block_size
        ends_hit = (at + 1) % unit == 0
        return 0 if ends_hit and self.spec.hash_lookahead_tokens == 0 else _sees_ahead(group)

    # -- small words -------------------------------------------------------------------------------------------------

    def _blank(self, number: int) -> Page:
        group = self.spec.groups[number]
        return Page(number, [None] * (1 if group.kind is GroupKind.MAMBA else group.block_size))

    def _overwrite(self, number: int, block: int) -> None:
        """A state and the blocks of its superblock have the same memory: what is written last remains."""
        size, states = self.spec.blocks_per_state, (GroupKind.MAMBA,)
        first = block - block % size
        if self.spec.groups[number].kind in states:
            for other in range(first + 1, first + size):
                self.pages.pop(other, None)
        elif first in self.pages and self.spec.groups[self.pages[first].group].kind in states:
            del self.pages[first]

    def _put(self, number: int, block: int, slot: int, text: str | None) -> None:
        if block == 0 and text is None:
            return  # a life that lost something may have no block there any more
        if block == 0:
            raise WrongPage(f"group {number} writes the null block")
        self._overwrite(number, block)
        page = self.pages.get(block)
        if page is None or page.group != number:
            page = self.pages[block] = self._blank(number)
        page.slots[slot] = text

    @staticmethod
    def _block(table: list[int], at: int, group: GroupSpec) -> int:
        index = at // group.block_size
        return table[index] if index < len(table) else 0


def _sees_ahead(group: GroupSpec) -> int:
    return int(group.is_draft)


def first_seen(group: GroupSpec, at: int) -> int:
    """First token that the token at this position attends to."""
    if group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA):
        return max(0, at - group.window + 1)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return at // group.chunk * group.chunk
    return 0
