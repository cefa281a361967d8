"""What the live view shows of one model: the service's counters, looked at again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplane.base.groups import GroupSpec
from kvplane.v1.allocation_pb2 import DescribeReplicaResponse
from kvplane_replay.cost import NS_PER_SECOND
from kvplane_replay.run import ReplayRun, counts_of
from kvplane_replay.summary import ServiceCounts

HISTORY = 60


@dataclass(frozen=True, slots=True)
class Pool:
    """What one KV cache group, or several equal ones together, take of the replica's pool.

    Attributes:
        name: how many, kind, and how far they see.
        held_blocks: held by requests.
        cached_blocks: carrying a key, held or free.
    """

    name: str
    held_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Look:
    """One replica at one moment.

    Attributes:
        pools: per kind of group.
        free_blocks, num_blocks: of the pool that the groups share; free ones may be cached.
        hit_shares: of the tokens looked up between looks, those that were hit; 0 to 1, oldest first.
        steps_per_s: since the last look.
    """

    model: str
    pools: tuple[Pool, ...]
    free_blocks: int
    num_blocks: int
    counts: ServiceCounts
    hit_shares: tuple[float, ...]
    steps_per_s: float
    completed: int
    running: int
    waiting: int
    virtual_s: float

    @property
    def evicted(self) -> int:
        """Keys lost to other requests, all groups."""
        return sum(self.counts.evicted_blocks)

    @property
    def held_share(self) -> float:
        """Of the pool, 0 to 1."""
        return 1 - self.free_blocks / (self.num_blocks - 1)

    @property
    def hit_share(self) -> float:
        """Of all tokens looked up, 0 to 1."""
        return self.counts.hit_tokens / self.counts.queried_tokens if self.counts.queried_tokens else 0.0


@dataclass(slots=True)
class Trend:
    """What a replica's counters did from look to look.

    Attributes:
        hit_shares: of the tokens looked up between looks, those that were hit; 0 to 1, oldest first.
        steps_per_s: since the last look.
    """

    hit_shares: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    steps_per_s: float = 0.0
    _last: tuple[float, int, int, int] = (0.0, 0, 0, 0)

    def note(self, now_s: float, steps: int, queried: int, hit: int) -> None:
        """Take the counters; `now_s` is any clock that goes on. Fewer steps than before: the replica began anew."""
        then_s, steps_then, queried_then, hit_then = self._last
        self._last = (now_s, steps, queried, hit)
        if steps < steps_then:
            queried_then = hit_then = steps_then = 0
        self.steps_per_s = (steps - steps_then) / (now_s - then_s) if 0 < then_s < now_s else 0.0
        if queried > queried_then:
            self.hit_shares.append((hit - hit_then) / (queried - queried_then))


@dataclass(slots=True)
class Watcher:
    """Looks at the one replica of a run and keeps what the next look is compared with."""

    model: str
    run: ReplayRun
    _trend: Trend = field(default_factory=Trend)

    def look(self, now_s: float) -> Look:
        """Ask the service; `now_s` is any clock that goes on."""
        told = self.run.describe()[0]
        counts, progress = counts_of(told), self.run.fleet.progress
        self._trend.note(now_s, counts.steps, counts.queried_tokens, counts.hit_tokens)
        return Look(
            model=self.model,
            pools=pools_of(told, self.run.fleet.engines[0].spec.groups),
            free_blocks=told.free_blocks,
            num_blocks=told.spec.num_blocks,
            counts=counts,
            hit_shares=tuple(self._trend.hit_shares),
            steps_per_s=self._trend.steps_per_s,
            completed=progress.completed,
            running=progress.running,
            waiting=progress.waiting,
            virtual_s=progress.clock_ns / NS_PER_SECOND,
        )


def pools_of(told: DescribeReplicaResponse, groups: Sequence[GroupSpec]) -> tuple[Pool, ...]:
    """One per distinct kind of group: equal groups hold nearly equal numbers and would only repeat each other."""
    names = [_short_name(group) for group in groups]
    pools = []
    for name in dict.fromkeys(names):
        mine = [group for group, other in zip(told.counters.groups, names, strict=True) if other == name]
        held, cached = sum(group.used_blocks for group in mine), sum(group.cached_blocks for group in mine)
        pools.append(Pool(name if len(mine) == 1 else f"{len(mine)} x {name}", held, cached))
    return tuple(pools)


def _short_name(group: GroupSpec) -> str:
    """Like "full" or "sliding_window 1024"."""
    return f"{group.kind.value.removesuffix('_attention')} {group.window or group.chunk or ''}".rstrip()
