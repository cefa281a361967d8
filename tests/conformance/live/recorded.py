"""Asks the reference for the operations of a recording and compares its answers with the recorded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conformance.header import read_records
from tests.conformance.live.peer import Peer
from tests.conformance.operations import OPERATIONS

DERIVED = {
    "coordinator", "partial_hash_hits", "cache_hit_alignment_tokens", "needs_kv_cache_zeroing", "attention_groups",
    "eagle_group_ids", "drop_eagle_group_ids", "none_hash",
}  # fmt: skip


def compare_recording(peer: Peer, path: Path) -> str | None:
    """The first difference, None when there is none."""
    records = read_records(path)
    header = next(records)
    answer = peer.ask({name: value for name, value in header.items() if name not in DERIVED})
    if answer != header:
        names = sorted(name for name in header if answer.get(name) != header[name])
        return f"header: {names}"
    for line, record in enumerate(records, 2):
        if record["op"] == "end":
            return None
        answer = peer.ask(_inputs(record))
        if answer != record:
            names = sorted(name for name in answer | record if answer.get(name) != record.get(name))
            return f"line {line}: {names}: asked {_inputs(record)}"
    return "no end"


def _inputs(record: dict[str, Any]) -> dict[str, Any]:
    inputs = OPERATIONS[record["op"]].all_inputs | {"op"}
    return {name: value for name, value in record.items() if name in inputs}
