"""Answers that are kept for repeats: the newest, bounded by number and bytes."""

from __future__ import annotations

import pytest

from kvplane.base.errors import OpIdReused
from kvplane_service.unary.idempotency import OpWindow


def kept(window, *names):
    return [window.find(name, name.encode()) is not None for name in names]


def test_the_oldest_leaves_when_there_are_too_many():
    window = OpWindow(2, 1000)
    for name in "abc":
        window.keep(name, name.encode(), b"answer")
    assert kept(window, "a", "b", "c") == [False, True, True]
    with pytest.raises(OpIdReused):
        window.find("c", b"other")


def test_long_answers_leave_sooner_and_the_newest_stays():
    window = OpWindow(100, 1000)
    for name, size in (("a", 400), ("b", 500), ("c", 200)):
        window.keep(name, name.encode(), bytes(size))
    assert kept(window, "a", "b", "c") == [False, True, True]
    window.keep("d", b"d", bytes(5000))
    assert kept(window, "b", "c", "d") == [False, False, True]
    window.keep("e", b"e", bytes(900))
    assert kept(window, "d", "e") == [False, True]


def test_a_cleared_window_has_room_again():
    window = OpWindow(100, 1000)
    window.keep("a", b"a", bytes(900))
    window.clear()
    window.keep("b", b"b", bytes(900))
    window.keep("c", b"c", bytes(100))
    assert kept(window, "a", "b", "c") == [False, True, True]
