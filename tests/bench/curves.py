"""Hits over the size of the pool for LRU, HAZARD and the optimum on three traces, by a model.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.curves                    7 minutes of CPU time
    python -m tests.bench.curves --part second --chart curves.svg            the first half of each trace left out

The model is a set of blocks in which one request after the other is held, uses all blocks of its prompt, and evicts
what does not fit: by `hazard.Learner`, which also decides whether LRU or HAZARD leads, as in the core. It has no steps,
chunks or unkeyed blocks, and so takes a tenth of the time of `tests.bench.policies`, whose replays in the core it
meets within 0.2 points on conversation and Weka, and within 0.6 on synthetic. The optimum knows the future, and holds a
request's own blocks too: it is the bound of what any policy of an engine can hit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane_replay.workloads import TraceRequest
from kvplane_service.cli.plots import new_figure, save
from kvplane_service.core.hazard import PIECES, History, Learner
from tests.bench.machine import machine_line
from tests.bench.policies import FULL_ONLY, TRACES, replica_of, requests_of
from tests.conftest import workloads_folder, workloads_line

POOLS = {
    "conversation": (500, 1000, 3000, 6000, 10_000, 30_000, 50_000),
    "synthetic": (500, 1000, 3000, 6000, 10_000, 20_000),
    "Weka": (500, 1000, 3000, 6000, 10_000),
}


Longs: TypeAlias = npt.NDArray[np.int64]


class Chain(NamedTuple):
    """A prompt: the digests of its full blocks, and its tokens."""

    digests: list[bytes]
    num_tokens: int


class Hits(NamedTuple):
    """Percentages of the tokens that hit."""

    lru: float
    hazard: float
    optimum: float


def chains_of(trace: Iterable[TraceRequest], size: int) -> list[Chain]:
    """Return the prompts of a trace."""
    scheme = HashScheme.of(replica_of(FULL_ONLY, size, 2))
    width, chains = scheme.digest.size, []
    for request in trace:
        raw = RequestHasher(scheme).append(request.prompt.packed())
        chains.append(Chain([raw[at : at + width] for at in range(0, len(raw), width)], len(request.prompt)))
    return chains


class Pool:
    """The blocks of one policy, numbered; `owner` and `depth` are those of `History.order`, shared by all pools."""

    def __init__(self, num_blocks: int, num_numbers: int) -> None:
        self._places, self._resident, self._count = num_blocks, np.zeros(num_numbers, np.bool_), 0
        self.num_hit = 0

    def serve(self, blocks: Longs, num_usable: int) -> int:
        """Use the blocks of a prompt, of which its last token leaves `num_usable` to hit; returns how many hit."""
        found = self._resident[blocks[:num_usable]]
        hits = len(found) if found.all() else int(found.argmin())
        self._count += len(blocks) - int(np.count_nonzero(self._resident[blocks]))
        self._resident[blocks] = True
        self.num_hit += hits
        return hits

    def shrink(self, history: History, owner: Longs, depth: Longs, *, by_age: bool) -> None:
        """Evict what does not fit, but none of the last request's blocks."""
        at = np.flatnonzero(self._resident) if self._count > self._places else np.zeros(0, np.int64)
        at = at[owner[at] < history.now * PIECES]
        missing = min(self._count - self._places, len(at))
        if missing > 0:
            ages = np.lexsort((-depth[at], owner[at] // PIECES))[:missing] if by_age else None
            gone = at[history.order(owner[at], depth[at], missing) if ages is None else ages]
            self._resident[gone] = False
            self._count -= missing


def hits_of(chains: Sequence[Chain], size: int, num_blocks: int) -> Hits:
    """Return what the policies hit of these prompts in a pool."""
    numbers: dict[bytes, int] = {}
    for chain in chains:
        for digest in chain.digests:
            numbers.setdefault(digest, len(numbers))
    learner, lru, hazard = Learner(num_blocks, size), Pool(num_blocks, len(numbers)), Pool(num_blocks, len(numbers))
    owner, depth = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
    for chain in chains:
        blocks = np.array([numbers[digest] for digest in chain.digests], np.int64)
        usable = (chain.num_tokens - 1) // size
        lru.serve(blocks, usable)
        num_hit = hazard.serve(blocks, usable) * size
        prompt = learner.admit(chain.digests, "", chain.num_tokens, num_hit)
        ends = (np.arange(len(blocks)) + 1) * size
        pieces = (ends <= prompt.seen_end).astype(np.int64) + (ends <= prompt.many_end)
        owner[blocks], depth[blocks] = prompt.number * PIECES + pieces, ends
        lru.shrink(learner.history, owner, depth, by_age=True)
        hazard.shrink(learner.history, owner, depth, by_age=not learner.leads)
    tokens = sum(chain.num_tokens for chain in chains)
    return Hits(
        *(100 * one * size / tokens for one in (lru.num_hit, hazard.num_hit, optimum(chains, size, num_blocks)))
    )


def optimum(chains: Sequence[Chain], size: int, num_blocks: int) -> int:
    """Return how many blocks hit if those are evicted that are used again last; a request holds its own."""
    later: dict[bytes, int] = {}
    following = list[list[int]]()
    for number in range(len(chains) - 1, -1, -1):
        digests = chains[number].digests
        following.append([later.get(digest, len(chains)) for digest in digests])
        later.update(dict.fromkeys(digests, number))
    resident, farthest, hits = dict[bytes, int](), list[tuple[int, int, bytes]](), 0
    for chain, uses in zip(chains, reversed(following), strict=True):
        usable = chain.digests[: (chain.num_tokens - 1) // size]
        hits += next((at for at, digest in enumerate(usable) if digest not in resident), len(usable))
        resident.update(dict.fromkeys(chain.digests, -1))  # held
        while len(resident) > num_blocks and farthest:
            use, _, digest = heappop(farthest)
            if resident.get(digest) == -use:
                del resident[digest]
        for depth, (digest, use) in enumerate(zip(chain.digests, uses, strict=True)):
            resident[digest] = use
            heappush(farthest, (-use, -depth, digest))
    return hits


def draw(found: dict[str, dict[int, Hits]], path: Path) -> None:
    """Write the chart."""
    figure = new_figure()
    figure.set_size_inches(10, 3.6)
    for axes, (trace, by_size) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for policy, style in (("optimum", ":"), ("hazard", "o-"), ("lru", "s--")):
            axes.plot(list(by_size), [getattr(one, policy) for one in by_size.values()], style, label=policy)
        axes.set_xscale("log")
        axes.set(title=trace, xlabel=f"blocks of {TRACES[trace][1]} tokens", ylabel="% of prompt tokens that hit")
        axes.legend()
    save(figure, path)


def main() -> int:
    """Compute, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "first", "second"], default="all", help="which half of each trace")
    parser.add_argument("--chart", type=Path, help="write a chart to this .svg, .png or .pdf file")
    options = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line(), file=sys.stderr)
        return 2
    print(machine_line(), "", "| trace | blocks | lru | hazard | optimum |", "|---|---|---|---|---|", sep="\n")
    found: dict[str, dict[int, Hits]] = {}
    for trace, sizes in POOLS.items():
        with ExitStack() as files:
            chains = chains_of(requests_of(folder, trace, None, files), TRACES[trace][1])
        half = len(chains) // 2
        chains = {"all": chains, "first": chains[:half], "second": chains[half:]}[options.part]
        for size in sizes:
            hits = found.setdefault(trace, {})[size] = hits_of(chains, TRACES[trace][1], size)
            print(f"| {trace} | {size:,} | {hits.lru:.2f} | {hits.hazard:.2f} | {hits.optimum:.2f} |", flush=True)
    if options.chart is not None:
        draw(found, options.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
