"""Step traces in process, whole and one row per part: all equal, every planted change found, bad input refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.conformance.divergence import Divergence
from tests.conformance.planting import changes, records_of, write_records
from tests.conformance.steps import main, replay_file

STEPS = sorted((Path(__file__).parent / "steps").glob("*.jsonl.gz"))
BY_NAME = {path.name.removesuffix(".jsonl.gz"): path for path in STEPS}
# One trace of each model, and of each way to schedule.
IN_ROWS = {
    *("llama-async-prio-heavy-b86-s107", "llama-async-spec2-b90-s111", "llama-nochunk-b120-s113"),
    *("gptoss-ngram3-dense-b170-s117", "gemma3-w64-prio-heavy-b300-s119", "jamba-fine16-b120-s122"),
}
PADDED = {name for name in BY_NAME if "ngram" in name or "spec2" in name or "draftmodel" in name}


@pytest.mark.parametrize("name", BY_NAME)
def test_step_trace_replays_equal_in_whole_steps(name):
    """One message per step; a few more only where an admission may be padded with drafts."""
    done = replay_file(BY_NAME[name], whole=True)
    assert done.values > 4500
    assert done.steps in (250, 300)
    if name in PADDED:
        assert 90 < done.in_parts < 220
        assert 1.3 < done.path.messages / done.steps < 2
    else:
        assert done.in_parts == 0
        assert done.path.messages == done.steps + 1  # one behind the last step, with the requests that ended since


@pytest.mark.parametrize("name", sorted(IN_ROWS))
def test_step_trace_replays_equal_with_one_row_per_part(name):
    done = replay_file(BY_NAME[name], whole=False)
    assert done.values > 4900
    assert done.path.messages > 12 * done.steps


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - IN_ROWS))
def test_further_step_traces_replay_equal_with_one_row_per_part(name):
    test_step_trace_replays_equal_with_one_row_per_part(name)


def test_steps_command_prints_a_line_per_file_and_path(capsys):
    assert len(STEPS) == 22
    assert main([str(BY_NAME["llama-draftmodel2-b110-s110"])]) == 0
    whole, rows, total = capsys.readouterr().out.splitlines()
    assert whole.startswith("same   whole llama-draftmodel2-b110-s110.jsonl.gz: 5683 values, 1.67 messages per step; ")
    assert whole.endswith("; in parts: 182 steps with an admission that drafts may pad")
    assert rows.startswith("same   rows  llama-draftmodel2-b110-s110.jsonl.gz: ")
    assert rows.endswith(" messages per step")
    assert total == "2 identical, 0 not"


# -- planted changes -------------------------------------------------------------------------------------------------

# Every output of a step and of an input, and a trace that has it.
OUTPUTS = {
    "llama-async-prio-heavy-b86-s107": [
        ("out", "sched"), ("out", "new"), ("out", "res"), ("out", "run"), ("out", "pre"), ("out", "fin"),
        ("out", "free"), ("out", "fq"), ("out", "running"), ("out", "waiting"), ("out", "log"), ("out", "ev_in"),
        ("add", "n"), ("add", "nh"), ("add", "lasth"), ("upd", "free"), ("upd", "fin"), ("abort", "free"),
    ],
    "jamba-fine16-b120-s122": [("out", "copies"), ("out", "zero"), ("out", "ev"), ("out", "snap")],
    "llama-draftmodel2-b110-s110": [("out", "spec"), ("out", "skip_drafts")],
}  # fmt: skip
IN_ROWS_ONLY = {("upd", "free"), ("abort", "free")}  # with whole steps the core receives inputs with the next step
CASES = [
    (name, sort, field, whole)
    for name, some in OUTPUTS.items()
    for sort, field in some
    for whole in (True, False)
    if not (whole and (sort, field) in IN_ROWS_ONLY)
]


def holder(record, sort):
    """The part of a record that has outputs of the sort, None when there is none."""
    if sort == "out":
        return record.get("out")
    return next((op for op in record.get("in", ()) if op["op"] == sort), None)


def with_planted(records, sort, field):
    """The records with the first such output changed, and the number of its line."""
    for number, record in enumerate(records, 1):
        place = holder(record, sort)
        if number > 1 and place and place.get(field) not in (None, []):
            place.update(next(changes(place, field)))
            return number
    raise AssertionError(f"no {sort}.{field} in the trace")


@pytest.mark.parametrize(("name", "sort", "field", "whole"), CASES)
def test_a_change_of_any_recorded_step_output_is_found(tmp_path, name, sort, field, whole):
    records = records_of(BY_NAME[name])
    number = with_planted(records, sort, field)
    path = write_records(tmp_path / "planted.jsonl.gz", records[: number + 1])
    with pytest.raises(Divergence) as found:
        replay_file(path, whole)
    expected = "ev" if whole and field == "ev_in" else field
    assert (found.value.line, found.value.name) == (number, expected)


def test_planted_changes_cover_every_step_output():
    seen: dict[str, set[str]] = defaultdict(set)
    for name in OUTPUTS:
        for record in records_of(BY_NAME[name])[1:]:
            seen["out"] |= record["out"].keys()
            for op in record["in"]:
                seen[op["op"]] |= op.keys()
    inputs = {"op", "id", "segs", "max", "arr", "prio", "salt", "lora", "of", "tok", "d"}
    tried = {(sort, field) for _, sort, field, _ in CASES}
    assert {(sort, field) for sort, fields in seen.items() for field in fields - inputs} == tried


@pytest.mark.parametrize("field", ["free", "ev_in", "snap"])
def test_a_change_after_the_last_step_is_found(tmp_path, field):
    records = records_of(BY_NAME["jamba-fine16-b120-s122"])
    out = records[-1]["out"]
    records[-1]["out"] = next(changes(out, field))
    path = write_records(tmp_path / "planted.jsonl.gz", records)
    with pytest.raises(Divergence) as found:
        replay_file(path, whole=True)
    assert (found.value.line, found.value.name) == (len(records), field)


def test_steps_command_shows_the_first_difference_and_fails(tmp_path, capsys):
    records = records_of(BY_NAME["llama-nocache-b100-s112"])[:4]
    records[2]["out"]["sched"][0][1] += 1
    assert main([str(write_records(tmp_path / "planted.jsonl.gz", records))]) == 1
    out = capsys.readouterr().out
    assert "DIFFER whole planted.jsonl.gz: line 3: sched: expected [[" in out
    assert "DIFFER rows  planted.jsonl.gz: line 3: sched: expected [[" in out
    assert "operation: {" in out
    assert out.endswith("0 identical, 2 not\n")


# -- bad input -------------------------------------------------------------------------------------------------------


def in_header(**fields):
    return lambda records: records[0].update(fields)


def in_scheduler(**fields):
    return lambda records: records[0]["scheduler"].update(fields)


def in_first_input(**fields):
    return lambda records: records[1]["in"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (in_header(format="kvtrace/1"), "format 'kvtrace/1': this program replays kvstep/1"),
        (in_header(vllm="0.32.0"), "recorded from vLLM '0.32.0'"),
        (in_header(colour="blue"), "header: unknown field 'colour'"),
        (in_header(pressure=3), "header: pressure is 3, not a text"),
        (in_header(hash_algo="md5"), "header: hash_algo is 'md5'"),
        (in_header(mamba_cache_mode="all"), "header: mamba_cache_mode is 'all'"),
        (lambda records: records[0].pop("stop_token"), "header: field 'stop_token' is missing"),
        (in_scheduler(policy="lottery"), "scheduler: policy is 'lottery', not one of 'fcfs', 'priority'"),
        (in_scheduler(max_pauses=3), "scheduler: unknown field 'max_pauses'"),
        (in_header(spec_decode={"k": 0, "lookahead": 0, "draft_slots": 0}), "spec_decode: k is 0"),
        (in_header(spec_decode={"k": 2}), "spec_decode: field 'draft_slots' is missing"),
        (lambda records: records[1].update(pause=True), "line 2: unknown field 'pause'"),
        (lambda records: records[1].pop("out"), "line 2: field 'out' is missing"),
        (lambda records: records[1]["out"].update(colour=1), "line 2: out: unknown field 'colour'"),
        (lambda records: records[1]["out"].pop("fq"), "line 2: out: field 'fq' is missing"),
        (in_first_input(op="pause"), "line 2: unknown input 'pause'"),
        (in_first_input(segs=3), "line 2: add: segs is 3"),
        (in_first_input(weight=3), "line 2: add: unknown field 'weight'"),
        (lambda records: records[1]["in"].append({"op": "upd", "of": 9, "tok": [], "free": 1}), "step 9 awaits no res"),
        (lambda records: records[1]["in"].append(records[1]["in"][0]), "is there already"),
        (lambda records: records.pop(), "the file ends before its `end` record"),
        (lambda records: records.append(records[1]), "there is more behind the `end` record"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_steps_command_refuses_invalid_records_by_name(tmp_path, capsys, change, named):
    records = records_of(BY_NAME["llama-nocache-b100-s112"])
    records = [records[0], records[1], {"end": True, "in": [], "out": {"free": records[1]["out"]["free"]}}]
    change(records)
    assert main([str(write_records(tmp_path / "bad.jsonl.gz", records))]) == 1
    out = capsys.readouterr().out
    assert out.startswith("REFUSED whole bad.jsonl.gz: ")
    assert named in out


def test_steps_command_refuses_a_truncated_file_by_name(tmp_path, capsys):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(BY_NAME["llama-nocache-b100-s112"].read_bytes()[:20_000])
    assert main([str(path)]) == 1
    assert "REFUSED whole cut.jsonl.gz: line " in capsys.readouterr().out
