"""BEHAVIOURS.md: all 95 rules are there, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TEXT = (TESTS / "conformance" / "BEHAVIOURS.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
ROWS = [(int(number), rule, tests) for number, rule, tests in ROW.findall(TEXT)]


@cache
def defined_in(path):
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_behaviours_contains_all_rules_in_order():
    assert [number for number, _, _ in ROWS] == list(range(1, 96))


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED.findall(TEXT))))
def test_behaviours_names_an_existing_test(path, name):
    assert name.startswith("test_")
    assert name in defined_in(path)


def test_behaviours_has_a_test_or_a_reason_per_rule():
    reasons = [number for number, _, tests in ROWS if tests.startswith("none: ")]
    for number, _, tests in ROWS:
        assert (not NAMED.findall(tests)) == (number in reasons), number
    assert reasons == [82, 89, 90]
    assert f"Of the 95 rules {95 - len(reasons)} have a test" in TEXT
