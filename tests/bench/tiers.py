"""Hits by the size of a host tier, on a real trace: `python -m tests.bench.tiers TRACE --pools 2000 10000`.

For each pool of P blocks: the pool alone, with a host tier of 2 P slots, and one pool of 3 P blocks, which is what the
first two could have together. Movers end each job `--latency` steps after its order. Full attention alone, as a replica
in this process, without decoding.
"""

from __future__ import annotations

import argparse
from collections import deque
from itertools import islice
from pathlib import Path

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec, TierKind, TierSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Part, PartResult, RowFlag
from kvplane.blocking.session import Session
from kvplane.scheduling import Limits, Scheduler
from kvplane_replay.engine import Engine
from kvplane_replay.fleet import Fleet
from kvplane_replay.plan import CostModel, EngineConfig
from kvplane_replay.workloads import TraceFile
from kvplane_service.config import Config
from kvplane_service.core.tiers.tiers import TierCounters
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.inprocess import InProcessTransport

BUDGET = 8192
RUNNING = 8


class TierEngine(Engine):
    """An engine whose movers end every job some steps after its order, without moving anything."""

    def __init__(self, session: Session, latency: int) -> None:
        super().__init__(session, EngineConfig(max_running=RUNNING, token_budget=BUDGET, max_output=1), CostModel())
        flags = RowFlag.FULL_FIT | (RowFlag.LOAD if self.spec.tiers else RowFlag.NONE)
        self._scheduler = Scheduler(self.spec, Limits(RUNNING, BUDGET, admit_rows=16, admit_flags=flags))
        self._jobs: deque[list[int]] = deque([[] for _ in range(latency)])

    def _exchange(self) -> tuple[Part, PartResult]:
        part = self._scheduler.plan()
        part.cache.jobs_done = self._jobs.popleft()
        self._session.submit(part)
        for request in islice(self._scheduler.waiting, 16):
            request.hash_prompt()  # type: ignore[attr-defined]
        (answer,) = self._session.receive().parts
        orders = answer.orders
        self._jobs.append([*dict.fromkeys(orders.load_job), *orders.save_job, *orders.move_job])
        return part, answer


def replay(trace: Path, limit: int, num_blocks: int, host: int, args: argparse.Namespace) -> tuple[float, TierCounters]:
    """Return the share of looked-up tokens that were hit, and the counters of the tiers."""
    size = args.block_size
    spec = ReplicaSpec(
        groups=(GroupSpec(GroupKind.FULL_ATTENTION, size, page_bytes=1),),
        num_blocks=num_blocks,
        max_model_len=1 << 18,
        hash_block_size=size,
        scheduler_block_size=size,
        max_in_flight_tokens=BUDGET,
        events=False,
        tiers=(TierSpec(TierKind.HOST, host),) if host else (),
    )
    registry = Registry(Config(), lambda: 0)
    registry.register("replay", Registration(spec, namespace_digest=b"replay"))
    transport = InProcessTransport(lambda name: registry.get(name).host)
    session = Session(transport, OpenRequest("replay", nonce=1, with_events=False), heartbeats=False)
    with TraceFile(trace) as requests:
        fleet = Fleet([TierEngine(session, args.latency)], islice(requests, limit))
        while fleet.run_step():
            pass
    replica = registry.get("replay").host.replica.reference()
    counters = replica.counters
    return counters.hit_tokens / counters.queried_tokens, replica.coordinator.tiers.counters


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pools", type=int, nargs="+", default=[2000, 10_000])
    parser.add_argument("--limit", type=int, default=1 << 30)
    parser.add_argument("--latency", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=512)
    args = parser.parse_args()
    for pool in args.pools:
        alone, _ = replay(args.trace, args.limit, pool, 0, args)
        with_host, counters = replay(args.trace, args.limit, pool, 2 * pool, args)
        large, _ = replay(args.trace, args.limit, 3 * pool, 0, args)
        shares = f"alone {alone:.1%}, host of {2 * pool:,} {with_host:.1%}, pool of {3 * pool:,} {large:.1%}"
        print(f"pool {pool:,}: {shares}, ratio {with_host / large:.3f}; {counters}", flush=True)


if __name__ == "__main__":
    main()
