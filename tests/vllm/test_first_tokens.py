"""Every source of `python -m tests.vllm.first_tokens` loads whole prompts of a live vLLM."""

from __future__ import annotations

import pytest

from tests.vllm.first_tokens import SOURCES, main

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]


def test_whole_prompts_are_loaded_from_every_source(capsys):
    assert main(["--lengths", "64", "1024"]) == 0
    _, heads, *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows] == ["64", "1,024"]
    assert all(f"| {name}, s " in heads and f"{name} above " in last for name in SOURCES)
    assert all(float(cell) > 0 for row in rows for cell in row.split("|")[2:-1])
