"""The reader of a damaged trace yields valid requests and raises at most one error by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvplane_tools.replay.workloads import MalformedTrace, TraceFile

TURN = {"t": 1.5, "type": "n", "in": 130, "out": 3, "hash_ids": [1, 2]}
SESSION = {
    "id": "s",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [TURN, {"t": 9.0, "type": "subagent", "requests": [TURN, TURN]}],
}
REQUEST = {"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}

EXTREMES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**64,
    10**400,
    0.5,
    1e300,
    "",
    "x",
    [],
    [[]],
    {},
    [2**40],
]


def outcome(path: Path, data: bytes) -> str:
    """How reading ends: "" or the fault."""
    path.write_bytes(data)
    try:
        with TraceFile(path, session_spacing_s=1) as trace:
            for request in trace:
                assert len(request.prompt.packed()) == 4 * len(request.prompt) > 0
    except MalformedTrace as fault:
        return str(fault)
    return ""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "trace"


@given(
    st.sampled_from([REQUEST, SESSION]),
    st.sampled_from([bytes, gzip.compress, zstandard.compress]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 10_000),
)
def test_trace_with_changed_or_missing_bytes_is_read_or_refused(
    path: Path, record: dict[str, Any], pack: Any, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(pack(b"".join(json.dumps(record).encode() + b"\n" for _ in range(3))))
    for at, value in changes:
        data[at % len(data)] = value
    fault = outcome(path, bytes(data[:end]))
    assert fault == "" or f"{path}, line " in fault


def with_extreme(record: Any, steps: list[int], value: Any) -> Any:
    """A copy in which one value, found by descending, is another."""
    if not steps or not isinstance(record, dict | list) or not record:
        return value
    keys = list(record) if isinstance(record, dict) else list(range(len(record)))
    chosen = keys[steps[0] % len(keys)]
    copy = dict(record) if isinstance(record, dict) else list(record)
    copy[chosen] = with_extreme(record[chosen], steps[1:], value)
    return copy


@given(
    st.sampled_from([REQUEST, SESSION]),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.sampled_from(EXTREMES),
)
def test_extreme_values_are_read_or_refused(path: Path, record: dict[str, Any], steps: list[int], value: Any) -> None:
    damaged = with_extreme(record, steps, value)
    data = b"".join(json.dumps(line).encode() + b"\n" for line in (record, damaged))
    fault = outcome(path, data)
    assert fault == "" or f"{path}, line 2" in fault
