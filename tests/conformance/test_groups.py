"""The golden grouping tables: all rows equal, every planted change found, bad files refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.conformance.groups import compare, first_difference, main, plan_case, planned_row, read_cases
from tests.conformance.planting import changed, places

GOLDEN = Path(__file__).with_name("golden_groups.json")
CASES = read_cases(GOLDEN)


def title(case):
    return f"{case['name']} [{case['layout']}]"


@pytest.mark.parametrize("case", CASES, ids=title)
def test_grouping_row_equals_the_golden_table(case):
    assert compare(case) is None


def test_groups_command_counts_identical_rows(capsys):
    assert main([str(GOLDEN)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CASES) + 1 == 92
    assert lines[-1] == "91 of 91 rows identical"


@pytest.mark.parametrize("case", CASES, ids=title)
def test_a_change_of_any_expected_grouping_value_is_found(case):
    actual = planned_row(plan_case(case))
    expected = copy.deepcopy(case["expected"])
    for *way, last in places(expected):
        holder = expected
        for key in way:
            holder = holder[key]
        original = holder[last]
        holder[last] = changed(original)
        difference = first_difference(expected, actual)
        assert difference is not None, (*way, last)
        assert str(way[0] if way else last) in difference.path
        holder[last] = original
    assert first_difference(expected, actual) is None


def test_missing_and_additional_grouping_values_are_found():
    case = CASES[0]
    actual = planned_row(plan_case(case))
    fewer = {key: value for key, value in case["expected"].items() if key != "hash_block_size"}
    more = {**case["expected"], "colour": "blue"}
    shorter = {**case["expected"], "num_blocks": []}
    found = [first_difference(expected, actual) for expected in (fewer, more, shorter)]
    assert [one and one.path for one in found] == ["hash_block_size", "colour", "num_blocks"]


def write(tmp_path, change):
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    data["cases"] = data["cases"][:2]
    change(data)
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_groups_command_shows_a_different_row_and_fails(tmp_path, capsys):
    def change(data):
        data["cases"][1]["expected"]["groups"][0]["block_size"] = 32

    assert main([str(write(tmp_path, change))]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS  llama-3.1-70b tp4 [BLHNC]: groups[0].block_size: expected 32, planned 16" in out
    assert "note: 80 full layers" in out
    assert out.endswith("1 of 2 rows identical\n")


def test_groups_command_counts_a_refused_row_as_a_difference(tmp_path, capsys):
    def change(data):
        data["cases"][0]["memory_bytes"] = 1 << 20

    assert main([str(write(tmp_path, change))]) == 1
    assert 'plan: expected "a plan", planned "refused: memory_bytes' in capsys.readouterr().out


def in_first_spec(**changes):
    return lambda data: data["cases"][0]["input"]["specs"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.update(vllm_version="0.34.0"), "vllm_version: '0.34.0'"),
        (lambda data: data.pop("defaults"), "file: has"),
        (lambda data: data["cases"][0].update(hint=1), "cases[0]: has"),
        (lambda data: data["cases"][0]["input"].pop("workers"), "cases[0].input: has"),
        (lambda data: data["cases"][0]["config"].update(speed=9), "config.speed: unknown setting"),
        (lambda data: data["cases"][0].update(layout="NHBLC"), "layout: 'NHBLC' is unknown"),
        (lambda data: data["cases"][0]["input"]["layers"].update(extra=7), "layers.extra: no spec 7"),
        (
            lambda data: data["cases"][0]["input"].update(workers=[["missing"]]),
            "workers[0]: no layer 'missing'",
        ),
        (in_first_spec(type="TreeAttentionSpec"), "specs[0].type: 'TreeAttentionSpec' is unknown"),
        (in_first_spec(sparsity=2), "specs[0].sparsity: FullAttentionSpec has no such field"),
        (in_first_spec(dtype="float12"), "specs[0]: 'float12' is not a valid DType"),
        (in_first_spec(page_size_bytes=1), "specs[0].page_size_bytes: 1, its fields make 16384"),
        (lambda data: data["cases"][0]["input"]["specs"][0].pop("head_size"), "specs[0]: "),
    ],
)
def test_groups_command_refuses_a_malformed_file_by_name(tmp_path, capsys, change, named):
    assert main([str(write(tmp_path, change))]) == 2
    assert named in capsys.readouterr().err


def test_groups_command_refuses_a_truncated_file_by_name(tmp_path, capsys):
    path = tmp_path / "cut.json"
    path.write_text(GOLDEN.read_text(encoding="utf-8")[:100_000], encoding="utf-8")
    assert main([str(path)]) == 2
    assert "cut.json: truncated or no JSON, at " in capsys.readouterr().err


def test_groups_command_refuses_a_missing_file_by_name(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere.json")]) == 2
    assert "nowhere.json" in capsys.readouterr().err
