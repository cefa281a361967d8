"""Answers that are kept for repeats: the newest, bounded by number and bytes."""

from __future__ import annotations

import pytest

from kvplane.base.errors import OpIdReused
from kvplane_service.unary.asking import OpWindow


def kept(window, *names):
    return [window.find(name, name.encode()) is not None for name in names]


def test_answer_window_drops_the_oldest_answer_at_its_limit():
    window = OpWindow(2, 1000)
    for name in "abc":
        window.keep(name, name.encode(), b"answer")
    assert kept(window, "a", "b", "c") == [False, True, True]
    with pytest.raises(OpIdReused):
        window.find("c", b"other")


def test_answer_window_is_bounded_in_bytes_and_keeps_the_newest():
    window = OpWindow(100, 1000)
    for name, size in (("a", 400), ("b", 500), ("c", 200)):
        window.keep(name, name.encode(), bytes(size))
    assert kept(window, "a", "b", "c") == [False, True, True]
    window.keep("d", b"d", bytes(5000))
    assert kept(window, "b", "c", "d") == [False, False, True]
    window.keep("e", b"e", bytes(900))
    assert kept(window, "d", "e") == [False, True]


def test_a_cleared_answer_window_is_empty():
    window = OpWindow(100, 1000)
    window.keep("a", b"a", bytes(900))
    window.clear()
    window.keep("b", b"b", bytes(900))
    window.keep("c", b"c", bytes(100))
    assert kept(window, "a", "b", "c") == [False, True, True]
