"""The generated types of sections are those that were written by hand, and say what the contract says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from kvplane.base import declined, prefetch, retain, sections, step
from kvplane.base.when_read import given_fields

BY_HAND: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(step.Facts, step.Cache, step.News, step.Resume, step.Run, step.Admit, step.Peek, step.Budget, step.Blocks),
        *(step.Orders, step.PartResult, prefetch.Prefetch, retain.Retain, declined.Declined, prefetch.Prefetched),
        retain.Retained,
    )
}
GENERATED: dict[str, Any] = {
    name: kind for name, kind in vars(sections).items() if getattr(kind, "__module__", "") == sections.__name__
}
OF_SERVICE = {"hashed_facts", "hashed_news", "taken_back", "went_back", "tier_events"}  # fields that are not sent


def shape(kind: Any) -> list[tuple[str, object, object]]:
    """Name, type and default of each field; entries of a column may be in any mutable sequence."""
    made = kind()
    hints = {
        name: str(hint).replace("list[int]", "MutableSequence[int]") for name, hint in get_type_hints(kind).items()
    }
    hints = {name: hint.replace("collections.abc.", "").replace("sections", "step") for name, hint in hints.items()}
    return [
        (one.name, hints[one.name].rpartition(".")[2], str(getattr(made, one.name)))
        for one in fields(kind)
        if one.name not in OF_SERVICE
    ]


def test_every_section_is_generated():
    assert GENERATED.keys() == BY_HAND.keys()


@pytest.mark.parametrize("name", GENERATED)
def test_generated_type_is_the_one_that_was_written_by_hand(name):
    assert shape(GENERATED[name]) == shape(BY_HAND[name])
    assert hasattr(GENERATED[name], "__slots__") == hasattr(BY_HAND[name], "__slots__")
    assert GENERATED[name].__dataclass_params__.frozen == BY_HAND[name].__dataclass_params__.frozen
    methods = {one for one in dir(BY_HAND[name]) if not one.startswith("_")} - OF_SERVICE
    assert methods <= {*dir(GENERATED[name])}


def test_methods_are_those_that_were_written_by_hand():
    for blocks in (sections.Blocks(), step.Blocks()):
        blocks.add(1, 2, [7, 8])
        blocks.add(1, 3, [9])
        blocks.add(4, 2, [5])
        assert blocks.by_row() == {1: {2: [7, 8], 3: [9]}, 4: {2: [5]}}
    rows: list[tuple[Any, range]] = [
        *((kind(), range(3)) for kind in (sections.Prefetched, prefetch.Prefetched)),
        *((kind(), range(4)) for kind in (sections.Retained, retain.Retained)),
        *((kind(), range(6)) for kind in (sections.Declined, declined.Declined)),
    ]
    for made, row in rows:
        made.add(*row)
        made.add(*row)
        columns = [getattr(made, one.name) for one in fields(made)]
        assert columns[: len(row)] == [[value, value] for value in row]
        assert not any(columns[len(row) :])
    for prefixes in (sections.Retain(now_ns=[7]), retain.Retain(now_ns=[7])):
        assert prefixes.time_ns == 7


def test_what_few_steps_have_is_made_when_it_is_read():
    for kind in (sections.Orders, sections.PartResult):
        assert given_fields(kind()) == {}
