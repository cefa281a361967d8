"""Every block hash that the reference recorded is reproduced from the tokens and keys of the recording."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import ExtraKeys, Multimodal

RECORDINGS = Path(__file__).parent.parent / "conformance"


def recorded_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def recorded_prompt(segments: list[list[int]]) -> list[int]:
    """FORMAT.md, "Tokens and hashes"."""
    return [(s * 1_000_003 + i * 7_919) % 50_021 for s, n in segments for i in range(n)]


def recorded_keys(op: dict[str, Any]) -> ExtraKeys:
    lora = op.get("lora")
    items = tuple(Multimodal(*item) for item in op.get("mm") or ())
    return ExtraKeys((lora, f"/l/{lora}") if lora else None, op.get("salt") or "", items)


def check_hashes(hasher: RequestHasher, op: dict[str, Any]) -> None:
    tail = hasher.tail
    assert (tail.num_blocks, tail.digest[-8:].hex() if tail.num_blocks else None) == (
        op["nh"],
        op["lasth"],
    ), op


def replay_hashes(path: Path) -> int:
    """Checks every `new` and `tok` of an operation trace; how many there were."""
    lines = recorded_lines(path)
    header = next(lines)
    scheme = HashScheme.named(
        header["manager_args"]["hash_block_size"],
        HashAlgorithm(header["hash_algo"]),
        header["none_hash_seed"],
    )
    assert scheme.none_hash.hex() == header["none_hash"]
    hashers: dict[str, RequestHasher] = {}
    checked = 0
    for op in lines:
        if op["op"] not in ("new", "tok"):
            continue
        if op["op"] == "new":
            hashers[op["id"]] = RequestHasher(scheme, recorded_keys(op))
        tokens = recorded_prompt(op["segs"]) if op["op"] == "new" else op["t"]
        hashers[op["id"]].append(pack_tokens(tokens))
        check_hashes(hashers[op["id"]], op)
        checked += 1
    return checked


def test_every_hash_of_the_operation_traces_is_reproduced() -> None:
    paths = sorted((RECORDINGS / "traces").glob("*.jsonl.gz"))
    assert len(paths) == 35
    assert sum(map(replay_hashes, paths)) == 10_577


def test_every_prompt_hash_of_the_step_traces_is_reproduced() -> None:
    paths = sorted((RECORDINGS / "steps").glob("*.jsonl.gz"))
    assert len(paths) == 22
    checked = 0
    for path in paths:
        header, *steps = recorded_lines(path)
        if not header["enable_caching"]:  # the reference hashes nothing then
            continue
        scheme = HashScheme.named(header["hash_block_size"], HashAlgorithm(header["hash_algo"]))
        for op in (op for step in steps for op in step["in"] if op["op"] == "add"):
            hasher = RequestHasher(scheme, recorded_keys(op))
            hasher.append(pack_tokens(recorded_prompt(op["segs"])))
            check_hashes(hasher, op)
            checked += 1
    assert checked > 1_000
