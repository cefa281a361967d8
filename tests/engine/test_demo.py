"""`make demo-engine`."""

from __future__ import annotations

import re
import subprocess
import sys

from rich.console import Console

from kvplane_worker.engine.request import Request
from tests.engine.demo import ROOT, Look, panel
from tests.engine.talk import conversations, readable
from tests.engine.world import World

LAST = re.compile(r"(\d+) answers \| .* hit ([\d,]+) tokens .* \| 0 of (\d+) tokens differ from the dense model's")


def test_demo_gets_hits_and_equal_tokens():
    command = [sys.executable, "-m", "tests.engine.demo", "--conversations", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    matched = LAST.fullmatch(done.stdout.splitlines()[-1])
    assert matched, done.stdout
    answers, hits, compared = (int(one.replace(",", "")) for one in matched.groups())
    assert answers >= 3
    assert hits > 0
    assert compared >= answers
    assert done.stdout.count("prompt tokens cached") == answers


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


def test_panel_shows_question_answer_and_hit():
    request = Request("1.2", [256, *b"some text\nQ: is it cached?\nA: "], 2)
    request.hits.append(16)
    request.tokens += [104, 7]
    look = Look(World().engine, prompt_tokens=30, compared=2, num_answers=1)
    look.answers.append(request)
    console = Console(width=200, record=True)
    console.print(panel(look))
    text = console.export_text()
    assert "is it cached?" in text
    assert "h·" in text
    assert "16" in text
    assert "0 of 2 tokens differ" in text


def test_unprintable_bytes_are_dots():
    assert readable([72, 105, 10, 200, 256]) == "Hi··"
