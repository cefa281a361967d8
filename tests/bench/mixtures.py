"""How far HAZARD falls below LRU on mixtures of traces and on traffic made against it: `make mixtures`.

    python -m tests.bench.mixtures --seeds 60                         KVPLANE_WORKLOADS=FOLDER adds mixtures of traces
    python -m tests.bench.mixtures --seeds 1 --first 17 --kinds echo  one case again

A seed draws a kind of traffic, its parts and the size of the pool. Both policies then serve it on a core, one prompt
after the other, each in one step. The goal is that HAZARD hits at most 0.15 points of the tokens less than LRU in pools
of 3,000 blocks or more, 0.5 in smaller ones; cases below it are marked and counted, since about 1 in 20 is, and
results/policies.md says why. Exits 1 if a case is more than 0.8 points below LRU, which none of a campaign was.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from heapq import merge
from itertools import accumulate
from random import Random
from typing import NamedTuple, TypeAlias

from kvplane.base.groups import EvictionPolicy
from tests.bench.curves import replica_for
from tests.bench.machine import machine_line
from tests.bench.policies import TRACES, Chain, percentage, prompts_of
from tests.conftest import workloads_folder, workloads_line

SIZE, WIDTH = 512, 32  # tokens of a block, bytes of a digest
POOLS = (500, 1000, 3000, 3000, 6000, 10_000, 20_000)
MADE_POOLS = (64, 200, 600, 3000)
LARGE, GOAL, GOAL_SMALL, MOST_BELOW = 3000, 0.15, 0.5, 0.8


Chains: TypeAlias = Sequence[Chain]


class Case(NamedTuple):
    """A drawn case."""

    name: str
    prompts: Chains
    num_blocks: int

    @property
    def goal(self) -> float:
        """Points by which HAZARD should be below LRU at most."""
        return GOAL if self.num_blocks >= LARGE else GOAL_SMALL


# -- mixtures of traces ------------------------------------------------------------------------------------------------


@cache
def trace_of(name: str) -> Chains:
    """Return the prompts of a public trace, as if all had blocks of the same size."""
    folder, size = workloads_folder(), TRACES[name][1]
    assert folder is not None
    return [chain._replace(num_tokens=chain.num_tokens * SIZE // size) for chain in prompts_of(folder, name, None)]


def of_domain(prompts: Chains, domain: str) -> Chains:
    """Return the prompts as content of another domain, which shares nothing with this one."""
    return [prompt._replace(domain=domain) for prompt in prompts]


def merged(one: Chains, other: Chains, scale: float = 1, shift_s: float = 0) -> Chains:
    """Return prompts of both by their arrival; that of the others is scaled, then shifted."""
    later = (prompt._replace(arrival_s=prompt.arrival_s * scale + shift_s) for prompt in other)
    return list(merge(one, later, key=lambda prompt: prompt.arrival_s))


def part(rng: Random, prompts: Chains) -> Chains:
    """Return at least 4/10 of the prompts in a row."""
    length = rng.randint(len(prompts) * 4 // 10, len(prompts))
    start = rng.randint(0, len(prompts) - length)
    return prompts[start : start + length]


def turned(rng: Random, one: Chains, _: Chains) -> Chains:
    """The end of a trace, then its beginning."""
    at = rng.randrange(len(one))
    return [*one[at:], *one[:at]]


def joined(rng: Random, one: Chains, other: Chains) -> Chains:
    """A part of one behind a part of the other."""
    return [*part(rng, one), *of_domain(part(rng, other), rng.choice(("", "d")))]


def interleaved(rng: Random, one: Chains, other: Chains) -> Chains:
    """Both at the same time, one of them slower or faster, and later."""
    shift = rng.choice((0, rng.random())) * one[-1].arrival_s
    return merged(part(rng, one), of_domain(part(rng, other), "d"), 2 ** rng.uniform(-2, 2), shift)


def alternating(rng: Random, one: Chains, other: Chains) -> Chains:
    """Some prompts of one, then some of the other, and so on."""
    sources, mixed, at, length = (part(rng, one), of_domain(part(rng, other), "d")), list[Chain](), 0, 0
    while at < max(map(len, sources)):
        length = rng.randint(20, 900)
        for source in sources:
            mixed += source[at : at + length]
        at += length
    return mixed


def echo(rng: Random, one: Chains, _: Chains) -> Chains:
    """A trace and, a while behind it, the same prompts."""
    return merged(one, one, rng.choice((1, 1, 2 ** rng.uniform(-1, 1))), rng.random() * one[-1].arrival_s)


MIXED: dict[str, Callable[[Random, Chains, Chains], Chains]] = {
    "part": lambda rng, one, _: part(rng, one),
    "turned": turned,
    "joined": joined,
    "interleaved": interleaved,
    "alternating": alternating,
    "echo": echo,
}


# -- traffic that is made against it -----------------------------------------------------------------------------------


def made(rng: Random, num_blocks: int) -> Iterator[Chain]:
    """Yield phases of some pools of look-ups each, in which other content returns than in the phase before."""
    last = list[list[object]]()  # documents of the phase before
    for number in range(rng.randint(3, 14)):
        looked_up, length = 0, rng.uniform(0.3, 9) * num_blocks
        kind = rng.choice(("read once", "read again", "in turn", "popular"))
        size, round_, documents = rng.randint(1, max(2, min(24, num_blocks // 6))), rng.uniform(0.3, 1.6), []
        in_turn = max(1, int(round_ * num_blocks / size))
        for at in range(1 << 20):
            if looked_up > length:
                break
            if kind == "read again" and last:
                name = last[at % len(last)]
            elif kind == "in turn":
                name = [number, at % in_turn]
            elif kind == "popular":
                name = [int(rng.paretovariate(1.1))]
            else:
                name = [number, at] if rng.random() < 0.6 else ["chat", rng.randrange(max(1, num_blocks // 40))]
            documents.append(name)
            looked_up += size
            digests = accumulate([*name, *range(size)], _digest, initial=b"")
            yield Chain([*digests][-size:], size * SIZE + 1)
        last = documents[-max(1, int(round_ * num_blocks / size)) :]


def _digest(parent: bytes, name: object) -> bytes:
    return blake2b(parent + repr(name).encode(), digest_size=WIDTH).digest()


# -- the campaign ------------------------------------------------------------------------------------------------------


def case_of(kind: str, seed: int) -> Case:
    """Draw a case."""
    rng = Random(f"{kind} {seed}")
    if kind == "made":
        num_blocks = rng.choice(MADE_POOLS)
        return Case(f"made {seed}, {num_blocks:,} blocks", list(made(rng, num_blocks)), num_blocks)
    one, other = rng.choices(("synthetic", "conversation", "Weka"), (3, 2, 1), k=2)
    prompts, num_blocks = MIXED[kind](rng, trace_of(one), trace_of(other)), rng.choice(POOLS)
    return Case(f"{kind} {seed}: {one}, {other}, {num_blocks:,} blocks", prompts, num_blocks)


def gain_of(case: Case) -> float:
    """Return the percentage of the tokens that hit with HAZARD, less that with LRU."""
    policies = (EvictionPolicy.LRU, EvictionPolicy.HAZARD)
    lru, hazard = (percentage(case.prompts, replica_for(SIZE, case.num_blocks, policy)) for policy in policies)
    return hazard - lru


def measured(job: tuple[str, int]) -> tuple[str, float, float]:
    """Return the name of a case, its gain and its goal."""
    case = case_of(*job)
    return case.name, gain_of(case), case.goal


def main() -> int:
    """Measure cases; mark those below their goal, and print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kinds", nargs="+", choices=[*MIXED, "made"], default=[*MIXED, "made"])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    print(machine_line(), workloads_line(), sep="\n")
    kinds = options.kinds if workloads_folder() else [kind for kind in options.kinds if kind not in MIXED]
    jobs = [(kind, options.first + number) for number in range(options.seeds) for kind in kinds]
    gains: dict[str, list[float]] = {kind: [] for kind in kinds}
    num_below = 0
    with multiprocessing.Pool(options.jobs) as pool:
        for (kind, _), (name, gain, goal) in zip(jobs, pool.imap(measured, jobs), strict=True):
            gains[kind].append(gain)
            num_below += gain < -goal
            print(f"{gain:+.2f}  {name}{'  BELOW ITS GOAL' if gain < -goal else ''}", flush=True)
    for kind, found in gains.items():
        print(
            f"{kind}: {len(found)} cases, {min(found):+.2f} to {max(found):+.2f}, mean {sum(found) / len(found):+.2f}"
        )
    lowest = min(min(found) for found in gains.values())
    print(f"{len(jobs)} cases, {num_below} below their goal, lowest gain {lowest:+.2f}; the limit is {-MOST_BELOW}")
    return int(lowest < -MOST_BELOW)


if __name__ == "__main__":
    sys.exit(main())
