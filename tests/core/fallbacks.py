"""Lets a test fail in which the compiled core leaves work to the Python one, or a step copies its whole state."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.base.step import Step, StepResult
from kvplane_service.replicas import cores


class FellBack(AssertionError):
    """The compiled core left a step or a look-up to the Python core, or copied its state for a step."""


@pytest.fixture(autouse=True)
def no_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica of the test does its work on the core that it says."""
    if native := cores._native():
        monkeypatch.setattr(native.NativeReplica, "_fall_back", _refuse)
        _forbid_copies(monkeypatch, native)


def _forbid_copies(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    """A step copies the state only to continue requests: a copy takes seconds for a million blocks."""
    apply, load, may_copy = native.NativeReplica._apply, native.load_state, [True]

    def applied(core: Any, step: Step, alone: bool) -> StepResult:
        may_copy.append(any(part.resume is not None for part in step.parts))
        try:
            result: StepResult = apply(core, step, alone)
            return result
        finally:
            may_copy.pop()

    def loaded(spec: Any, image: bytes) -> Any:
        if not may_copy[-1]:
            raise FellBack("a step copied the whole state")
        return load(spec, image)

    monkeypatch.setattr(native.NativeReplica, "_apply", applied)
    monkeypatch.setattr(native, "load_state", loaded)


def _refuse(*_: object) -> None:
    raise FellBack
