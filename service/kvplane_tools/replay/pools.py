"""What pools of other sizes would hit: the requests of a recording run again in each, on the real core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import Part, Step, StepResult
from kvplane_core.face import loader
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.from_log import Outcome, counters_of, replay_log
from kvplane_tools.replay.plan import CostModel
from kvplane_tools.replay.recorded import Recorded, RecordedRequest

SIZES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))  # of the recorded pool
_WARM_UP = Fraction(1, 2)  # of the requests of a recording that begins with a pool in use, whose keys are not known


@dataclass(frozen=True, slots=True)
class PoolHits:
    """What a pool of this number of blocks hit, and what it could not serve."""

    num_blocks: int
    counts: dict[str, int]
    never_fits: int = 0
    error: str = ""

    @property
    def share(self) -> float:
        """The share of the tokens looked up that hit."""
        return self.counts["hit_tokens"] / max(1, self.counts["queried_tokens"])


@dataclass(frozen=True, slots=True)
class Curve:
    """What pools of several sizes hit.

    Attributes:
        recorded: the outcome of the replay of the recording as it is.
        real: what the recorded pool hit of the requests that count.
        num_requests: requests that count.
        num_sizes: sizes when it is complete.
        pools: the sizes, ascending.
    """

    recorded: Outcome
    real: PoolHits
    num_requests: int
    num_sizes: int
    pools: tuple[PoolHits, ...]


class _Session:
    """An engine's session with a replica in this process."""

    waiting_requests: int | None = None

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.replica = loader.new_replica(spec)
        self._epoch = self._seq = 0
        self._result = StepResult(0, 0, [])
        self.forget()

    def forget(self) -> None:
        """Begin with new memory."""
        self._epoch, self._seq = self._epoch + 1, 0
        self.replica.begin_epoch(self._epoch, memory_is_new=True)

    def submit(self, *parts: Part) -> int:
        self._seq += 1
        self._result = self.replica.apply(Step(self._epoch, self._seq, list(parts), executed_through=self._seq - 1))
        return self._seq

    def receive(self) -> StepResult:
        return self._result


def curve_of(path: Path, most_requests: int, sizes: Sequence[Fraction] = SIZES) -> Iterator[Curve]:
    """Replay a recording, then its last `most_requests` requests in each size of pool; yield the curve after each.

    Raises:
        InvalidArgument: the recording has no request.
        KvplaneError: as `replay_log`.
    """
    recorded = Recorded(CostModel())
    outcome = replay_log(path, recorded)
    every = recorded.requests
    if not every:
        raise InvalidArgument(f"{path} has no request", field="--log", remedy="record while the engine has work")
    requests = every[-most_requests:]
    is_part = outcome.from_now or len(requests) < len(every)
    skipped = int(len(requests) * _WARM_UP) if is_part else 0
    before = recorded.counts_before[len(every) - len(requests) + skipped] if skipped else {}
    counts = recorded.counts() if skipped else outcome.counts
    real = PoolHits(outcome.spec.num_blocks, {name: counts[name] - before.get(name, 0) for name in counts})
    curve = Curve(outcome, real, len(requests) - skipped, len(sizes), ())
    for size in sizes:
        hits = pool_hits(with_blocks(outcome.spec, size), recorded, requests, skipped)
        curve = replace(curve, pools=(*curve.pools, hits))
        yield curve


def with_blocks(spec: ReplicaSpec, size: Fraction) -> ReplicaSpec:
    """Return the spec with this part of its blocks; its tiers stay."""
    unit = spec.blocks_per_state
    return replace(spec, num_blocks=max(1, round(spec.num_blocks * size / unit)) * unit)


def pool_hits(
    spec: ReplicaSpec, recorded: Recorded, requests: Sequence[RecordedRequest] = (), skipped: int = 0
) -> PoolHits:
    """Run requests of a recording, or all, in a pool, and return what it hit of those after the first `skipped`."""
    try:
        session = _Session(spec)
    except InvalidArgument as error:
        return PoolHits(spec.num_blocks, {"hit_tokens": 0, "queried_tokens": 0}, error=error.message)
    before, refused, num_run = dict[str, int](), 0, 0
    for life, of_life in groupby(requests or recorded.requests, attrgetter("life")):
        if num_run and not recorded.keeps_keys[life]:
            session.forget()
        engine = Engine(session, recorded.config, recorded.cost)
        fleet = Fleet([engine], (one.live(spec.hint_values) for one in of_life))
        while fleet.run_step():
            if not before and num_run + fleet.num_read > skipped > 0:
                before = counters_of(session.replica)
        num_run, refused = num_run + fleet.num_read, refused + len(engine.refusals)
    counts = {name: count - before.get(name, 0) for name, count in counters_of(session.replica).items()}
    return PoolHits(spec.num_blocks, counts, refused)
