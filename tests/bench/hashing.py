"""Time to hash a prompt, compiled and in Python, compared with one raw hash over the same bytes.

    python -m tests.bench.hashing

Writes results/hashing.md. A *raw* hash is hashlib's SHA-256, or xxhash's XXH3, of one message as long as those of
all blocks together. A *turn* is the prompt behind its first nine tenths, which a `HashMemo` has hashed. Python hashes
the forms of vLLM as vLLM does: it serializes and hashes block by block. SHA-256 hashes 64 bytes at a time and adds 9 or
more to each message: *padded* is a raw hash of as many pieces as the blocks take. All are measured in turn; the figures
are medians.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashMemo, HashScheme, algorithms, block_digest, pack_tokens, unpack_tokens
from kvplane.base.hashing.algorithms import ReferenceHash, python_digest
from tests.bench.machine import machine_line

RESULT = Path(__file__).parent / "results" / "hashing.md"
TOKENS, BLOCK_SIZES, ROUNDS, VOCABULARY = 6144, (16, 64, 512), 200, 128_000
LONG_TOKENS, LONG_ROUNDS = 131_072, 20
HEAD_BYTES = 44  # of a block in kvplane's form: tag, two lengths, parent


def message_bytes(algorithm: HashAlgorithm, packed: bytes, block_size: int) -> list[int]:
    """The length of what is hashed for each block."""
    digest = python_digest(algorithm)
    blocks = [packed[at : at + 4 * block_size] for at in range(0, len(packed), 4 * block_size)]
    if isinstance(digest, ReferenceHash):
        return [len(digest.serialize(bytes(digest.size), unpack_tokens(block), None)) for block in blocks]
    return [HEAD_BYTES + len(block) for block in blocks]


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of each call, measured in turn."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter_ns()
            call()
            took[name].append((time.perf_counter_ns() - begin) / 1e3)
    return {name: statistics.median(values) for name, values in took.items()}


def row(algorithm: HashAlgorithm, block_size: int, packed: bytes, rounds: int) -> str:
    """A line of a table."""
    sizes = message_bytes(algorithm, packed, block_size)
    raw, padded = bytes(sum(sizes)), bytes(sum((size + 72) // 64 * 64 for size in sizes))
    python = python_digest(algorithm)
    digest = python.digest if isinstance(python, ReferenceHash) else lambda data: sha256(data).digest()
    scheme = HashScheme(block_digest(algorithm), bytes(python.size), block_size)
    memos = [HashMemo(scheme) for _ in range(rounds)]
    for memo in memos:
        memo.hash_prompt(packed[: len(packed) // 40 * 36])
    us = medians(
        {
            "turn": lambda: memos.pop().hash_prompt(packed),
            "used": partial(block_digest(algorithm).hash_run, bytes(python.size), packed, block_size),
            "python": partial(python.hash_run, bytes(python.size), packed, block_size),
            "raw": partial(digest, raw),
            "padded": partial(digest, padded),
        },
        rounds,
    )
    compared = ("python", "raw") if algorithm in algorithms.WITHOUT_SHA256 else ("python", "raw", "padded")
    ratios = " | ".join(f"{us['used'] / us[name]:.2f}" for name in compared) + " | –" * (3 - len(compared))
    figures = " | ".join(f"{us[name]:.0f}" for name in ("used", "turn", "python", "raw"))
    return f"| {algorithm.value} | {block_size} | {figures} | {ratios} |"


def main() -> None:
    """Measure, print and write the table."""
    text = f"# Hashing a prompt\n\n{machine_line()}; `python -m tests.bench.hashing`\n"
    for tokens, rounds, sizes in ((TOKENS, ROUNDS, BLOCK_SIZES), (LONG_TOKENS, LONG_ROUNDS, BLOCK_SIZES[:1])):
        packed = pack_tokens(random.Random(1).randrange(VOCABULARY) for _ in range(tokens))
        names = ["form", "block size", "us", "turn", "in Python", "raw", "/ Python", "/ raw", "/ raw, padded"]
        text += f"\n## {tokens:,} tokens\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|\n"
        rows = [row(algorithm, size, packed, rounds) for size in sizes for algorithm in algorithms.FORMS]
        text += "\n".join(rows) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
