"""Readers of public traces on small files: the requests that they yield, and errors with file, line and cause."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvplane.base.errors import FailedPrecondition, InvalidArgument, NotFound
from kvplane.base.hashing import unpack_tokens
from kvplane_tools.replay.workloads import MalformedTrace, Span, TokenSource, TraceFile, TraceKind, TraceRequest
from kvplane_tools.replay.workloads import lines as lines_module


def mooncake(timestamp: int = 0, length: int = 700, ids: Iterable[int] = (3, 4), output: int = 5) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": list(ids)}


def weka(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def turn(t: float, ids: Iterable[int] = (1, 2), tail: int = 5, out: int = 7) -> dict[str, Any]:
    ids = list(ids)
    return {"t": t, "type": "n", "in": 64 * len(ids) + tail, "out": out, "hash_ids": ids}


def written(tmp_path: Path, *records: object, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    return path


def read(path: Path, **options: Any) -> list[TraceRequest]:
    with TraceFile(path, **options) as trace:
        return list(trace)


def read_until_fault(path: Path) -> tuple[list[str], MalformedTrace]:
    """The names of the requests before the fault, and the fault."""
    names: list[str] = []
    with pytest.raises(MalformedTrace) as fault, TraceFile(path) as trace:
        names.extend(request.name for request in trace)
    return names, fault.value


# -- Mooncake ----------------------------------------------------------------------------------------------


def test_mooncake_line_is_a_request(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(), mooncake(timestamp=1500, length=1024, ids=[3, 9], output=0))
    first, second = read(path)
    assert first == TraceRequest(
        name="line-1",
        arrival_s=0.0,
        session="",
        prompt=TokenSource((Span(0, 3 * 512, 3 * 512 + 700),)),
        output=TokenSource((Span(1, 0, 5, generated=True),)),
    )
    assert (second.arrival_s, len(second.prompt), second.output_tokens) == (1.5, 1024, 0)


def test_mooncake_ids_give_shared_tokens_and_partial_blocks(tmp_path: Path) -> None:
    whole, part = read(written(tmp_path, mooncake(length=1024), mooncake(length=600)))
    assert part.prompt.packed() == whole.prompt.packed()[: 600 * 4]


def test_generated_tokens_are_unique_to_their_request(tmp_path: Path) -> None:
    requests = read(written(tmp_path, *(mooncake(output=40, length=100, ids=[h % 3]) for h in range(9))))
    outputs = [unpack_tokens(request.output.packed()) for request in requests]
    prompts = {token for request in requests for token in unpack_tokens(request.prompt.packed())}
    assert len({tuple(output[at : at + 2]) for output in outputs for at in range(39)}) == 9 * 39
    assert not prompts & {token for output in outputs for token in output}


# -- Weka --------------------------------------------------------------------------------------------------


def test_weka_session_has_separate_ids_and_unique_tails(tmp_path: Path) -> None:
    path = written(tmp_path, weka("a", turn(0), turn(9)), weka("b", turn(0)))
    first, again, other = (request.prompt.packed() for request in read(path))
    assert len(first) == 4 * (2 * 64 + 5)
    assert first[: 4 * 128] == again[: 4 * 128]
    assert first[4 * 128 : 4 * 130] != again[4 * 128 : 4 * 130]
    assert other[: 4 * 2] != first[: 4 * 2]


def test_weka_sessions_start_at_equal_intervals_and_are_merged_by_arrival(tmp_path: Path) -> None:
    path = written(tmp_path, weka("a", turn(0), turn(100)), weka("b", turn(5)), weka("c", turn(0)))
    arrivals = [(request.name, request.arrival_s) for request in read(path)]
    assert arrivals == [("a/0", 0), ("b/0", 65), ("a/1", 100), ("c/0", 120)]
    at_once = [(request.name, request.arrival_s) for request in read(path, session_spacing_s=0)]
    assert at_once == [("a/0", 0), ("c/0", 0), ("b/0", 5), ("a/1", 100)]


def test_weka_sub_agent_times_are_relative_when_below_their_entry(tmp_path: Path) -> None:
    below = {"t": 40.0, "type": "subagent", "requests": [turn(1), turn(30)]}
    above = {"t": 40.0, "type": "subagent", "requests": [turn(40), turn(45)]}
    for entry, expected in ((below, [0, 41, 50, 70]), (above, [0, 40, 45, 50])):
        requests = read(written(tmp_path, weka("a", turn(0), entry, turn(50))))
        assert [request.arrival_s for request in requests] == expected
        assert {request.session for request in requests} == {"a"}
        assert len({request.prompt.packed()[: 4 * 128] for request in requests}) == 1


def test_weka_session_is_read_when_it_starts(tmp_path: Path) -> None:
    """Memory holds the sessions under way: the fault in the third is met at 120 s and not before."""
    path = written(tmp_path, weka("a", turn(0), turn(119), turn(130)), weka("b", turn(1)), {"id": "c"})
    names, fault = read_until_fault(path)
    assert names == ["a/0", "b/0", "a/1"]
    assert "line 3" in str(fault)


# -- Files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_trace_compression_is_detected_by_magic_bytes(tmp_path: Path, pack: Any) -> None:
    path = written(tmp_path, *(mooncake(timestamp=t) for t in range(300)))
    path.write_bytes(pack(path.read_bytes()))
    with TraceFile(path) as trace:
        assert trace.kind is TraceKind.MOONCAKE
        assert [request.arrival_s for request in trace] == [t / 1000 for t in range(300)]
        assert trace.bytes_read == trace.size_bytes == path.stat().st_size


def test_concatenated_frames_are_one_trace(tmp_path: Path) -> None:
    line = json.dumps(mooncake()).encode() + b"\n"
    for pack in (gzip.compress, zstandard.compress):
        path = tmp_path / "frames"
        path.write_bytes(pack(line + line[:20]) + pack(line[20:] + line))
        assert len(read(path)) == 3


def test_trace_kind_is_detected_by_the_first_line(tmp_path: Path) -> None:
    with TraceFile(written(tmp_path, weka("a", turn(0)))) as trace:
        assert trace.kind is TraceKind.WEKA
    with pytest.raises(MalformedTrace, match="line 1: it is neither a Mooncake request"):
        TraceFile(written(tmp_path, {"ContextTokens": 5}))


def test_trace_reader_holds_a_bounded_part_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, *(mooncake(timestamp=t) for t in range(2_000)))
    with TraceFile(path) as trace:
        first_ten = list(islice(trace, 10))
        assert len(first_ten) == 10
        assert trace.bytes_read < trace.size_bytes / 10


def test_trace_reader_ignores_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{json.dumps(mooncake())}\n\n  \n{json.dumps(mooncake())}")
    assert [request.name for request in read(path)] == ["line-2", "line-5"]


# -- Faults ------------------------------------------------------------------------------------------------


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


MOONCAKE_FAULTS: dict[str, object] = {
    "input_length: Field required": without(mooncake(), "input_length"),
    "hash_ids: Field required": without(mooncake(), "hash_ids"),
    "output_length: -1 is refused: Input should be greater than or equal to 0": mooncake(output=-1),
    "input_length: 0 is refused: Input should be greater than or equal to 1": mooncake(length=0, ids=[]),
    "input_length: -5 is refused: Input should be greater than or equal to 1": mooncake(length=-5),
    'input_length: "700" is refused: Input should be a valid integer': mooncake() | {"input_length": "700"},
    "input_length: true is refused: Input should be a valid integer": mooncake() | {"input_length": True},
    "output_length: 1000000000000000000000000000000000000... is refused: Input should be less": mooncake(output=10**50),
    "hash_ids: there are 2 ids, but input_length 1025 needs 3": mooncake(length=1025),
    "hash_ids: there are 3 ids, but input_length 1024 needs 2": mooncake(length=1024, ids=[1, 2, 3]),
    "hash_ids[1]: 2.5 is refused: Input should be a valid integer": mooncake(ids=[1, 2.5]),  # type: ignore[list-item]
    "hash_ids: 2097152 is above 2097151": mooncake(ids=[1, 2**21]),
    'hash_ids: "1 2" is refused: Input should be a valid list': mooncake() | {"hash_ids": "1 2"},
    "timestamp: -1 is refused: Input should be greater than or equal to 0": mooncake(timestamp=-1),
    "timestamp: null is refused: Input should be a valid number": mooncake() | {"timestamp": None},
    "timestamp: 0.099 s is before that of the previous request": mooncake(timestamp=99),
    "the line is not a JSON object": [1, 2],
}


@pytest.mark.parametrize("cause", MOONCAKE_FAULTS)
def test_invalid_mooncake_request_is_refused_with_file_line_and_cause(tmp_path: Path, cause: str) -> None:
    good = mooncake(timestamp=100)
    path = written(tmp_path, good, good, MOONCAKE_FAULTS[cause], good)
    names, fault = read_until_fault(path)
    assert names == ["line-1", "line-2"]
    assert f"{path}, line 3: {cause}" in str(fault)
    assert fault.metadata == {"file": str(path), "line": "3"}
    assert fault.reason == "MALFORMED_TRACE"


WEKA_FAULTS: dict[str, dict[str, Any]] = {
    "requests[1].in: Field required": weka("a", turn(0), without(turn(1), "in")),
    "requests[0].t: -2 is refused: Input should be greater": weka("a", turn(-2)),
    "hash_ids: there are 2 ids, but 200 prompt tokens have 3 full blocks": weka("a", turn(0, tail=72)),
    "requests[0].requests[1].out: Field required": weka(
        "a", {"t": 1.0, "requests": [turn(0), without(turn(1), "out")]}
    ),
    "requests[0]: 7 is refused: Input should be a valid dictionary": weka("a", 7),  # type: ignore[arg-type]
    "requests: 3 is refused: Input should be a valid list": weka("a") | {"requests": 3},
    "block_size: 0 is refused: Input should be greater": weka("a", turn(0)) | {"block_size": 0},
    "hash_id_scope: \"global\" is refused: Input should be 'local'": weka("a", turn(0)) | {"hash_id_scope": "global"},
    "id: Field required": without(weka("a", turn(0)), "id"),
    'id: "" is refused: String should have at least 1 character': weka("", turn(0)),
    "out: the session generates more than": weka("a", turn(0, out=2**30), turn(1)),
}


@pytest.mark.parametrize("cause", WEKA_FAULTS)
def test_invalid_weka_session_is_refused_with_file_line_and_cause(tmp_path: Path, cause: str) -> None:
    path = written(tmp_path, weka("good", turn(0)), WEKA_FAULTS[cause])
    names, fault = read_until_fault(path)
    assert names == ["good/0"]
    assert f"{path}, line 2: {cause}" in str(fault)


BROKEN_TEXTS = {
    "cut": b'{"timestamp": 0, "input_l',
    "not a number": b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
    "not UTF-8": b'{"\xff": 1}',
    "too deep": b"[" * 200_000,
    "too many digits": b'{"timestamp": ' + b"9" * 5_000 + b"}",
}


@pytest.mark.parametrize("text", BROKEN_TEXTS.values(), ids=BROKEN_TEXTS.keys())
def test_trace_line_of_malformed_json_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    path = written(tmp_path, mooncake())
    path.write_bytes(path.read_bytes() + text)
    names, fault = read_until_fault(path)
    assert names == ["line-1"]
    assert "line 2: broken JSON" in str(fault)


def cut_files(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    records = (mooncake(timestamp=t, ids=[t, t * t * 7_919 % 500_009]) for t in range(4_000))
    plain = written(tmp_path, *records).read_bytes()
    yield tmp_path / "cut.gz", gzip.compress(plain)
    yield tmp_path / "cut.zst", zstandard.compress(plain)


def test_truncated_trace_yields_the_requests_before_the_end(tmp_path: Path) -> None:
    for path, stored in cut_files(tmp_path):
        path.write_bytes(stored[:-9])
        names, fault = read_until_fault(path)
        assert "the compressed file is cut off" in str(fault)
        assert fault.metadata["line"] == str(len(names) + 1)
        assert 0 < len(names) <= 4_000


def test_damaged_trace_bytes_are_refused_by_name(tmp_path: Path) -> None:
    for path, stored in cut_files(tmp_path):
        middle = len(stored) // 2
        path.write_bytes(stored[:middle] + bytes(64) + stored[middle + 64 :])
        with pytest.raises(MalformedTrace, match=r"compressed data are damaged|broken JSON|hash_ids"):
            read(path)


def test_empty_and_missing_traces_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(MalformedTrace, match="line 1: the file is empty"):
        TraceFile(tmp_path / "empty")
    with pytest.raises(NotFound, match=r"nothing\.jsonl"):
        TraceFile(tmp_path / "nothing.jsonl")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        TraceFile(tmp_path)


def test_trace_line_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 10_000)
    path = written(tmp_path, mooncake(), mooncake(length=512 * 9_000, ids=range(9_000)))
    names, fault = read_until_fault(path)
    assert names == ["line-1"]
    assert "line 2: the line has more than 10000 bytes" in str(fault)


def test_zstd_trace_without_the_package_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, mooncake())
    path.write_bytes(zstandard.compress(path.read_bytes()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(FailedPrecondition, match="zstandard"):
        TraceFile(path)


@pytest.mark.parametrize("spacing_s", [-1.0, float("nan")])
def test_negative_session_spacing_is_refused(tmp_path: Path, spacing_s: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        TraceFile(written(tmp_path, weka("a", turn(0))), session_spacing_s=spacing_s)
    assert refused.value.field == "session_spacing_s"
