"""Share of prompt tokens that hit, by eviction policy, on public traces: `make policies`.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.policies    prints a table, replaces that of results/policies.md
    python -m tests.bench.policies --limit 500 --no-write
    python -m tests.bench.policies --groups "no windows" --no-write

Each cell is a replay of a whole trace (of Weka, 120 sessions) on one core with its own managers: one request at a time,
in order of arrival, in steps of 8,192 tokens, as an engine sends them. `retention` is `retention_interval`: -1 caches
every window, as vLLM does by default; 0 those at which a later prompt probably begins. `hints` are what the engine says
of a request: whether a later prompt continues it, which is right for 80 or 90 of 100; of Weka the stop reason, and
whether it is a sub-agent's. The bound is the offline optimum of the full attention group alone in all blocks of the
pool, of which a request holds its own: what windows take is not subtracted. Exits 1 if a cell of a policy is more than
its limit below its cell of `lru`. A process reads and hashes each trace once, for all its cells; `tests.bench.curves`
has more sizes of pools.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from random import Random
from time import monotonic
from typing import NamedTuple

from kvplane.base.groups import DENSE_RETENTION, EvictionPolicy, GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane.base.step import (
    Admit,
    AdmitStatus,
    Budget,
    End,
    Facts,
    News,
    Part,
    PartResult,
    RowFlag,
    Run,
    Step,
    StepResult,
)
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.loader import new_replica
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.workloads import TraceFile, TraceRequest
from kvplane_tools.replay.workloads.lines import TraceLines
from kvplane_tools.replay.workloads.traces import WEKA_HINTS, read_weka
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
    """One replay: a trace, the groups next to one of full attention, blocks of the pool, the retention interval, and
    what the engine hints: "80 of 100" that are right, "stop reason", or nothing.
    """

    trace: str
    groups: str
    num_blocks: int
    retention: int
    hints: str = ""

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that is compared with LRU."""
        return EvictionPolicy.HAZARD if self.groups == FULL_ONLY else EvictionPolicy.WINDOW_TAIL

    def spec(self, policy: EvictionPolicy) -> ReplicaSpec:
        """Return the replica."""
        size, values = TRACES[self.trace][1], WEKA_HINTS if self.hints else 0
        settings = {"retention_interval": self.retention, "hint_values": values, "eviction": policy}
        return replica_of(self.groups, size, self.num_blocks, **settings)


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
    hinted = [Cell("conversation", FULL_ONLY, 10_000, DENSE_RETENTION, f"{right} of 100") for right in (80, 90)]
    hinted.append(Cell("Weka", FULL_ONLY, 1000, DENSE_RETENTION, "stop reason"))
    return dense + sparse + full + hinted


class CoreSession:
    """A session (`StepSession`) on a core of its own: no host, log or lease, so that a replay takes seconds."""

    waiting_requests: int | None = None

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


def share_of_hits(engine: Engine) -> float:
    """Return the percentage of the prompts' tokens that hit."""
    return 100 * engine.tally.hit_tokens / engine.tally.queried_tokens


class Chain(NamedTuple):
    """A prompt: the digests of its full blocks, its tokens, when it arrives, the domain of its content, and the hint at
    its end.
    """

    digests: list[bytes]
    num_tokens: int
    arrival_s: float = 0
    domain: str = ""
    hint: int = 0


def chains_of(trace: Iterable[TraceRequest], size: int) -> list[Chain]:
    """Return the prompts of a trace."""
    scheme = HashScheme.of(replica_of(FULL_ONLY, size, 2))
    width, chains = scheme.digest.size, []
    for request in trace:
        raw = RequestHasher(scheme).append(request.prompt.packed())
        digests = [raw[at : at + width] for at in range(0, len(raw), width)]
        chains.append(Chain(digests, len(request.prompt), request.arrival_s, hint=request.hint))
    return chains


def with_hints(chains: Sequence[Chain], percent_right: int) -> list[Chain]:
    """Return the prompts with hints whether a later one continues them: 2, or 1 if none does; `percent_right` of the
    hints are right.
    """
    rng, later, hinted = Random(percent_right), set[bytes](), list[Chain]()
    for chain in reversed(chains):
        continues = len(chain.digests) > 1 and chain.digests[-1] in later
        later.update(chain.digests)
        is_right = rng.randrange(100) < percent_right
        hinted.append(chain._replace(hint=1 + int(continues is is_right)))
    return hinted[::-1]


def hit_tokens(chains: Iterable[Chain], replica: ReplicaCore) -> list[int]:
    """Serve prompts one after the other, in steps of at most `max_in_flight_tokens`. Return how many tokens of each
    hit; none of one that is longer than the pool, which no core admits.
    """
    spec, hits, seq, before = replica.spec, list[int](), 0, Facts()
    budget, most = Budget(tokens=spec.max_in_flight_tokens), (spec.num_blocks - 1) * spec.hash_block_size

    def result(part: Part) -> PartResult:
        nonlocal seq
        seq += 1
        found = replica.apply(Step(1, seq, [part], executed_through=seq - 1)).parts[0]
        replica.take_events()
        return found

    for number, chain in enumerate(chains):
        if chain.num_tokens > most:
            hits.append(0)
            continue
        slot, num_hashes = number % 2, [len(chain.digests)]
        joined, domain = b"".join(chain.digests), [chain.domain]
        news = News([slot], [chain.num_tokens], num_hashes=num_hashes, hashes=joined, domain=domain)
        admit = Admit([slot], flags=[RowFlag.FULL_FIT])
        found = result(Part(facts=before, news=news, admit=admit, budget=budget))
        assert list(found.admit_status) == [AdmitStatus.GRANTED], found.admit_status
        computed = found.admit_hit[0] + found.admit_granted[0]
        while computed < chain.num_tokens:
            (granted,) = result(Part(run=Run([slot]), budget=budget)).granted
            assert granted, "a request that runs alone is refused"
            computed += granted
        hits.append(found.admit_hit[0])
        before = Facts([slot], end=[int(End.FREE)], hint=[chain.hint] if spec.hint_values else [])
    return hits


def percentage(chains: Sequence[Chain], spec: ReplicaSpec) -> float:
    """Return the percentage of the tokens that hit in a core of this replica."""
    replica = new_replica(spec)
    replica.begin_epoch(1)
    return 100 * sum(hit_tokens(chains, replica)) / sum(chain.num_tokens for chain in chains)


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


@cache
def prompts_of(folder: Path, name: str, limit: int | None) -> list[Chain]:
    """Return the first `limit` prompts of a trace."""
    with ExitStack() as files:
        return chains_of(requests_of(folder, name, limit, files), TRACES[name][1])


def measured(folder: Path, limit: int | None, job: tuple[Cell, EvictionPolicy | None]) -> float:
    """Return the figure of a cell for a policy, or its bound for None."""
    cell, policy = job
    chains = prompts_of(folder, cell.trace, limit)
    if policy is None:
        return bound(chains, TRACES[cell.trace][1], cell.num_blocks)
    if cell.hints.endswith("of 100"):
        chains = with_hints(chains, int(cell.hints.split()[0]))
    return percentage(chains, cell.spec(policy))


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
    lru = {cell: (replace(cell, hints=""), EvictionPolicy.LRU) for cell in cells}
    jobs = [*dict.fromkeys([*lru.values(), *((cell, cell.policy) for cell in cells)]), *bounds.values()]
    jobs.sort(key=lambda job: (job[0].trace != "Weka", job[1] is None))  # the longest ones first
    began = monotonic()
    with multiprocessing.Pool(options.jobs) as pool:
        found = dict(zip(jobs, pool.map(partial(measured, folder, options.limit), jobs, chunksize=1), strict=True))
    lines = [
        "| trace | groups | blocks | retention | policy | hints | hits | with lru | bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    gains = dict[EvictionPolicy, float]()
    for cell in cells:
        reference, ours = found[lru[cell]], found[cell, cell.policy]
        gains[cell.policy] = min(ours - reference, gains.get(cell.policy, ours))
        best = found[bounds[cell.trace, cell.num_blocks]]
        lines.append(
            f"| {cell.trace} | 1 full + {cell.groups} | {cell.num_blocks:,} | {cell.retention} "
            f"| {cell.policy.value} | {cell.hints} | {ours:.2f} | {reference:.2f} | {best:.2f} |"
        )
    lowest = ", ".join(f"{policy.value} {gain:+.2f}" for policy, gain in gains.items())
    print("\n".join(lines), f"lowest gain of a cell: {lowest}", sep="\n\n")
    if not options.no_write:
        head = "Percentage of the prompts' tokens that hit: `make policies`, see `tests/bench/policies.py`."
        took = f"{machine_line()}; {(monotonic() - began) / 60:.1f} minutes with {options.jobs} processes"
        text = ["# Eviction policies", "", head, took, "", *lines, ""]
        text += [f"Lowest gain of a cell in points: {lowest}.", ""]
        notes = "".join(RESULTS.read_text().partition("\n## ")[1:])
        RESULTS.write_text("\n".join(text) + notes)
    return int(any(gain < -MOST_BELOW[policy] for policy, gain in gains.items()))


if __name__ == "__main__":
    sys.exit(main())
