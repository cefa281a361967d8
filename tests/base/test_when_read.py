"""Fields of parts and results that are made when they are first read."""

import copy
import pickle
from typing import Any

import pytest

from kvplane.base.step import Blocks, Facts, Part, PartResult, Run


def test_missing_section_is_made_once_and_belongs_to_its_part():
    part, other = Part(), Part()
    assert not vars(part)
    part.facts.slot.append(3)
    assert vars(part) == {"facts": Facts([3])}
    assert part.facts is part.facts
    assert other.facts.slot == []


def test_parts_are_equal_whether_their_empty_sections_were_made_or_not():
    read, unread = Part(run=Run([1])), Part(run=Run([1]))
    assert read.facts == Facts()
    assert read == unread
    assert repr(read) == repr(unread)
    assert read != Part()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_a_part_have_its_sections(duplicate):
    part = Part(Facts([1], end=[1]), with_hashes=True)
    assert duplicate(part) == part


def test_results_take_fields_by_position_and_name():
    result = PartResult([1], [2], new_blocks=Blocks([0], [0], [1], [7]), free_blocks=5)
    assert (result.granted, result.preempted, result.new_blocks.ids, result.free_blocks) == ([1], [2], [7], 5)
    assert (result.events, result.orders.stamp, result.reset_done, result.went_back) == ([], [], False, 0)


def test_unknown_fields_are_refused():
    part: Any = Part()
    with pytest.raises(TypeError, match="Part has no field fact"):
        Part(**{"fact": Facts()})  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="Part has no field fact"):
        part.fact = Facts()
    with pytest.raises(AttributeError, match="Part has no field fact"):
        _ = part.fact
    with pytest.raises(ValueError, match="argument"):
        PartResult(*range(40))
