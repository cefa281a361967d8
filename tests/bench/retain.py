"""Hits with retained prefixes, on the first half of Mooncake's conversation trace.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.retain    prints a table, writes results/retain.md (2 minutes)

The prompts are replayed one after the other, as by `tests.bench.policies`. Every 100 steps the chosen prefixes are
retained: those for which most tokens are computed again where nothing is cached (tokens of the prefix x later prompts
that begin with it). None is the beginning of another one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvplane.base.retain import Retain
from kvplane.base.step import Admit, End, Facts, News, Part
from kvplane_replay.workloads import TraceFile
from tests.bench.machine import machine_line
from tests.bench.policies import FULL_ONLY, TRACES, Chain, CoreSession, chains_of, replica_of
from tests.conftest import workloads_folder, workloads_line

RESULTS = Path(__file__).parent / "results" / "retain.md"
EVERY, PERCENT, FOREVER = 100, 25, 1 << 40


def most_shared(chains: Sequence[Chain], most: int) -> list[list[bytes]]:
    """Return prefixes of the trace that have at most `most` blocks together."""
    uses = Counter(digest for chain in chains for digest in chain.digests)
    ends = {digest: chain.digests[: at + 1] for chain in chains for at, digest in enumerate(chain.digests)}
    chosen, blocks = list[list[bytes]](), set[bytes]()
    for prefix in sorted(ends.values(), key=lambda one: -len(one) * (uses[one[-1]] - 1)):
        if uses[prefix[-1]] > 1 and prefix[-1] not in blocks and len(blocks.union(prefix)) <= most:
            chosen = [one for one in chosen if prefix[: len(one)] != one] + [prefix]
            blocks.update(prefix)
    return chosen


def replay(chains: Sequence[Chain], num_blocks: int, size: int, prefixes: Sequence[list[bytes]]) -> tuple[float, float]:
    """Return the percentage of tokens that hit, of all prompts and of prefixes that are chosen, which are
    retained if `num_blocks` is positive.
    """
    session = CoreSession(replica_of(FULL_ONLY, size, abs(num_blocks)))
    heads = {prefix[-1]: len(prefix) for prefix in prefixes}
    hit, asked, of_heads, asked_heads = 0, 0, 0, 0
    for number, chain in enumerate(chains):
        length = max((heads[digest] for digest in chain.digests if digest in heads), default=0)
        part = Part(
            news=News([0], [chain.num_tokens], num_hashes=[len(chain.digests)], hashes=b"".join(chain.digests)),
            admit=Admit([0]),
        )
        if number % EVERY == 0 and num_blocks > 0:
            part.retain = Retain(
                [len(prefix) for prefix in prefixes],
                b"".join(digest for prefix in prefixes for digest in prefix),
                until_ns=[number + FOREVER] * len(prefixes),
                percent=[PERCENT] * len(prefixes),
                now_ns=[number],
            )
        session.submit(part)
        found = session.receive().parts[0].admit_hit[0]
        session.submit(Part(facts=Facts([0], end=[End.FREE])))
        hit, asked = hit + found, asked + chain.num_tokens
        if length:
            of_heads, asked_heads = of_heads + min(found, length * size), asked_heads + length * size
    return 100 * hit / asked, 100 * of_heads / max(1, asked_heads)


def table(chains: Sequence[Chain], size: int, pools: Sequence[int]) -> list[str]:
    """Return the lines of the table."""
    heads = ("pool, blocks", "prefixes", "their blocks", "hits", "with them retained", "of the prefixes", "with them")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for num_blocks in pools:
        for percent in (5, PERCENT):
            prefixes = most_shared(chains, num_blocks * percent // 100)
            plain, retained = (replay(chains, sign * num_blocks, size, prefixes) for sign in (-1, 1))
            blocks = len({digest for prefix in prefixes for digest in prefix})
            shares = [f"{one:.1f} %" for one in (plain[0], retained[0], plain[1], retained[1])]
            lines.append(f"| {' | '.join(map(str, (num_blocks, len(prefixes), blocks, *shares)))} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--limit", type=int, help="prompts of the trace that are replayed")
    parser.add_argument("--no-write", action="store_true", help="write no file")
    options = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line())
        return
    name, size = TRACES["conversation"]
    chains = chains_of(TraceFile(folder / name), size)[: options.limit]
    lines = table(chains, size, (1000, 3000))
    if not options.no_write:
        RESULTS.write_text(f"# Retained prefixes\n\n{HEAD}\n\n{machine_line()}\n\n" + "\n".join(lines) + "\n")


HEAD = (__doc__ or "").split("\n\n")[-1].strip()

if __name__ == "__main__":
    main()
