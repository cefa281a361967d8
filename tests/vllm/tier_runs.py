"""Engines with tiers in processes of their own, and what they answer compared with what is right."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tests.vllm import processes

# By model: blocks of the device, so few that it preempts, and host memory, so small that most hits are on the disk.
POOLS = {"llama": 26, "gptoss": 44, "gemma3": 100, "mistral": 16, "gdn": 34, "mamba2": 14}
SMALL = {"llama": "3MiB", "gptoss": "3MiB", "gemma3": "2MiB", "mistral": "3MiB", "gdn": "4MiB", "mamba2": "512KiB"}
LARGE, DISK_SIZE = "64MiB", "200MiB"
# Models that LMCache's connector takes, and who copies pages there, as LMCache names it. It has no other way for
# several groups of layers.
LMCACHE_MODES = {"llama": "auto", "gptoss": "lmcache_driven"}


def options(model: str, tier: str, folder: str, **more: str) -> str:
    """Return the options of the connector as JSON."""
    disk = {"host": SMALL[model], "disk": folder, "disk_size": DISK_SIZE}
    return json.dumps(({"host": LARGE} if tier == "host" else disk) | more)


def run(model: str, kind: str, seeds: str, *target: str, pool: int = 0, **given: Any) -> dict[str, Any]:
    """Return what an engine did. `given`: as of `processes.run`."""
    arguments = model, kind, pool or POOLS[model], seeds, *target
    found: dict[str, Any] = processes.run("tiers_live.py", *arguments, **given)
    return found | found.get("counts", {})


def run_with_lmcache(model: str, kind: str, seeds: str) -> dict[str, Any]:
    """Return what an engine with LMCache's connector did, whose server has memory for everything."""
    with processes.LmCache(LMCACHE_MODES[model]) as server:
        return run(model, kind, seeds, '"lmcache"', env=server.env)


@cache
def computed(model: str, seeds: str, ranks: str = "") -> dict[str, Any]:
    """Return the answers of a stock engine that computes each prompt alone; `ranks`: "tp2" or none."""
    return run(model, f"stock {ranks}".strip(), seeds, "null", pool=2000)


def compare(found: dict[str, Any], right: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many tokens differ, in how many answers, and of how many."""
    pairs = [
        (one, one if one in expected["tokens"][prompt] else expected["tokens"][prompt][0])
        for seed, expected in zip(found["seeds"], right["seeds"], strict=False)
        for prompt, answers in seed["tokens"].items()
        for one in answers
    ]
    tokens = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))
    return tokens, sum(one != other for one, other in pairs), len(pairs)


def left_of(model: str, found: dict[str, Any]) -> dict[str, int]:
    """Return what an engine that ended well has left, by name; none if all is as it should be."""
    left = found["left"] | {"blocks": POOLS[model] - 1 - found["free"], "mismatched": found["mismatched"]}
    return {name: number for name, number in left.items() if number}
