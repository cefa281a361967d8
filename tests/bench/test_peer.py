"""The benchmark against the reference runs and counts correctly; its figures are not checked."""

import json
import os
from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest

from tests.bench.peer import history
from tests.bench.peer.__main__ import Parts, one_start
from tests.bench.peer.models import MODELS
from tests.bench.peer.plan import (
    AHEAD,
    CBOR_HASH,
    CPU,
    DECODE,
    DEFAULT_HASH,
    DELAY,
    HIT,
    MISS,
    PACED,
    PLACES,
    REFERENCE,
    UNIX,
    WAIT,
    Case,
    Plan,
    Round,
)
from tests.bench.peer.report import Report, cells_of
from tests.bench.peer.start import Start

SMALL = Plan(("Llama-3.1-70B", "Jamba-v0.1"), (3,), (400,), 1, 2, 2, 0.0, 1, reference=False)


def test_peer_benchmark_measures_every_case_on_all_sides(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('what a library prints')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = one_start(SMALL)
    cases = [(one["case"], one["side"]) for one in found["rounds"]]
    measured = {(case["model"], case["kind"], case["hashing"], side) for case, side in cases}
    decodes = {(DECODE, "", side) for side in PLACES}
    decodes |= {(kind, "", side) for kind in (AHEAD, WAIT, DELAY, CPU) for side in PLACES[1:]}
    admissions = {
        (kind, hashing, side) for kind in (MISS, HIT) for hashing in (DEFAULT_HASH, CBOR_HASH) for side in PLACES
    }
    assert measured == {(model, *one) for model in SMALL.models for one in decodes | admissions}
    text = Report.of(SMALL, [found, found]).text()
    assert "## Llama-3.1-70B" in text
    assert "2 process starts" in text
    drawn = list(ElementTree.fromstring(history.chart(Report.of(SMALL, [found]).cells)))
    assert sum(one.tag.endswith("polyline") for one in drawn) == len(SMALL.models)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_peer_decode_requests_fill_blocks_in_different_steps(model):
    shape = model.shape
    phases = {length % shape.unit for length in shape.decode_prompts(shape.unit)}
    assert len(phases) == shape.unit


def test_peer_benchmark_refuses_sides_with_different_work():
    with pytest.raises(AssertionError, match="different work"):
        Start(SMALL, [])._agree("case", [1, 2])


def rounds(case: Case, side: str, *medians: float) -> list[dict[str, object]]:
    return [asdict(Round(case, side, median, median)) for median in medians]


def test_peer_ratio_is_that_of_the_medians_over_all_process_starts():
    decode, ahead = Case("m", DECODE, 8), Case("m", AHEAD, 8)
    paced = rounds(Case("m", PACED, 8), REFERENCE, 400)
    first = rounds(decode, REFERENCE, 100, 200, 300) + rounds(decode, UNIX, 50, 50, 70) + rounds(ahead, UNIX, 20)
    second = rounds(decode, REFERENCE, 200, 200, 200) + rounds(decode, UNIX, 40, 50, 90) + rounds(ahead, UNIX, 40)
    starts = json.loads(json.dumps([{"rounds": paced + first}, {"rounds": paced + second}]))
    cells = {(cell.case, cell.side): cell for cell in cells_of(starts)}
    unix = cells[decode, UNIX]
    assert (unix.rounds, unix.median, unix.extremes, unix.ratio) == (6, 50, (40, 90), 0.25)
    assert unix.start_ratios == (0.25, 0.25)
    assert cells[ahead, UNIX].ratio == 0.075  # relative to the reference's paced step


def test_peer_benchmark_continues_with_the_parts_that_are_missing(tmp_path, monkeypatch):
    plan, asked = replace(SMALL, models=("a", "b")), list[str]()

    def measure(one: Plan) -> dict[str, object]:
        (model,) = one.models
        asked.append(model)
        monkeypatch.setattr("time.monotonic", lambda: 60.0 * 7 * len(asked))
        of_model = rounds(Case(model, DECODE, 8), UNIX, len(asked))
        return {"rounds": of_model, "load_average": [[len(asked)], [len(asked) + 1]], "reference": {}}

    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    for expected in (["a", "b", "a"], ["a", "b", "a", "b"]):
        parts = Parts(plan, 2, tmp_path)
        parts.load("commit")
        assert parts.run(20, measure) == (len(expected) == 4)
        assert asked == expected
    first, second = parts.starts()
    assert ([one["median_us"] for one in first["rounds"]], first["load_average"]) == ([1, 2], [[1], [3]])
    assert ([one["median_us"] for one in second["rounds"]], second["load_average"]) == ([3, 4], [[3], [5]])
    with pytest.raises(SystemExit, match="another commit"):
        Parts(plan, 2, tmp_path).load("other")
    parts.forget()
    Parts(plan, 2, tmp_path).load("other")


def test_peer_report_counts_the_goals_that_are_reached():
    measured = rounds(Case("Llama-3.1-70B", PACED, 8), REFERENCE, 100)
    measured += rounds(Case("Llama-3.1-70B", PACED, 32), REFERENCE, 100)
    measured += rounds(Case("Llama-3.1-70B", AHEAD, 8), UNIX, 99) + rounds(Case("Llama-3.1-70B", AHEAD, 32), UNIX, 36)
    start = {"rounds": measured, "load_average": [[1.0], [3.0]], "reference": {}}
    text = Report.of(SMALL, [start]).text()
    assert "1 of 2 ratios to a paced step are reached; missed: Llama-3.1-70B at 32 (0.360)." in text


def test_peer_history_keeps_the_rows_of_earlier_commits(tmp_path):
    measured = rounds(Case("m", PACED, 8), REFERENCE, 100) + rounds(Case("m", AHEAD, 8), UNIX, 25)
    measured += rounds(Case("m", WAIT, 256), UNIX, 70) + rounds(Case("m", CPU, 256), UNIX, 900)
    start = {"rounds": measured, "load_average": [[1.0], [3.0]], "reference": {}}
    for commit in ("first", "second"):
        history.add(tmp_path / "history.md", Report.of(SMALL, [start]), commit)
    text = (tmp_path / "history.md").read_text()
    lines = [line.split(" | ")[1:] for line in text.splitlines() if line.startswith("|")]
    cells = ["1 to 3", "m", "–", "0.25", "–", "–", "70", "900 |"]
    assert lines[-2:] == [["first", *cells], ["second", *cells]]
    assert len({len(line) for line in lines}) == 1


def test_peer_benchmark_without_a_reference_has_no_ratios():
    (cell,) = cells_of([{"rounds": rounds(Case("m", DECODE, 8), UNIX, 1, 2, 3)}])
    assert cell.ratio is None
    assert cell.start_ratios == ()
