"""The demonstration with vLLM shows what it says: a killed engine comes back with its cache, and no answer differs."""

from __future__ import annotations

import re

import pytest

from tests.vllm import demo

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_a_killed_engine_comes_back_with_its_cache(capfd):
    assert demo.main() == 0
    shown = capfd.readouterr().out
    shares = {name: int(share) for name, share in re.findall(r"│ (\w+) +│ 4[^│]*│ \d+ +│ \d+ \((\d+) %\)", shown)}
    assert shares == {"a": 98, "b": 98, "tiers": 98, "stock": 0}
    assert re.search(r"engine b: epoch 2: \d\d\d? keys kept, 0 not in memory", shown)
    assert "3200 of 3264 tokens hit in step" in shown
    assert re.search(r"kvplane explain a --tokens -\s+3264 of 3280 tokens", shown)
