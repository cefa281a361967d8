"""Conversations that move between three live vLLM engines; `python -m tests.vllm.moving` is the large run."""

from __future__ import annotations

import pytest

from tests.vllm.moving import HANGS_S, VICTIMS, Setting, moved

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]


@pytest.mark.parametrize(
    "setting",
    [
        Setting("llama"),
        Setting("gptoss"),
        Setting("gdn"),
        Setting("llama", transport="nixl-only"),
        Setting("llama", kinds="stock tp2,kvplane tp2"),
    ],
    ids=["llama", "gptoss", "gdn", "nixl", "ranks"],
)
def test_what_one_engine_has_computed_others_load(setting):
    one = moved(setting, 12, 0)
    assert (one.problems, one.counts["differ"], one.counts["answers"]) == ([], 0, 12)
    assert one.share > 0.9
    assert one.counts["peers loaded"] > 10


def test_tokens_are_right_whatever_is_killed_and_each_service_has_the_state_of_its_engines():
    one = moved(Setting("llama", at_once=3), 24, len(VICTIMS))
    assert (one.problems, one.counts["differ"], one.counts["answers"]) == ([], 0, 24)
    assert {name: one.counts[f"{name} killed"] for name in VICTIMS} == dict.fromkeys(VICTIMS, 1)


@pytest.mark.parametrize("transport", ["shared-memory", "nixl-only"])
def test_tokens_are_right_whatever_hangs_for_a_while(transport):
    one = moved(Setting("llama", at_once=3, transport=transport), 60, 0, len(VICTIMS) * len(HANGS_S))
    assert (one.problems, one.counts["differ"], one.counts["answers"]) == ([], 0, 60)
    assert {name: one.counts[f"{name} hung"] for name in VICTIMS} == dict.fromkeys(VICTIMS, len(HANGS_S))
    assert one.counts["peers loaded"] > 10
