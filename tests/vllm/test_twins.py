"""The comparison with stock can fail: faults planted in a running adapter, each of which it catches."""

from __future__ import annotations

import pytest

from tests.vllm import environment
from tests.vllm.processes import run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("model", ["llama", "qwen3next"])
def test_every_planted_fault_differs_from_stock(model):
    environment.set_up()
    found = run("twins.py", model)
    for fault, caught in found.items():
        print(f"{model}, {fault or 'no fault'}: {caught or 'equal to stock'}")
    assert found.pop("") == []
    errors = {fault: caught for fault, caught in found.items() if isinstance(caught, str)}
    assert {fault: error for fault, error in errors.items() if not error.startswith("AssertionError")} == {}
    assert [fault for fault, caught in found.items() if not caught] == []
