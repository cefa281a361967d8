"""`make demo-engine`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO

import pytest
from rich.console import Console

from tests.engine.demo import ROOT, Look, lines, panel
from tests.engine.reference.request import Request
from tests.engine.talk import conversations, readable
from tests.engine.world import World

RUN = re.compile(r"(\d+) answers in .*\| ([\d,]+) tokens computed \| hit ([\d,]+) tokens .*\| 0 of (\d+) tokens differ")
LAST = re.compile(r"the cache saved ([\d,]+) of ([\d,]+) tokens \(\d+%\) and -?[\d.]+ of .* s; .*: 0 of (\d+) differ")

BACK = re.compile(
    r"the conversation came back from the (.*) tier: hit (\d+) of (\d+) tokens, "
    r"(\d+) of them on the device; without tiers (\d+)"
)


def numbers(cells: Sequence[str]) -> list[int]:
    return [int(one.replace(",", "")) for one in cells]


@pytest.mark.timeout(300)
def test_demo_gets_hits_equal_tokens_and_says_what_the_cache_saved():
    command = [sys.executable, "-m", "tests.engine.demo", "--conversations", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    cached, uncached = (numbers(found) for found in RUN.findall(done.stdout))
    assert cached[0] == uncached[0] == 9
    assert cached[2] > uncached[2] == 0
    *_, last, _, _, hit, times, loaded, equal = done.stdout.splitlines()
    matched = LAST.fullmatch(last)
    assert matched, done.stdout
    saved, computed, compared = numbers(matched.groups())
    assert (saved, computed) == (uncached[1] - cached[1], uncached[1])
    assert saved > 0
    assert compared == cached[3] + uncached[3] > 0
    assert done.stdout.count("prompt tokens cached") == 18
    tier, *tokens = BACK.fullmatch(hit).groups()  # type: ignore[union-attr]
    from_tiers, prompt, on_device, bare = map(int, tokens)
    assert tier == "disk"
    assert bare <= on_device < from_tiers <= prompt
    assert re.fullmatch(r"answered in [\d.]+ s with tiers and [\d.]+ s without: -?[\d.]+ s saved", times)
    kib = [int(one) for one in re.findall(r"(\d+) KiB", loaded)]
    assert 2 * kib[0] < kib[1]
    assert kib[2] == pytest.approx(kib[1] - kib[0], abs=1)
    assert re.fullmatch(r"both gave the dense model's tokens: 0 of [1-9]\d* differ", equal)


def test_no_byte_of_an_answer_is_printed():
    """The weights are random: the text of an answer would be noise."""
    request = Request("1.1", [256, *b"Q: why?\nA: "], 3)
    request.hits.append(0)
    request.tokens += [1, 200, 90]
    look = Look(World().engine, num_answers=1)
    look.answers.append(request)
    printed = StringIO()
    with redirect_stdout(printed), lines() as show:
        show(look)
    assert printed.getvalue() == "turn 1.1      0 of   12 prompt tokens cached | 3 tokens answered\n"


def test_conversations_about_one_document_share_a_prefix():
    talk = conversations(ROOT, 4, 2, seed=1)
    first, fourth = talk.waiting[0], talk.waiting[3]
    assert first.tokens == fourth.tokens
    request = talk.next()
    assert request is not None
    assert request.prompt[: len(fourth.tokens)] == fourth.tokens
    request.tokens += [65, 66]
    following = talk.answered(request)
    assert following is not None
    assert following.prompt[: len(request.tokens)] == request.tokens
    assert talk.answered(following) is None


def test_panel_shows_question_length_of_the_answer_and_hit():
    request = Request("1.2", [256, *b"some text\nQ: is it cached?\nA: "], 2)
    request.hits.append(16)
    request.tokens += [104, 7]
    look = Look(World().engine, prompt_tokens=30, compared=2, num_answers=1)
    look.answers.append(request)
    console = Console(width=200, record=True)
    console.print(panel(look))
    text = console.export_text()
    assert "is it cached?" in text
    assert "2 tokens" in text
    assert "16" in text
    assert "0 of 2 tokens differ" in text


def test_unprintable_bytes_are_dots():
    assert readable([72, 105, 10, 200, 256]) == "Hi··"
