"""Hits with retained prefixes, on the first half of Mooncake's conversation trace.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.retain    prints tables, writes results/retain.md (4 minutes)

The prompts are replayed one after the other, as by `tests.bench.policies`. Every 100 steps the chosen prefixes are
retained: those for which most tokens are computed again where nothing is cached (tokens of the prefix x later prompts
that begin with it). None is the beginning of another one.

With a host tier behind a pool of 1,000 blocks, whose jobs are done at once, they are chosen for 25 % of the host.
Nothing is retained; or what is on the device, at most 25 % of the pool; or the host retains 25 % of its slots too.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvplane.base.groups import ReplicaSpec, TierKind, TierSpec
from kvplane.base.sections import Retain
from kvplane.base.step import Admit, Cache, End, Facts, News, Part, PartResult, RowFlag, Run
from kvplane_tools.replay.workloads import TraceFile
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


class Serving:
    """An engine that computes one prompt at a time, and movers that do every job at once."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.session = CoreSession(spec)
        self.flags = [int(RowFlag.LOAD)] if spec.tiers else []
        self._done: list[int] = []

    def serve(self, chain: Chain, retain: Retain) -> int:
        """Return the tokens that hit."""
        digests = b"".join(chain.digests)
        news = News([0], [chain.num_tokens], num_hashes=[len(chain.digests)], hashes=digests)
        result = self._step(Part(news=news, admit=Admit([0], flags=self.flags), retain=retain))
        if result.admit_job and result.admit_job[0]:
            self._done.append(result.admit_job[0])
            self._step(Part(run=Run([0])))
        self._step(Part(facts=Facts([0], end=[End.FREE])))
        return result.admit_hit[0]

    def _step(self, part: Part) -> PartResult:
        part.cache = Cache(jobs_done=self._done)
        self.session.submit(part)
        (result,) = self.session.receive().parts
        self._done = list(result.orders.save_job)
        return result


def replay(
    chains: Sequence[Chain], spec: ReplicaSpec, prefixes: Sequence[list[bytes]], is_retained: bool
) -> tuple[float, float]:
    """Return the percentage of tokens that hit, of all prompts and of prefixes that are chosen."""
    engine, size = Serving(spec), spec.hash_block_size
    heads = {prefix[-1]: len(prefix) for prefix in prefixes}
    hit, asked, of_heads, asked_heads = 0, 0, 0, 0
    for number, chain in enumerate(chains):
        length = max((heads[digest] for digest in chain.digests if digest in heads), default=0)
        rows = Retain()
        if number % EVERY == 0 and is_retained:
            rows = Retain(
                [len(prefix) for prefix in prefixes],
                b"".join(digest for prefix in prefixes for digest in prefix),
                until_ns=[number + FOREVER] * len(prefixes),
                percent=[PERCENT] * len(prefixes),
                now_ns=[number],
            )
        found = engine.serve(chain, rows)
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
            spec = replica_of(FULL_ONLY, size, num_blocks)
            plain, retained = (replay(chains, spec, prefixes, is_retained) for is_retained in (False, True))
            blocks = len({digest for prefix in prefixes for digest in prefix})
            shares = [f"{one:.1f} %" for one in (plain[0], retained[0], plain[1], retained[1])]
            lines.append(f"| {' | '.join(map(str, (num_blocks, len(prefixes), blocks, *shares)))} |")
            print(lines[-1], flush=True)
    return lines


def table_of_tiers(chains: Sequence[Chain], size: int, hosts: Sequence[int]) -> list[str]:
    """Return the lines of the table with a host tier."""
    heads = ("host, slots", "prefixes", "their blocks", "retained", "hits", "of the prefixes")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for num_slots in hosts:
        prefixes = most_shared(chains, num_slots * PERCENT // 100)
        blocks = len({digest for prefix in prefixes for digest in prefix})
        for where, percent in (("nothing", 0), ("on the device", 0), ("on device and host", PERCENT)):
            tiers = (TierSpec(TierKind.HOST, num_slots, retained_percent=percent),)
            spec = replica_of(FULL_ONLY, size, 1000, tiers=tiers)
            shares = [f"{one:.1f} %" for one in replay(chains, spec, prefixes, where != "nothing")]
            lines.append(f"| {' | '.join(map(str, (num_slots, len(prefixes), blocks, where, *shares)))} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the tables, and write them."""
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
    lines = [*table(chains, size, (1000, 3000)), "", *table_of_tiers(chains, size, (1000, 3000, 9000))]
    if not options.no_write:
        RESULTS.write_text(f"# Retained prefixes\n\n{HEAD}\n\n{machine_line()}\n\n" + "\n".join(lines) + "\n")


HEAD = "\n\n".join((__doc__ or "").split("\n\n")[-2:]).strip()

if __name__ == "__main__":
    main()
