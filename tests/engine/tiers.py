"""python -m tests.engine.tiers --requests 300: the stress on replicas with tiers, a line per mix.

Conversations come back in turn, and the device has room for a few of them: most hits are loaded. Movers are threads of
this process; faults make them slow, forgetful, or damage what they hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import or_
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvplane.base.groups import GroupKind, TierKind, TierSpec
from kvplane.base.job_table import JobKind, JobRow
from kvplane.base.step import Part, RowFlag, StepResult
from kvplane.tier_jobs import TierJobs
from kvplane_core.face import setup
from kvplane_kernels.interface import GroupPages
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.tiers import HostSlots, Movers
from kvplane_worker.tiers.movers import Job
from kvplane_worker.tiers.seal import UNSEALED, Content
from kvplane_worker.tiers.slots import Fill
from tests.engine.__main__ import line
from tests.engine.faults import Fault
from tests.engine.reference.config import EVEN, AttentionLayer, LayerConfig, ModelConfig
from tests.engine.reference.engine import Engine
from tests.engine.stress import DENSE, FULL, LATENT_ROWS, STATE, Mix, Report, run_mix, tuned
from tests.engine.workload import Returning, in_laps
from tests.engine.world import SOUND, Pool

HOST = (TierSpec(TierKind.HOST, 900),)
CHECKPOINTS = (TierSpec(TierKind.HOST, 900, checkpoint_percent=60),)
HOST_AND_DISK = (TierSpec(TierKind.HOST, 90), TierSpec(TierKind.DISK, 900))


def tiered(name: str, layers: tuple[LayerConfig, ...], num_blocks: int, **changes: object) -> Mix:
    pool = Pool(
        ModelConfig(layers, num_ranks=int(changes.pop("num_ranks", 1))),  # type: ignore[call-overload]
        num_blocks=num_blocks,
        max_model_len=300,
        max_batched_tokens=160,
        batches=4,
        tiers=changes.pop("tiers", HOST),  # type: ignore[arg-type]
        **changes.pop("pool", {}),
    )
    config = tuned(token_budget=160, admit_flags=RowFlag.LOAD, **changes.pop("config", {}))  # type: ignore[arg-type]
    return Mix(name, pool, config, **{"requests": Returning, "max_open": 4, **changes})  # type: ignore[arg-type]


WINDOW = AttentionLayer(kv_heads=2, block_size=16, window=40)
CHUNK = AttentionLayer(kv_heads=2, block_size=16, chunk=160)
KINDS = (
    tiered("full", (FULL, FULL), 70),
    tiered("window and full", (WINDOW, FULL), 110),
    tiered("chunk and full", (CHUNK, FULL), 110),
    tiered("states and full", (STATE, FULL), 120, pool=DENSE),
    tiered("latents", (LATENT_ROWS, LATENT_ROWS), 70),
    tiered("all kinds", (STATE, FULL, *EVEN.layers[::3]), 170, pool=DENSE),
)
OTHERS = (
    tiered("two ranks", (WINDOW, FULL), 110, num_ranks=2),
    tiered("block outermost", (STATE, FULL, WINDOW), 150, pool={**DENSE, "block_outermost": True}),
    tiered("late reports", (WINDOW, FULL), 120, config={"report_lag": 3}),
    tiered("restarts", (STATE, FULL, WINDOW), 150, pool=DENSE, restart_every=5),
    tiered("restarts, given up", (WINDOW, FULL), 150, config={"load_deadline_s": 0.05}, restart_every=5),
    tiered("lost launches", (CHUNK, FULL), 110, lose_every=9),
    tiered("preemption", (WINDOW, FULL), 60, max_open=9),
    tiered("preemption of states", (STATE, FULL), 70, max_open=9),
    tiered("checkpoints of windows", (WINDOW, FULL), 60, tiers=CHECKPOINTS, max_open=9),
    tiered("checkpoints of all kinds", (STATE, FULL, *EVEN.layers[::3]), 120, tiers=CHECKPOINTS, max_open=9),
    tiered("preemption of chunks, late reports", (CHUNK, FULL), 70, max_open=9, config={"report_lag": 3}),
)
DISKS = (
    tiered("full, on disk", (FULL, FULL), 70, tiers=HOST_AND_DISK),
    tiered("window and full, on disk", (WINDOW, FULL), 110, tiers=HOST_AND_DISK),
    tiered("all kinds, on disk", (STATE, FULL, *EVEN.layers[::3]), 170, tiers=HOST_AND_DISK, pool=DENSE),
    tiered("disk alone", (WINDOW, FULL), 110, tiers=(TierSpec(TierKind.DISK, 900),)),
)
SMALL_HOST = (TierSpec(TierKind.HOST, 20), TierSpec(TierKind.DISK, 900))
# What comes back has just left its place, in part: its windows or states alone, or some of its blocks.
EDGES = (
    tiered("full, at the edge", (FULL, FULL), 70, tiers=SMALL_HOST, requests=in_laps(5, 6, 7)),
    tiered("window and full, at the edge", (WINDOW, FULL), 110, requests=in_laps(6, 7)),
    tiered("chunk and full, at the edge", (CHUNK, FULL), 110, requests=in_laps(6, 7)),
    tiered("states and full, at the edge", (STATE, FULL), 120, pool=DENSE, requests=in_laps(8, 9, 10)),
    tiered("windows on disk, at the edge", (WINDOW, FULL), 110, tiers=SMALL_HOST, requests=in_laps(6, 7)),
    tiered("states on disk, at the edge", (STATE, FULL), 120, tiers=SMALL_HOST, pool=DENSE, requests=in_laps(8, 9, 10)),
    tiered("latents, at the edge", (LATENT_ROWS, LATENT_ROWS), 70, tiers=SMALL_HOST, requests=in_laps(5, 6, 7)),
)
MIXES = (*KINDS, *OTHERS, *DISKS, *EDGES)


@dataclass
class Loads:
    """What was ordered: jobs that load, by what they load."""

    jobs: int = 0
    rows: int = 0
    of_sources: Counter[str] = field(default_factory=Counter)  # where the blocks of a hit were: device+host+disk
    of_tiers: Counter[frozenset[int]] = field(default_factory=Counter)
    of_kinds: Counter[frozenset[GroupKind]] = field(default_factory=Counter)
    refused: int = 0  # rows that movers refused
    discarded: int = 0

    @property
    def causes(self) -> dict[str, int]:
        """Loads by what they had to put together, as the acceptance counts them."""
        mixed = {name: self.of_sources[name] for name in ("device+host", "host+disk", "device+host+disk")}
        return {**mixed, "window alone": self.only(GroupKind.SLIDING_WINDOW), "state alone": self.only(GroupKind.MAMBA)}

    def only(self, kind: GroupKind) -> int:
        return self.of_kinds[frozenset({kind})]


LOADS = Loads()  # of the run that is under way


class CountingEngine(Engine):
    """Counts the loads that are ordered."""

    def _carry_out(self, answer: StepResult) -> None:
        super()._carry_out(answer)
        groups = self._session.spec.groups
        for part in answer.parts:
            rows = list(zip(part.orders.load_job, part.orders.load_group, part.orders.load_tier, strict=True))
            for job in dict.fromkeys(part.orders.load_job):
                LOADS.of_kinds[frozenset(groups[group].kind for one, group, _ in rows if one == job)] += 1
                LOADS.of_tiers[frozenset(tier for one, _, tier in rows if one == job)] += 1
            LOADS.jobs += len(set(part.orders.load_job))
            LOADS.rows += len(rows)
            tables = part.tables.by_row()
            for at, job in enumerate(part.admit_job):
                blocks = [
                    block
                    for group, table in (tables[len(part.granted) + at].items() if job else ())
                    for block in table[: part.admit_hit[at] // groups[group].block_size]
                ]
                tiers = {tier for one, _, tier in rows if one == job}
                names = ["device"] if sum(map(bool, blocks)) > sum(one == job for one, *_ in rows) else []
                names += [self._session.spec.tiers[tier].kind.value for tier in sorted(tiers)]
                LOADS.of_sources["+".join(names)] += bool(job)


# -- faults that a sound engine survives ------------------------------------------------------------------------------


class Damaged(HostSlots):
    """Damages a part of what it holds: a bit of the payload or of the header, or another slot's bytes."""

    share = 0.2

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        good = super().write(contents, num_bytes, fill)
        for content, is_good in zip(contents, good, strict=True):
            rng = Random(content.version)
            if is_good and rng.random() < self.share:
                self._damage(content.slot, num_bytes, rng)
        return good

    def _damage(self, slot: int, num_bytes: int, rng: Random) -> None:
        how = rng.choice(["payload", "header", "cut", "swapped"])
        if how == "payload":
            self._rows[slot, rng.randrange(num_bytes)] ^= 1 << rng.randrange(8)
        elif how == "cut":
            self._rows[slot, rng.randrange(num_bytes) : num_bytes] = 0xAA
        elif how == "swapped":
            other = rng.randrange(self.spec.num_blocks)
            self._rows[slot] = self._rows[other]
            self._set_header(slot, self._header(other))
        else:
            header = bytearray(self._header(slot))
            header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
            self._set_header(slot, bytes(header))


class Forgetful(HostSlots):
    """Some writes are lost without an error, as those of a disk can be: the slot keeps what it had."""

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Fill) -> list[bool]:
        lost = [Random(content.version).random() < 0.3 for content in contents]
        slots = [content.slot for content in compress(contents, lost)]
        held = [(self._header(slot), self._rows[slot].clone()) for slot in slots]
        good = super().write(contents, num_bytes, fill)
        for slot, (header, row) in zip(slots, held, strict=True):
            self._set_header(slot, header)
            self._rows[slot] = row
        return list(map(or_, good, lost))


class Slow(HostSlots):
    """Every read takes a while, longer than a few steps."""

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        rows = super().read(contents, num_bytes)
        time.sleep(Random(contents[0].version).choice([0, 0.003, 0.02]))
        return rows


class Meddling(CountingEngine):
    """Requests are aborted while they load, blocks that are loaded lose their keys, and the cache is reset."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rng, self._plan = Random(7), self._scheduler.plan
        self._is_first = {"abort": True, "eviction": True}  # however few plans the loads of this machine last
        self._scheduler.plan = self._plan_and_meddle  # type: ignore[method-assign]

    def _plan_and_meddle(self) -> Part:
        rng, loading = self._rng, self._scheduler.loading
        if loading and self._is_time("abort"):
            self._scheduler.abort(rng.choice(loading))
        part = self._plan()
        assert self._jobs is not None
        blocks = self._jobs.blocks_loading
        if blocks and self._is_time("eviction"):
            part.cache.evicted = [rng.choice(blocks)]
        part.cache.reset = rng.random() < 0.02
        return part

    def _is_time(self, what: str) -> bool:
        is_first, self._is_first[what] = self._is_first[what], False
        return is_first or self._rng.random() < 0.2


class Weighing(CountingEngine):
    """Costs change all the time: loads pay, do not, or only those from the host."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rng, self._plan = Random(7), self._scheduler.plan
        self._scheduler.plan = self._plan_with_costs  # type: ignore[method-assign]

    def _plan_with_costs(self) -> Part:
        part = self._plan()
        if self._rng.random() < 0.3:
            part.cache.costs_ns = [100, *(self._rng.choice([0, 10, 10**6]) for _ in self._session.spec.tiers)]
        return part


class LateCopies(TorchOps):
    """Pages are written long after all was checked."""

    late_s = 0.05

    def scatter(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        time.sleep(self.late_s)
        super().scatter(group, blocks, staging)


class NeverEnding(Movers):
    """The end of some loads is never reported."""

    def _end(self, job: Job, done: Collection[int]) -> None:
        if job.kind == JobKind.LOAD and job.number % 3 == 0:
            with self._lock:
                self._working.remove(job)
            return
        super()._end(job, done)


# -- faults that must be caught ---------------------------------------------------------------------------------------


class Unverified(Damaged):
    """The seal is not compared."""

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        first = contents[0].slot
        return self._rows[first : first + len(contents), :num_bytes]


class AnyVersion(Forgetful):
    """The seal is compared, but for whatever version the slot has."""

    def read(self, contents: Sequence[Content], num_bytes: int) -> Tensor | None:
        for content in contents:
            if self._header(content.slot) == UNSEALED:
                return None
        first = contents[0].slot
        return self._rows[first : first + len(contents), :num_bytes]


class AnyEpoch(Movers):
    """Loads of an earlier engine life continue, and the movers say that they have stopped."""

    def _take(self) -> None:
        super()._take()
        self._table.begin_life(self._place.stamps.owner_epoch)

    @contextmanager
    def _writing(self, epoch: int, blocks: tuple[int, ...]) -> Iterator[bool]:
        del epoch, blocks
        yield True


class LateRank(Movers):
    """The movers of every second rank that is made load late."""

    made = 0

    def __init__(self, *args: Any) -> None:
        LateRank.made += 1
        self.is_late = LateRank.made % 2 == 0
        super().__init__(*args)

    def _load(self, piece: list[JobRow]) -> bool:
        time.sleep(0.3 * self.is_late)
        return super()._load(piece)


class AnyRank(CountingEngine):
    """A job counts as done when the first rank has done it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self._jobs is not None
        self._jobs.__class__ = FirstEnd


class FirstEnd(TierJobs):
    def _end(self, rank: int, first: int, count: int, is_done: bool) -> None:
        for moving in self._moving:
            if moving.first <= first < moving.first + moving.count:
                moving.left = [left if at == rank else 0 for at, left in enumerate(moving.left)]
        super()._end(rank, first, count, is_done)


class NextRow(Movers):
    """The rows of a load go one block too far."""

    def _load(self, piece: list[JobRow]) -> bool:
        turned = zip(piece, piece[1:] + piece[:1], strict=True)
        return super()._load([row._replace(block=other.block, stamp=other.stamp) for row, other in turned])


SOUND_TIERS = replace(SOUND, engine=CountingEngine)
BORNE = (
    Fault("damaged slots", "window and full", engine=CountingEngine, slots=Damaged),
    Fault("lost writes", "all kinds", engine=CountingEngine, slots=Forgetful),
    Fault("late copies", "restarts", engine=CountingEngine, ops=LateCopies),
    Fault("slow movers", "restarts", engine=CountingEngine, slots=Slow),
    Fault("aborts, evictions and resets", "window and full", engine=Meddling, slots=Slow),
    Fault("changing costs", "window and full, on disk", engine=Weighing),
    Fault("loads that never end", "restarts, given up", engine=CountingEngine, movers=NeverEnding),
)
FAULTS = (
    Fault("the seal is not compared", "window and full", engine=CountingEngine, slots=Unverified),
    Fault("the version is not compared", "full", engine=CountingEngine, slots=AnyVersion),
    Fault("done on one rank is done", "two ranks", engine=AnyRank, movers=LateRank),
    Fault("loads continue in the next life", "restarts", engine=CountingEngine, movers=AnyEpoch, ops=LateCopies),
    Fault("rows go to another block", "window and full", engine=CountingEngine, movers=NextRow),
)


def run(mix: Mix, num_requests: int, seed: int, fault: Fault = SOUND_TIERS) -> tuple[Report, Loads]:
    """The stress on one mix. So small pools look at half their blocks for what to save."""
    global LOADS
    LOADS = Loads()
    before, setup.AHEAD_SHARE = setup.AHEAD_SHARE, 2
    try:
        report = run_mix(mix, num_requests, seed, fault)
    finally:
        setup.AHEAD_SHARE = before
    return report, LOADS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.tiers", description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="of each mix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--canary", type=float, default=0.0, help="share of the requests whose hits are compared")
    parser.add_argument("--mix", help="this one only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed, causes, requests, checks = 0, Counter[str](), 0, 0
    for mix, fault in [*((mix, SOUND_TIERS) for mix in MIXES), *((of(fault.mix), fault) for fault in BORNE)]:
        if given.mix not in (None, mix.name, fault.name):
            continue
        started = time.monotonic()
        mix = replace(mix, config=replace(mix.config, canary_rate=given.canary))
        report, loads = run(mix, given.requests, given.seed, fault)
        counts = report.counts
        name = mix.name if fault is SOUND_TIERS else f"{mix.name}, {fault.name}"
        print(line(name, report, time.monotonic() - started))
        share = counts.loaded_tokens / max(1, counts.hit_tokens)
        print(
            f"    {counts.loads} loads of {loads.rows} rows, {share:.0%} of the hit tokens; "
            f"{', '.join(f'{cause} {count}' for cause, count in loads.causes.items())}; "
            f"{'; '.join(report.complaints) or 'nothing differs'}",
            flush=True,
        )
        failed += bool(report.complaints)
        causes.update(loads.causes)
        requests += report.requests
        checks += report.checks
    print(f"{checks} hits compared by a canary")
    print(f"{requests:,} requests; {', '.join(f'{cause} {count:,}' for cause, count in causes.items())}")
    return 1 if failed else 0


def of(name: str) -> Mix:
    return next(mix for mix in MIXES if mix.name == name)


if __name__ == "__main__":
    sys.exit(main())
