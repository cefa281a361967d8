"""The summary of `make tiers`: what did not finish, or was not measured, is said."""

from __future__ import annotations

import time

from tests.bench.tier_goals import NOT_BEGUN, Outcome, Part, Run, table

WAITS = Part("waits", "timeit -n 1 -r 1 __import__('time').sleep(600)", (5, 7))
FIGURE = "| N2 | bytes | 0.5 | >= 0.95 | **missed** |"


def test_a_part_that_does_not_finish_is_killed_and_named():
    outcome = Run(time.monotonic() + 0.2).part(WAITS)
    assert not outcome.is_whole
    text = table([outcome, Outcome(Part("counts", "x"), 0)], 60.0, "this machine")
    assert "**The run is not whole**: the time was up before waits." in text
    assert "| N5 | waits: **not finished**: the time was up | | | **not measured** |" in text
    assert "| N7 | waits" in text


def test_nothing_begins_when_the_time_is_up():
    assert Run(time.monotonic()).part(WAITS) == Outcome(WAITS, NOT_BEGUN)


def test_figures_are_in_order_and_each_has_a_row():
    """Also one whose part ended without printing it; N1 is the status of its tests."""
    parts = (Part("moves", "x", (2, 4)), Part("bytes", "y", (1,)))
    ended = [Outcome(parts[0], 1, lines=["noise", FIGURE]), Outcome(parts[1], 0, lines=["29 passed"])]
    rows = [line for line in table(ended, 60.0, "").splitlines() if line.startswith("| N") and "N10" not in line]
    assert [row.split(" ")[1] for row in rows] == ["N1", "N2", "N4"]
    assert rows[0].endswith("| reached |")
    assert rows[1] == FIGURE
    assert rows[2].endswith("**not measured** |")


def test_a_part_says_how_it_ended():
    outcome = Run(time.monotonic() + 60).part(Part("a question", "timeit -n 1 -r 1 no_such_name"))
    assert "| **status 1** | NameError: name 'no_such_name' is not defined |" in outcome.row
