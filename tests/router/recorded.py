"""What vLLM 0.33.0 answered, from the recordings of its manager: its cache events, and a hit after each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens, split_hashes
from kvplane.base.step import ExtraKeys, Multimodal
from kvplane_fleet.hits import Asked, Claim, HitRule, claims
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex
from tests.conformance.header import read_records, trace_spec
from tests.conformance.replay import segment_tokens

CONFORMANCE = Path(__file__).parents[1] / "conformance"
TRACES = sorted(path for folder in ("traces", "kinds", "scenarios") for path in (CONFORMANCE / folder).glob("*.gz"))


def key_of(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


@dataclass
class Follower:
    """Applies recorded events to an index of one place, and claims hits."""

    spec: ReplicaSpec
    index: Index = field(default_factory=Index)
    compiled: NativeIndex = field(default_factory=NativeIndex)

    def __post_init__(self):
        self.rule = HitRule(self.spec)
        self.scheme = HashScheme.of(self.spec)
        self.cells = [self.index.new_cell() for _ in self.spec.groups]
        assert self.cells == [self.compiled.new_cell() for _ in self.spec.groups]
        self.unknown = 0

    def apply(self, events: list[Any]) -> None:
        for kind, *values in events:
            if kind == "C":
                for cell in self.cells:
                    self.index.clear(cell)
                    self.compiled.clear(cell)
                continue
            keys = [int(text, 16) for text in values[3 if kind == "S" else 1]]
            if kind == "S":
                self.index.add(self.cells[values[0]], keys)
                self.compiled.add(self.cells[values[0]], keys)
            else:
                self.unknown += self.index.remove(self.cells[values[0]], keys)
                self.compiled.remove(self.cells[values[0]], keys)

    def claim(self, tokens: list[int], extra: ExtraKeys) -> Claim:
        digests = split_hashes(RequestHasher(self.scheme, extra).append(pack_tokens(tokens)), self.scheme.digest.size)
        keys, asked = [key_of(one) for one in digests], [Asked(self.rule, self.cells)]
        (claim,), compiled = (claims(one, keys, len(tokens), asked) for one in (self.index, self.compiled))
        assert compiled == [claim]
        return claim


@dataclass
class Request:
    tokens: list[int]
    extra: ExtraKeys
    skips: bool


def look_ups(path: Path) -> Iterator[tuple[Follower, int, Claim]]:
    """The recorded hit and the claim of each look-up in a recording."""
    records = read_records(path)
    follower = Follower(trace_spec(next(records)))
    requests: dict[str, Request] = {}
    for record in records:
        name: str = record.get("id", "")
        if record["op"] == "new":
            items = tuple(Multimodal(*item) for item in record["mm"] or ())
            lora = (record["lora"], f"/l/{record['lora']}") if record["lora"] else None
            extra = ExtraKeys(lora, record["salt"] or "", items)
            requests[name] = Request(segment_tokens(record["segs"]), extra, bool(record.get("skip")))
        elif record["op"] == "tok":
            requests[name].tokens += record["t"]
        elif record["op"] == "lookup" and not requests[name].skips:
            yield follower, record["hit"], follower.claim(requests[name].tokens, requests[name].extra)
        follower.apply(record.get("ev", ()))
