"""Lets a test fail in which the compiled core leaves work to the Python one."""

from __future__ import annotations

import pytest

from kvplane_service.replicas import cores


class FellBack(AssertionError):
    """The compiled core left a step or a look-up to the Python core."""


@pytest.fixture(autouse=True)
def no_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica of the test does its work on the core that it says."""
    if native := cores._native():
        monkeypatch.setattr(native.NativeReplica, "_fall_back", _refuse)


def _refuse(_: object) -> None:
    raise FellBack
