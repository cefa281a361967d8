"""kvplane's manager where no live engine here calls it."""

from __future__ import annotations

import pytest

from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def test_a_preempted_request_with_a_retained_window_hits_its_prompt_only():
    """R-SWA: pages behind its prompt have other content than those of a longer prompt, which attends to all tokens."""
    assert processes.run("managers.py", "retained window") == {"hit": 16, "granted": True}


def test_bounded_replay_of_a_window_is_refused_by_the_names_of_the_layers():
    answer = processes.run("managers.py", "bounded replay")
    assert "layers window: bounded replay of a sliding window" in answer["error"]
    assert answer["fallback"] == "KVCacheManager"


def test_a_reset_that_loses_its_session_is_sent_again_and_its_stamps_are_written_before_it_returns():
    found = processes.run("managers.py", "reset that loses its session")
    assert found == {"done": True, "lives": 2, "resets": [True, True], "null stamp": True}
