"""Share of prompt tokens that hit, by eviction policy, on public traces: `make policies`.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.policies    prints a table, writes results/policies.md (10 minutes)
    python -m tests.bench.policies --limit 500 --no-write
    python -m tests.bench.policies --groups "no windows" --no-write

Each cell is a replay of a whole trace (of Weka, 120 sessions) on one core with its own managers: one request at a time,
in order of arrival, in chunks of 8,192 tokens, with one generated token. `retention` is `retention_interval`: -1 caches
every window, as vLLM does by default; 0 those at which a later prompt probably begins. The bound is the offline optimum
of the full attention group alone in all blocks of the pool, of which a request holds its own: what windows take is not
subtracted. Exits 1 if a cell of a policy is more than its limit below its cell of `lru`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvplane.base.groups import DENSE_RETENTION, EvictionPolicy, GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane.base.step import Part, Step, StepResult
from kvplane_replay.engine import Engine
from kvplane_replay.fleet import Fleet
from kvplane_replay.plan import CostModel, EngineConfig
from kvplane_replay.workloads import TraceFile, TraceRequest
from kvplane_replay.workloads.lines import TraceLines
from kvplane_replay.workloads.traces import read_weka
from kvplane_service.replicas.cores import new_replica
from tests.bench.machine import machine_line
from tests.conftest import workloads_folder, workloads_line

RESULTS = Path(__file__).parent / "results" / "policies.md"
WINDOW, CHUNK, WEKA_SESSIONS = 1024, 8192, 120
TRACES = {  # to file, tokens of a block
    "conversation": ("mooncake_conversation_first_half.jsonl.gz", 512),
    "synthetic": ("mooncake_synthetic_first_half.jsonl.gz", 512),
    "Weka": ("weka_claude_code_share.jsonl.zst", 1024),
}
FULL_ONLY = "no windows"
MOST_BELOW = {EvictionPolicy.WINDOW_TAIL: 0.1, EvictionPolicy.HAZARD: 0.15}  # points that a policy may be below LRU


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: a trace, the groups next to one of full attention, blocks of the pool, and the retention interval."""

    trace: str
    groups: str
    num_blocks: int
    retention: int

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that is compared with LRU."""
        return EvictionPolicy.HAZARD if self.groups == FULL_ONLY else EvictionPolicy.WINDOW_TAIL

    def spec(self, policy: EvictionPolicy) -> ReplicaSpec:
        """Return the replica."""
        size = TRACES[self.trace][1]
        return replica_of(self.groups, size, self.num_blocks, retention_interval=self.retention, eviction=policy)


def replica_of(groups: str, size: int, num_blocks: int, **settings: object) -> ReplicaSpec:
    """Return a replica with a group of full attention and others, "no windows", "1 window" or "5 windows"."""
    cap = 1 + -(-(WINDOW + CHUNK) // size)
    window = GroupSpec(GroupKind.SLIDING_WINDOW, size, window=WINDOW, lookup_class=1, admission_cap_blocks=cap)
    return ReplicaSpec(
        groups=(GroupSpec(GroupKind.FULL_ATTENTION, size), *[window] * int(groups.replace("no", "0").split()[0])),
        num_blocks=num_blocks + 1,
        max_model_len=1 << 20,
        hash_block_size=size,
        scheduler_block_size=size,
        max_in_flight_tokens=CHUNK,
        events=False,
        **settings,  # type: ignore[arg-type]
    )


def grid() -> list[Cell]:
    """Return the cells of the table."""
    pools = {"conversation": (10_000, 30_000), "synthetic": (10_000, 20_000), "Weka": (1000, 3000, 6000)}
    dense = [
        Cell(trace, groups, blocks, DENSE_RETENTION)
        for trace, sizes in pools.items()
        for groups in ("1 window", "5 windows")
        for blocks in sizes
    ]
    sparse = [Cell(trace, "5 windows", blocks, 0) for trace, sizes in pools.items() for blocks in sizes]
    more = {"conversation": (1000, 3000), "synthetic": (1000, 3000), "Weka": (500, 10_000)}
    full = [Cell(trace, FULL_ONLY, size, DENSE_RETENTION) for trace in pools for size in more[trace] + pools[trace]]
    return dense + sparse + full


class CoreSession:
    """A session (`StepSession`) on a core of its own: no host, log or lease, so that a replay takes seconds."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.replica, self.spec, self._seq = new_replica(spec), spec, 0
        self.replica.begin_epoch(1)

    def submit(self, *parts: Part) -> int:
        """Apply one step; the one before it is executed."""
        self._seq += 1
        self._result = self.replica.apply(Step(1, self._seq, list(parts), executed_through=self._seq - 1))
        self.replica.take_events()
        return self._seq

    def receive(self) -> StepResult:
        """Return the result of the step."""
        return self._result


def replay(spec: ReplicaSpec, trace: Iterable[TraceRequest]) -> Engine:
    """Replay the prompts of a trace, one after the other, in the order of their arrival."""
    config = EngineConfig(max_running=1, token_budget=CHUNK, max_output=1)
    engine = Engine(CoreSession(spec), config, CostModel(10**9, 0, 0))
    fleet = Fleet([engine], trace)
    while fleet.run_step():
        pass
    assert not engine.refusals, engine.refusals[0]
    return engine


def with_hints(trace: Iterable[TraceRequest], size: int, percent_right: int) -> list[TraceRequest]:
    """Return the requests with hints whether a later prompt continues them: 2, or 1 if none does; `percent_right` of
    the hints are right.
    """
    hasher, rng = HashScheme.of(replica_of(FULL_ONLY, size, 2)), Random(percent_right)
    requests, later, hinted = list(trace), set[bytes](), list[TraceRequest]()
    for request in reversed(requests):
        raw, width = RequestHasher(hasher).append(request.prompt.packed()), hasher.digest.size
        chain = [raw[at : at + width] for at in range(0, len(raw), width)]
        continues = len(chain) > 1 and chain[-1] in later
        later.update(chain)
        is_right = rng.randrange(100) < percent_right
        hinted.append(replace(request, hint=1 + int(continues is is_right)))
    return hinted[::-1]


def share_of_hits(engine: Engine) -> float:
    """Return the percentage of the prompts' tokens that hit."""
    return 100 * engine.tally.hit_tokens / engine.tally.queried_tokens


class Chain(NamedTuple):
    """A prompt: the digests of its full blocks, its tokens, when it arrives, and the domain of its content."""

    digests: list[bytes]
    num_tokens: int
    arrival_s: float = 0
    domain: str = ""


def chains_of(trace: Iterable[TraceRequest], size: int) -> list[Chain]:
    """Return the prompts of a trace."""
    scheme = HashScheme.of(replica_of(FULL_ONLY, size, 2))
    width, chains = scheme.digest.size, []
    for request in trace:
        raw = RequestHasher(scheme).append(request.prompt.packed())
        digests = [raw[at : at + width] for at in range(0, len(raw), width)]
        chains.append(Chain(digests, len(request.prompt), request.arrival_s))
    return chains


def bound(chains: Sequence[Chain], size: int, num_blocks: int) -> float:
    """Return the percentage of tokens that hit if one group of full attention evicts with knowledge of the future.

    A request holds its blocks. Of the others those leave first that are used again last, of equal ones those behind in
    the prefix.
    """
    later = dict[bytes, int]()
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
    return 100 * hits * size / sum(chain.num_tokens for chain in chains)


def requests_of(folder: Path, name: str, limit: int | None, files: ExitStack) -> Iterator[TraceRequest]:
    """Yield the first `limit` requests of a trace."""
    path = folder / TRACES[name][0]
    if name == "Weka":
        lines = TraceLines(path)
        files.callback(lines.close)
        return islice(read_weka(islice(lines, WEKA_SESSIONS)), limit)
    return islice(files.enter_context(TraceFile(path)), limit)


def measured(folder: Path, limit: int | None, job: tuple[Cell, EvictionPolicy | None]) -> float:
    """Return the figure of a cell for a policy, or its bound for None."""
    cell, policy = job
    with ExitStack() as files:
        trace = requests_of(folder, cell.trace, limit, files)
        if policy is None:
            size = TRACES[cell.trace][1]
            return bound(chains_of(trace, size), size, cell.num_blocks)
        return share_of_hits(replay(cell.spec(policy), trace))


def main() -> int:
    """Measure every cell, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="requests of each trace; default all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--groups", help="only the cells with these groups")
    parser.add_argument("--blocks", type=int, help="only the cells with this number of blocks")
    options = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line(), file=sys.stderr)
        return 2
    cells = [cell for cell in grid() if options.groups in (None, cell.groups)]
    cells = [cell for cell in cells if options.blocks in (None, cell.num_blocks)]
    bounds = {(cell.trace, cell.num_blocks): (cell, None) for cell in cells}
    jobs = [*((cell, policy) for cell in cells for policy in (EvictionPolicy.LRU, cell.policy)), *bounds.values()]
    jobs.sort(key=lambda job: (job[0].trace != "Weka", job[1] is None))  # the longest ones first
    with multiprocessing.Pool(options.jobs) as pool:
        found = dict(zip(jobs, pool.map(partial(measured, folder, options.limit), jobs, chunksize=1), strict=True))
    lines = [
        "| trace | groups | blocks | retention | lru | policy | hits | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    gains = dict[EvictionPolicy, float]()
    for cell in cells:
        reference, ours = found[cell, EvictionPolicy.LRU], found[cell, cell.policy]
        gains[cell.policy] = min(ours - reference, gains.get(cell.policy, ours))
        best = found[bounds[cell.trace, cell.num_blocks]]
        lines.append(
            f"| {cell.trace} | 1 full + {cell.groups} | {cell.num_blocks:,} | {cell.retention} "
            f"| {reference:.1f} | {cell.policy.value} | {ours:.1f} | {best:.1f} |"
        )
    lowest = ", ".join(f"{policy.value} {gain:+.1f}" for policy, gain in gains.items())
    print("\n".join(lines), f"lowest gain of a cell: {lowest}", sep="\n\n")
    if not options.no_write:
        head = "Percentage of the prompts' tokens that hit: `make policies`, see `tests/bench/policies.py`."
        text = ["# Eviction policies", "", head, machine_line(), "", *lines, ""]
        text += [f"Lowest gain of a cell in points: {lowest}.", ""]
        RESULTS.write_text("\n".join(text))
    return int(any(gain < -MOST_BELOW[policy] for policy, gain in gains.items()))


if __name__ == "__main__":
    sys.exit(main())
