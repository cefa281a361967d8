"""What a replay comes to: the service's counters beside the engine's own count of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane_replay.cost import NS_PER_SECOND, CostModel
from kvplane_replay.engine import Refusal
from kvplane_replay.tally import Tally


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Counters of one replica, or the sum over several, as the service tells them; lists by KV cache group."""

    steps: int
    admitted: int
    ended: int
    preempted: int
    refused: int
    queried_tokens: int
    hit_tokens: int
    granted_tokens: int
    allocated_blocks: tuple[int, ...]
    hit_blocks: tuple[int, ...]
    evicted_blocks: tuple[int, ...]

    def __add__(self, other: ServiceCounts) -> ServiceCounts:
        return ServiceCounts(
            steps=self.steps + other.steps,
            admitted=self.admitted + other.admitted,
            ended=self.ended + other.ended,
            preempted=self.preempted + other.preempted,
            refused=self.refused + other.refused,
            queried_tokens=self.queried_tokens + other.queried_tokens,
            hit_tokens=self.hit_tokens + other.hit_tokens,
            granted_tokens=self.granted_tokens + other.granted_tokens,
            allocated_blocks=_sums(self.allocated_blocks, other.allocated_blocks),
            hit_blocks=_sums(self.hit_blocks, other.hit_blocks),
            evicted_blocks=_sums(self.evicted_blocks, other.evicted_blocks),
        )


def _sums(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of one workload on the replicas of one model.

    Attributes:
        workload, model: names.
        spec: of each replica.
        num_replicas: equal replicas.
        cost: what moved the virtual clock.
        requests, completed: read from the workload; of these, run to their end.
        refusals: the others.
        counts: what the service counted.
        tally: what the engines counted in the answers.
        counts_evictions: whether the answers carried events, from which the engines count evictions.
        virtual_ns, wall_s: time in the model's world, and in ours.
        fault: why reading stopped before the end of the workload; "" when it did not.
    """

    workload: str
    model: str
    spec: ReplicaSpec
    num_replicas: int
    cost: CostModel
    requests: int
    completed: int
    refusals: Sequence[Refusal]
    counts: ServiceCounts
    tally: Tally
    counts_evictions: bool
    virtual_ns: int
    wall_s: float
    fault: str = field(default="")

    @property
    def virtual_s(self) -> float:
        """Seconds on the virtual clock."""
        return self.virtual_ns / NS_PER_SECOND

    @property
    def hit_share(self) -> float:
        """Of the tokens looked up, those that were cached; 0 to 1."""
        return self.counts.hit_tokens / self.counts.queried_tokens if self.counts.queried_tokens else 0.0

    @property
    def evicted(self) -> int:
        """Keys lost because their block was handed out again, all groups."""
        return sum(self.counts.evicted_blocks)

    def refused_by_reason(self) -> dict[str, int]:
        """Requests refused by name, most frequent reason first."""
        return dict(Counter(refusal.reason for refusal in self.refusals).most_common())

    def disagreements(self) -> list[str]:
        """Where the numbers contradict each other; empty when all is well."""
        return list(self._disagreements())

    def _disagreements(self) -> Iterator[str]:
        if self.completed + len(self.refusals) != self.requests:
            yield f"{self.completed} completed and {len(self.refusals)} refused are not {self.requests} requests"
        for name in ServiceCounts.__slots__:
            if name == "evicted_blocks" and not self.counts_evictions:
                continue
            counted, told = getattr(self.tally, name), getattr(self.counts, name)
            if (tuple(counted) if isinstance(counted, list) else counted) != told:
                yield f"{name}: the service counts {told}, the engine {counted}"

    def as_json(self) -> dict[str, Any]:
        """For machines: everything, both counts whole."""
        return {
            "workload": self.workload,
            "model": self.model,
            "replicas": self.num_replicas,
            "groups": [{"kind": g.kind.value, "block_size": g.block_size} for g in self.spec.groups],
            "num_blocks": self.spec.num_blocks,
            "max_model_len": self.spec.max_model_len,
            "cost_model": asdict(self.cost),
            "requests": self.requests,
            "completed": self.completed,
            "refused": self.refused_by_reason(),
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "prompt_tokens": self.tally.prompt_tokens,
            "generated_tokens": self.tally.generated_tokens,
            "service": asdict(self.counts),
            "engine": asdict(self.tally),
            "disagreements": self.disagreements(),
            "virtual_s": self.virtual_s,
            "wall_s": round(self.wall_s, 3),
            "steps_per_s": round(self.counts.steps / self.wall_s, 1) if self.wall_s else 0.0,
            "fault": self.fault,
        }
