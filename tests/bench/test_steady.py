"""The benchmark of the steady state: full pools evict, all ways do the same work, the tables have the results."""

from __future__ import annotations

import pytest

from tests.bench import steady
from tests.bench.held import Held
from tests.bench.held import report as held_report
from tests.bench.peer.models import MODELS
from tests.bench.steady import LOADS, RATIOS, WAYS, Cell, Side, measure, report


@pytest.mark.parametrize("load", LOADS)
def test_steady_benchmark_measures_every_configuration(load, monkeypatch):
    monkeypatch.setattr(steady, "REQUESTS", 8)
    cells, loops = measure(MODELS[1], load, 2)
    assert [cell.way for cell in cells] == [str(way) for way in WAYS]
    assert len(loops) == 3
    assert all(0 < cell.least <= cell.median and cell.least < cell.longest for cell in cells)


def test_steady_loads_fill_blocks_in_one_step_or_evenly(monkeypatch):
    monkeypatch.setattr(steady, "REQUESTS", 32)
    for load, most in ((steady.DECODE, 2), (steady.PHASE, 32)):
        side = Side(MODELS[0], load, WAYS[-1], 1)
        assert max(sum(part.facts.num_hashes) for part in side._decode()) == most


def test_steady_report_marks_a_ratio_above_its_limit():
    cells = [Cell("m", 1, "load", str(way), 9.0, 10.0 * (1 + way.in_flight), 99.0) for way in WAYS]
    text = report(cells, [5000, 7000], "command")
    assert "| m | 1 | load | **4.00** | 1.00 | 1.00 | 1.00 |" in text
    assert len(RATIOS) == 4


def test_held_report_marks_a_tick_above_its_limit():
    text = held_report([Held("m", 1, 9, 1.0, 3.0, 2.0, 5.1), Held("n", 1, 9, 1.0, 3.0, 2.0, 4.9)], "command")
    assert "| **5.1** | 5.0 |" in text
    assert "| 4.9 | 5.0 |" in text
