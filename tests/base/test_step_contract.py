"""The table in step.proto of numbers that are reserved for later features."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplane.base.step import RowFlag
from kvplane.v1 import step_pb2
from kvplane_core.spec.validate import RESERVED_ALIGN

PROTO = (Path(__file__).parents[2] / "proto/kvplane/v1/step.proto").read_text()
TABLE = re.findall(r"(?<=  )([A-Z]\w+) (\d+) (\w+)", PROTO[: PROTO.index("package ")])


def test_the_whole_table_of_the_contract_is_parsed():
    assert len(TABLE) == len(set(TABLE)) >= 22


@pytest.mark.parametrize(("message", "number", "name"), TABLE)
def test_reserved_numbers_are_unused_or_have_their_name(message, number, name):
    descriptor = step_pb2.DESCRIPTOR.message_types_by_name[message]
    held = descriptor.fields_by_number.get(int(number))
    assert held is None or held.name == name
    assert name not in descriptor.fields_by_name or held is not None


def test_reserved_bits_are_not_flags():
    assert not int(sum(RowFlag)) & RESERVED_ALIGN
    assert f"{RESERVED_ALIGN} means nothing" in PROTO
    assert f"{int(RowFlag.LOAD)} LOAD" in PROTO
