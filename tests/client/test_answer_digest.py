"""The digest by which a mirror compares answers: whatever differs in two answers, their digests differ."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from kvplane.base.groups import Medium
from kvplane.base.step import Blocks, CacheEvent, EventKind, Orders, PartResult, StepResult
from kvplane.wire.mirror import answer_digest

STORED = CacheEvent(EventKind.STORED, 0, [b"k" * 16], [3], block_size=4, end=4)


def digest_of(**given):
    return answer_digest(StepResult(1, 0, [PartResult(**given)], 1))


def changes():
    """Each field of an answer that is compared, with another value than its default."""
    for one in fields(PartResult):
        if not one.compare:
            continue
        empty: Any = getattr(PartResult(), one.name)
        make: Any = type(empty)
        if is_dataclass(empty):
            for column in fields(empty):
                yield f"{one.name}.{column.name}", {one.name: make(**{column.name: [7]})}
        elif one.name in ("events", "tier_events"):
            yield one.name, {one.name: [STORED]}
        elif one.name == "last_hash":
            yield one.name, {one.name: [b"h" * 16]}
        else:
            yield one.name, {one.name: [7] if isinstance(empty, list) else 1}


def test_every_field_of_an_answer_changes_its_digest():
    digests = {name: digest_of(**given) for name, given in changes()}
    # They decide nothing, and older engines do not report them.
    for name in ("admit_needed", "run_needed", "orders.load_key", "orders.save_key", "orders.move_key"):
        assert digests.pop(name) == digest_of()
    assert {"admit_job", "declined.why", "retained.hit", "prefetched.blocks", "orders.save_slot"} <= digests.keys()
    assert len({digest_of(), *digests.values()}) == len(digests) + 1


def test_events_of_a_tier_are_not_those_of_the_device():
    of_host = replace(STORED, tier=Medium.HOST)
    assert len({digest_of(events=[STORED]), digest_of(tier_events=[STORED]), digest_of(tier_events=[of_host])}) == 3


@pytest.mark.parametrize("name", ["orders", "new_blocks", "declined"])
def test_sections_that_are_made_and_empty_change_no_digest(name):
    made = PartResult()
    assert getattr(made, name) in (Orders(), Blocks(), getattr(PartResult(), name))
    assert answer_digest(StepResult(1, 0, [made], 1)) == digest_of()
