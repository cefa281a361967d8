"""Operation traces in process: all equal; every planted change found; input in another format refused by name."""

from __future__ import annotations

import gzip
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.operations import OPERATIONS
from tests.conformance.planting import changes, records_of, write_records
from tests.conformance.replay import Replayer, first_difference, main, replay_file

TRACES = sorted((Path(__file__).parent / "traces").glob("*.jsonl.gz"))
BY_NAME = {path.name.removesuffix(".jsonl.gz"): path for path in TRACES}
# Between them every output of every operation: refusals, windows, block sizes, copies, zeroing, resets, loads.
SOME = ["llama-full-b60-s1", "gpt-oss-ext-b250-s26", "mamba64-align-b100-s65", "mamba64-align-fine16-b300-s67"]
SOME += ["dsv4-5groups-b1500-s71"]


@pytest.mark.parametrize("path", TRACES, ids=list(BY_NAME))
def test_operation_trace_replays_equal(path):
    assert replay_file(path).values > 1400


def test_replay_command_prints_a_line_per_file_and_counts(capsys):
    names = ["llama-full-b60-s1", "mamba64-align-b100-s65"]
    assert main([str(BY_NAME[name]) for name in names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(TRACES) == 35
    assert len(lines) == 3
    for name, line in zip(names, lines, strict=False):
        assert line.startswith(f"same   {name}.jsonl.gz: ")
        assert line.endswith(" values")
    assert lines[-1] == "2 identical, 0 not"


# -- planted changes -------------------------------------------------------------------------------------------------


class Remembering(Replayer):
    """Keeps operations and outputs instead of comparing them."""

    def __init__(self, header):
        super().__init__(header)
        self.seen = []

    def _compare(self, pending, results):
        self.seen.append((pending.number, pending.op, self._outputs(pending, results)))


@cache
def answers(name):
    replayer = replay_file(BY_NAME[name], Remembering)
    assert isinstance(replayer, Remembering)
    return replayer.seen


@pytest.mark.parametrize("name", SOME)
def test_a_change_of_any_recorded_output_is_found(name):
    """Of each operation and field six records, in each of them every single value."""
    tried: dict[tuple[str, str], int] = {}
    for _, op, outputs in answers(name):
        assert first_difference(op, outputs) is None
        for field in OPERATIONS[op["op"]].all_outputs & op.keys():
            key = (op["op"], field)
            tried[key] = tried.get(key, 0) + 1
            if tried[key] <= 6:
                found = {first_difference(planted, outputs) for planted in changes(op, field)}
                assert found == {field}, (op, field)
    assert len(tried) >= 25


@pytest.mark.parametrize("name", SOME)
def test_missing_and_additional_outputs_are_found(name):
    for _, op, outputs in answers(name):
        for field in OPERATIONS[op["op"]].sometimes:
            without = {key: value for key, value in op.items() if key != field}
            planted = without if field in op else op | {field: [[0, 1]]}
            assert first_difference(planted, outputs) == field


def first_records():
    """The first record in which an output of an operation is not empty, for each output."""
    found = defaultdict(list)
    for name in SOME:
        for number, op, _ in answers(name):
            for field in OPERATIONS[op["op"]].all_outputs & op.keys():
                if op[field] not in ([], None):
                    found[op["op"], field].append((number, name))
    return {key: min(places) for key, places in found.items()}


def test_replay_command_shows_the_first_difference_with_its_context(tmp_path, capsys):
    """A file for each output of each operation, its first value changed."""
    places = first_records()
    assert len(places) == 35
    for (operation, field), (number, name) in places.items():
        records = records_of(BY_NAME[name])
        records[number - 1] = next(changes(records[number - 1], field))
        path = write_records(tmp_path / "planted.jsonl.gz", records)
        assert main([str(path)]) == 1
        out = capsys.readouterr().out
        assert out.startswith(f"DIFFER planted.jsonl.gz: line {number}: {field}: expected "), (operation, field)
        assert f'"op": "{operation}"' in out
        assert out.endswith("\n0 identical, 1 not\n")


# -- bad input -------------------------------------------------------------------------------------------------------


def in_header(**fields):
    return lambda records: records[0].update(fields)


def in_group(**fields):
    return lambda records: records[0]["groups"][0].update(fields)


def in_spec(**fields):
    return lambda records: records[0]["groups"][0]["spec"].update(fields)


def in_args(**fields):
    return lambda records: records[0]["manager_args"].update(fields)


def first(records, operation):
    return next(record for record in records if record.get("op") == operation)


def in_first(operation, **fields):
    return lambda records: first(records, operation).update(fields)


def without(operation, field):
    return lambda records: first(records, operation).pop(field)


HEADERS = [
    (in_header(format="kvtrace/2"), "format 'kvtrace/2': this program replays kvtrace/1"),
    (in_header(format="kvstep/1"), "format 'kvstep/1'"),
    (in_header(vllm="0.34.0"), "recorded from vLLM '0.34.0': this program replays 0.33.0"),
    (in_header(colour="blue"), "header: unknown field 'colour'"),
    (lambda records: records[0].pop("num_blocks"), "header: field 'num_blocks' is missing"),
    (in_header(num_blocks="many"), "header: num_blocks is 'many', not a count above 0"),
    (in_header(num_blocks=True), "header: num_blocks is True"),
    (in_header(hash_algo="md5"), "header: hash_algo is 'md5', not one of 'sha256'"),
    (in_header(none_hash="00"), "header: none_hash is '00', the rest of the header says"),
    (in_header(retention_interval=-1), "header: retention_interval is -1, not null or a count"),
    (in_header(retention_interval=7), "header: refused: retention_interval: 7 is not a multiple"),
    (in_header(coordinator="PackedCoordinator"), "header: coordinator is 'PackedCoordinator'"),
    (in_header(partial_hash_hits=1), "header: partial_hash_hits is 1, not true or false"),
    (in_header(cache_hit_alignment_tokens=8), "header: cache_hit_alignment_tokens is 8, the rest"),
    (in_header(needs_kv_cache_zeroing="no"), "header: needs_kv_cache_zeroing is 'no'"),
    (in_header(manager_args=[]), "manager_args: [] is no record"),
    (in_args(pipeline=2), "manager_args: unknown field 'pipeline'"),
    (in_args(log_stats=False), "manager_args: log_stats is False, not one of True"),
    (in_args(dcp_world_size=0), "manager_args: dcp_world_size is 0"),
    (in_args(watermark="low"), "manager_args: watermark is 'low', not a number"),
    (in_group(manager="TreeAttentionManager"), "groups[0]: manager is 'TreeAttentionManager'"),
    (in_group(mamba_cache_mode="all"), "groups[0]: mamba_cache_mode is 'all'"),
    (in_group(tree_depth=3), "groups[0]: unknown field 'tree_depth'"),
    (in_group(block_size=0), "groups[0]: block_size is 0"),
    (in_spec(type="TreeAttentionSpec"), "groups[0].spec: type is 'TreeAttentionSpec'"),
    (in_spec(depth=3), "groups[0].spec: unknown field 'depth'"),
    (in_spec(dtype="float12"), "groups[0].spec: dtype is 'float12'"),
    (in_header(attention_groups=[{"group_ids": [0]}]), "attention_groups[0]: field 'manager' is missing"),
]
OPERATION_LINES = [
    (in_first("alloc", op="grow"), "unknown operation 'grow'"),
    (lambda records: first(records, "alloc").pop("op"), "unknown operation None"),
    (in_first("alloc", priority=1), "alloc: unknown field 'priority'"),
    (without("alloc", "comp"), "alloc: field 'comp' is missing"),
    (without("alloc", "free"), "alloc: field 'free' is missing"),
    (without("lookup", "hit"), "lookup: field 'hit' is missing"),
    (in_first("alloc", st="SLEEPING"), "alloc: st is 'SLEEPING', not one of 'WAITING', 'RUNNING', 'PREEMPTED'"),
    (in_first("alloc", new=-1), "alloc: new is -1, not a count"),
    (in_first("alloc", use_hit=False), "alloc: 'hit' is for an admission (use_hit)"),
    (without("alloc", "hit"), "alloc: field 'hit' is missing"),
    (in_first("lookup", id="missing"), "lookup: there is no request 'missing'"),
    (in_first("new", segs=[[1]]), "new: segs is [[1]], not a list"),
    (in_first("new", mm=[["img", 0, 0]]), "new: mm is "),
    (in_first("tok", t="word"), "tok: t is 'word'"),
    (in_first("evict", ids=[9999]), "refused: "),
    (lambda records: records.insert(3, dict(first(records, "new"))), "is there already"),
    (lambda records: records.append({"op": "step", "free": 0}), "there is more behind the `end` record"),
    (lambda records: records.pop(), "the file ends before its `end` record"),
    (lambda records: records[-1].update(stats={}), "end: stats is {}"),
]


def text_of(value):
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("change", "named"), HEADERS + OPERATION_LINES, ids=text_of)
def test_replay_command_refuses_invalid_records_by_name(tmp_path, capsys, change, named):
    records = records_of(BY_NAME["gpt-oss-b90-s21"])
    change(records)
    assert main([str(write_records(tmp_path / "bad.jsonl.gz", records))]) == 1
    out = capsys.readouterr().out
    assert out.startswith("REFUSED bad.jsonl.gz: ")
    assert named in out


def cut(data):
    return data[: len(data) // 2]


def flipped(data):
    return data[:2000] + bytes([data[2000] ^ 255]) + data[2001:]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, "Compressed file ended"),
        (flipped, "line "),
        (lambda data: b"", "empty file"),
        (lambda data: b"{}", "Not a gzipped file"),
        (lambda data: gzip.compress(b"[1]\n"), "line 1: no record"),
        (lambda data: gzip.compress(b'{"format": "kvtrace/1"'), "line 1: "),
    ],
    ids=["cut", "flipped", "empty", "plain", "list", "half"],
)
def test_replay_command_refuses_a_damaged_file_by_name(tmp_path, capsys, damage, named):
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(damage(BY_NAME["gpt-oss-b90-s21"].read_bytes()))
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("REFUSED bad.jsonl.gz: ")
    assert named in out


def test_replay_command_refuses_a_missing_file_and_replays_the_others(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere.jsonl.gz"), str(BY_NAME["dsv4-5groups-b1500-s71"])]) == 1
    out = capsys.readouterr().out
    assert out.startswith("REFUSED nowhere.jsonl.gz: line 1: ")
    assert "same   dsv4-5groups" in out
    assert out.endswith("\n1 identical, 1 not\n")
