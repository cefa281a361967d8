"""The generated types of sections have the fields of the contract; their methods, and what is made when it is read."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from kvplane.base import sections, step
from kvplane.base.when_read import given_fields
from kvplane.v1 import step_pb2 as pb

GENERATED: dict[str, Any] = {
    name: kind for name, kind in vars(sections).items() if is_dataclass(kind) and kind.__module__ == sections.__name__
}
OF_SERVICE = ["hashed_facts", "hashed_news", "taken_back", "went_back", "tier_events"]  # fields that are not sent


@pytest.mark.parametrize("name", GENERATED)
def test_type_has_the_fields_of_the_contract_in_its_order(name):
    assert [one.name for one in fields(GENERATED[name])] == list(
        pb.DESCRIPTOR.message_types_by_name[name].fields_by_name
    )


def test_defaults_are_those_of_the_contract():
    assert (sections.Run().on_refusal, sections.Admit().on_refusal) == (step.OnRefusal.PREEMPT, step.OnRefusal.STOP)
    assert (sections.Admit().max_running, sections.Budget()) == (
        step.UNLIMITED,
        sections.Budget(2**32 - 1, 2**32 - 1, 0),
    )
    assert sections.News() == sections.News([], [], [], [], b"", [], [], [], [], [], [], [])


def test_result_has_the_sent_fields_and_those_of_the_service():
    sent = [one.name for one in fields(sections.PartResult)]
    assert [one.name for one in fields(step.PartResult)] == sent + OF_SERVICE
    assert step.PartResult([1], taken_back=3) == step.PartResult([1])
    assert step.PartResult(tier_events=[step.CacheEvent(step.EventKind.CLEARED)]) != step.PartResult()


def test_blocks_are_added_and_read_by_row():
    blocks = step.Blocks()
    blocks.add(1, 2, [7, 8])
    blocks.add(1, 3, [9])
    blocks.add(4, 2, [5])
    assert blocks.by_row() == {1: {2: [7, 8], 3: [9]}, 4: {2: [5]}}


@pytest.mark.parametrize(
    ("made", "count"), [(sections.Prefetched(), 3), (sections.Retained(), 4), (sections.Declined(), 6)], ids=repr
)
def test_rows_are_added_to_each_column(made, count):
    for _ in range(2):
        made.add(*range(count))
    columns = [getattr(made, one.name) for one in fields(made)]
    assert columns[:count] == [[value, value] for value in range(count)]
    assert not any(columns[count:])


def test_the_time_of_a_retain_section_is_its_entry_or_none():
    assert (sections.Retain(now_ns=[7]).time_ns, sections.Retain().time_ns) == (7, 0)


def test_what_few_steps_have_is_made_when_it_is_read():
    for kind in (step.Orders, step.PartResult, step.Part):
        assert given_fields(kind()) == {}
