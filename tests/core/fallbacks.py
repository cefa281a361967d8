"""Lets a test fail in which a step of the compiled core copies its whole state for the Python one."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.base.step import Step, StepResult
from kvplane_service.replicas import cores


class FellBack(AssertionError):
    """A step of the compiled core made a copy of its state: that takes seconds for a million blocks."""


@pytest.fixture(autouse=True)
def no_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a compiled core copies its state."""
    native: Any = cores._native()
    if native is None:
        return
    apply, load, steps = native.NativeReplica._apply, native.load_state, [0]

    def applied(core: Any, step: Step, alone: bool) -> StepResult:
        steps[0] += 1
        try:
            result: StepResult = apply(core, step, alone)
            return result
        finally:
            steps[0] -= 1

    def loaded(spec: Any, image: bytes) -> Any:
        if steps[0]:
            raise FellBack
        return load(spec, image)

    monkeypatch.setattr(native.NativeReplica, "_apply", applied)
    monkeypatch.setattr(native, "load_state", loaded)
