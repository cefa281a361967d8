"""Fields of parts and results that are made when they are first read."""

import copy
import pickle
from typing import Any

import pytest

from kvplane.base.step import Blocks, Budget, Facts, Part, PartResult, Run, Step
from kvplane.base.when_read import PACKED, given_fields
from kvplane.session.builder import StepBuilder
from kvplane.session.rows import FactRow, RunRow, part_of
from kvplane.wire.step import encode_step


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
@pytest.mark.parametrize("part", [Part(Facts([1], end=[1]), with_hashes=True), StepBuilder([4, 2]).part()])
def test_copies_of_a_part_have_its_sections(duplicate, part):
    assert duplicate(part) == part
    assert duplicate(part).facts.slot == part.facts.slot


def test_packed_sections_are_made_when_one_is_read_or_set_and_not_before():
    def part():
        return StepBuilder([4, 2]).part()

    rows = part_of(FactRow(4, tokens=[0]), FactRow(2, tokens=[0]), RunRow(4), RunRow(2))
    for read in (lambda one: one.facts, lambda one: one.run, lambda one: one.peek, given_fields, repr):
        made = part()
        assert list(vars(made)) == [PACKED]
        with pytest.raises(AttributeError, match="no field fact"):
            _ = made.fact
        assert list(vars(made)) == [PACKED]
        read(made)
        assert PACKED not in vars(made)
        assert encode_step(Step(1, 1, [made])) == encode_step(Step(1, 1, [rows]))
    made, other = part(), part()
    made.run = Run([7])
    assert (list(made.facts.slot), made.run) == ([4, 2], Run([7]))
    other.budget = Budget(tokens=5)
    assert (list(other.facts.slot), list(other.run.slot)) == ([4, 2], [4, 2])


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
