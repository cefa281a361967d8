"""The table of first tokens, small: what it calls loaded was loaded, from each source, and costs were measured."""

from __future__ import annotations

import pytest

from kvplane.base.groups import TierKind
from tests.bench.first_tokens import SOURCES, Row, Table, measure

LENGTHS = (32, 96)


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_has_times_and_costs(source: TierKind):
    table = measure(source, LENGTHS, 1)
    assert [row.length for row in table.rows] == list(LENGTHS)
    assert min(min(row.computed_s, row.loaded_s) for row in table.rows) > 0
    assert min(table.token_ns, table.block_ns) > 0


def test_the_crossover_is_the_length_from_which_loading_stays_faster():
    rows = [Row(16, 1, 2, False), Row(32, 2, 1, True), Row(64, 3, 4, True), Row(128, 5, 4, True)]
    assert Table(TierKind.HOST, rows, 1, 1).crossover == 128
    assert Table(TierKind.HOST, rows[:3], 1, 1).crossover == 0
    assert Table(TierKind.HOST, rows[1:2], 1, 1).crossover == 32
