"""Sample the counters of replicas at intervals and compute their trends, for the live views."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplane.base.groups import GroupSpec
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse
from kvplane_tools.replay.fleet import Progress
from kvplane_tools.replay.run import ReplayRun, counts_of
from kvplane_tools.replay.summary import ServiceCounts

HISTORY = 60


@dataclass(frozen=True, slots=True)
class Pool:
    """The number of blocks that one KV cache group, or several equal groups together, use of the replica's pool.

    Attributes:
        name: number of groups, kind, and window or chunk in tokens.
        held_blocks: blocks that requests hold.
        cached_blocks: blocks with a key (the hash under which look-ups find their content), whether held or free.
    """

    name: str
    held_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one replica at one time.

    Attributes:
        pools: blocks by kind of group.
        free_blocks, num_blocks: free and all blocks of the pool that the groups share; a free block may still have a
            key, the hash under which look-ups find its content.
        trend: rates until this sample.
        progress: of the replay.
    """

    model: str
    pools: tuple[Pool, ...]
    free_blocks: int
    num_blocks: int
    counts: ServiceCounts
    trend: Trend
    progress: Progress

    @property
    def held_share(self) -> float:
        """Share of the pool that requests hold, from 0 to 1."""
        return 1 - self.free_blocks / (self.num_blocks - 1)


@dataclass(slots=True)
class Trend:
    """Rates of a replica, computed from its counters at successive samples.

    Attributes:
        hit_shares: share of the looked-up tokens that were hit, from 0 to 1, one per sample, oldest first.
        steps_per_s: steps per second since the previous sample.
        num_samples: number of samples; a rate is known from the second one on.
    """

    hit_shares: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    steps_per_s: float = 0.0
    num_samples: int = 0
    _last: tuple[float, int, int, int] = (0.0, 0, 0, 0)

    def note(self, now_s: float, steps: int, queried: int, hit: int) -> None:
        """Add a sample; `now_s` is the time in seconds on any monotonic clock. If `steps` is smaller than before, the
        counters have restarted from 0.
        """
        then_s, steps_then, queried_then, hit_then = self._last
        self._last = (now_s, steps, queried, hit)
        self.num_samples += 1
        if steps < steps_then:
            queried_then = hit_then = steps_then = 0
        self.steps_per_s = (steps - steps_then) / (now_s - then_s) if 0 < then_s < now_s else 0.0
        if queried > queried_then:
            self.hit_shares.append((hit - hit_then) / (queried - queried_then))


@dataclass(slots=True)
class Sampler:
    """Samples the counters of a replica, the only one of its replay."""

    model: str
    run: ReplayRun
    _trend: Trend = field(default_factory=Trend)

    def sample(self, now_s: float) -> Sample:
        """Read the counters from the service; `now_s` is the time in seconds on any monotonic clock."""
        answer = self.run.describe()[0]
        counts = counts_of(answer)
        self._trend.note(now_s, counts.steps, counts.queried_tokens, counts.hit_tokens)
        return Sample(
            model=self.model,
            pools=pools_of(answer, self.run.fleet.engines[0].spec.groups),
            free_blocks=answer.free_blocks,
            num_blocks=answer.spec.num_blocks,
            counts=counts,
            trend=self._trend,
            progress=self.run.fleet.progress,
        )


def pools_of(answer: DescribeReplicaResponse, groups: Sequence[GroupSpec]) -> tuple[Pool, ...]:
    """Return one pool per distinct kind of group; the blocks of equal groups are summed, because they are
    nearly equal.
    """
    names = [_short_name(group) for group in groups]
    pools = []
    for name in dict.fromkeys(names):
        equal = [group for group, other in zip(answer.counters.groups, names, strict=True) if other == name]
        held, cached = sum(group.used_blocks for group in equal), sum(group.cached_blocks for group in equal)
        pools.append(Pool(name if len(equal) == 1 else f"{len(equal)} x {name}", held, cached))
    return tuple(pools)


def _short_name(group: GroupSpec) -> str:
    """Return the kind and the window or chunk of a group, such as "full" or "sliding_window 1024"."""
    return f"{group.kind.value.removesuffix('_attention')} {group.window or group.chunk or ''}".rstrip()
