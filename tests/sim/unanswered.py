"""Launches without an answer: rows in the blocks that requests already have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from kvplane.base.groups import GroupKind, GroupSpec
from tests.core.page_memory import SCRATCH, Row
from tests.core.page_requests import LONGEST, Request


def rows_of(
    groups: Sequence[GroupSpec], requests: Sequence[Request], tables: Sequence[list[list[int]]], rng: Random
) -> list[Row]:
    """Some requests continue with their text; the blocks of one of them may be used for another text.

    `requests` are running, nothing writes their pages, and the pages hold their computed tokens; `tables` are theirs.
    """
    rows = list[Row]()
    for request, table in zip(requests, tables, strict=True):
        if rng.random() < 0.5:
            continue
        if rng.random() < 0.4 and _users(table, tables) == 1:
            text, start, left = "c" + "".join(rng.choices("ab", k=LONGEST - 1)), 0, None
        else:
            assert request.truth is not None
            text, start, left = request.script, request.truth.end, request.truth.left
        end = min(_room(groups, table, start), start + rng.choice([1, 4, 64]), len(text))
        if end > start:
            rows.append(Row(request.life, text, text[:end], start, start, table, left))
    return rows


def blocks_of(groups: Sequence[GroupSpec], rows: Sequence[Row]) -> list[int]:
    """Every block that these rows may write."""
    return sorted({block for row in rows for block in _written(groups, row)} - {0})


def _written(groups: Sequence[GroupSpec], row: Row) -> Iterator[int]:
    for group, table in zip(groups, row.tables, strict=True):
        first = 0 if group.kind in SCRATCH else row.start // group.block_size
        yield from table[first : (row.end - 1) // group.block_size + 1]


def _room(groups: Sequence[GroupSpec], tables: list[list[int]], start: int) -> int:
    """End of the longest launch from `start` in which every token has a block in every group."""
    end = start
    while all(_has_block(group, table, end) for group, table in zip(groups, tables, strict=True)):
        end += 1
    return end


def _has_block(group: GroupSpec, table: list[int], at: int) -> bool:
    index = at // group.block_size
    return group.kind is GroupKind.RING or (index < len(table) and table[index] != 0)


def _users(table: list[list[int]], tables: Sequence[list[list[int]]]) -> int:
    """Requests that share a block with it, itself included."""
    own = {block for blocks in table for block in blocks} - {0}
    return sum(any(not own.isdisjoint(blocks) for blocks in each) for each in tables)
