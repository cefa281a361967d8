"""The readers on the public traces themselves. Skipped with a reason where the traces are absent."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from kvplane.base.hashing import HashScheme, RequestHasher, split_hashes
from kvplane_tools.replay.workloads import TraceFile, TraceKind

BLOCK = 512


@dataclass(frozen=True)
class Expected:
    """Counts from the description of the traces; `hit_blocks` in a cache that holds everything."""

    requests: int
    blocks: int
    full_blocks: int
    hit_blocks: int


MOONCAKE = {
    "mooncake_conversation_first_half.jsonl.gz": Expected(5_606, 144_280, 138_687, 49_050),
    "mooncake_synthetic_first_half.jsonl.gz": Expected(1_925, 47_171, 45_246, 14_786),
}


@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake_trace_has_its_published_blocks_and_hits(workloads: Path, name: str) -> None:
    """One request at a time, hitting at most its length - 1: the last token is always computed."""
    scheme, seen = HashScheme.named(BLOCK), set[bytes]()
    requests = blocks = full_blocks = hit_blocks = 0
    with TraceFile(workloads / name) as trace:
        for request in trace:
            hashes = split_hashes(RequestHasher(scheme).append(request.prompt.packed()), scheme.digest.size)
            requests += 1
            blocks += -(-len(request.prompt) // BLOCK)
            full_blocks += len(hashes)
            usable = hashes[: (len(request.prompt) - 1) // BLOCK]
            hit_blocks += next((at for at, key in enumerate(usable) if key not in seen), len(usable))
            seen.update(hashes)
    assert Expected(requests, blocks, full_blocks, hit_blocks) == MOONCAKE[name]


def test_first_weka_sessions_overlap_and_share_no_tokens(workloads: Path) -> None:
    with TraceFile(workloads / "weka_claude_code_share.jsonl.zst") as trace:
        assert trace.kind is TraceKind.WEKA
        requests = list(islice(trace, 300))
        assert trace.bytes_read < trace.size_bytes / 2
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert len({request.name for request in requests}) == 300
    sessions_by_prefix: dict[bytes, set[str]] = {}
    for request in requests:
        sessions_by_prefix.setdefault(request.prompt.packed()[: 4 * 64], set()).add(request.session)
    assert len({request.session for request in requests}) > 3
    assert all(len(sessions) == 1 for sessions in sessions_by_prefix.values())
