"""The counts of a replay: those of the engines, those of the service, and the outcome of a run, which
compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import EVICTIONS, AdmitStatus, Blocks, EventKind, Part, PartResult
from kvplane_core.face.cache_events import runs_of
from kvplane_tools.replay.plan import NS_PER_SECOND, CostModel


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was refused, with the reason."""

    request_id: str
    reason: str
    detail: str


@dataclass(slots=True)
class ServiceCounts:
    """The counters of one replica, or their sum over several. Lists have one entry per KV cache group, or per tier.

    Attributes:
        steps: steps sent.
        admitted: granted admissions.
        ended, preempted: requests that completed or were refused; requests that lost their blocks.
        refused: admissions for which there were too few blocks.
        queried_tokens, hit_tokens: tokens of granted admissions, and those of them that were cached.
        granted_tokens: tokens scheduled.
        allocated_blocks, hit_blocks: new blocks, and cached blocks that admissions used.
        evicted_blocks: keys removed because their block was allocated again; an engine counts them from cache events, 0
            without events.
        tier_hit_tokens: tokens by which loads made hits longer, by the farthest tier that the load reads.
    """

    steps: int = 0
    admitted: int = 0
    ended: int = 0
    preempted: int = 0
    refused: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    granted_tokens: int = 0
    allocated_blocks: list[int] = field(default_factory=list)
    hit_blocks: list[int] = field(default_factory=list)
    evicted_blocks: list[int] = field(default_factory=list)
    tier_hit_tokens: list[int] = field(default_factory=list)

    @property
    def hit_share(self) -> float:
        """The share of the looked-up tokens that were cached, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def evicted(self) -> int:
        """The number of cache keys (hashes of cached blocks) that were evicted because their block was allocated again,
        over all groups.
        """
        return sum(self.evicted_blocks)

    def add(self, other: Self) -> Self:
        """Add the counts of another replica with the same groups; returns these counts."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name in ("num_groups", "num_tiers"):
                assert mine == theirs, "replicas of one fleet have equal groups"
            elif isinstance(mine, list):
                setattr(self, one.name, [a + b for a, b in zip(mine, theirs, strict=True)])
            else:
                setattr(self, one.name, mine + theirs)
        return self


@dataclass(slots=True)
class Tally(ServiceCounts):
    """The counts of one engine, which has counted the same itself, and more. They never decrease.

    Attributes:
        num_groups, num_tiers: number of KV cache groups, and of tiers.
        rows: rows (operations on one request) of the facts, news, run and admit sections of the steps.
        messages: messages sent and received.
        resumed: granted admissions that followed a preemption.
        resumed_hit_tokens: those of hit_tokens whose admission followed a preemption.
        prompt_tokens, generated_tokens: tokens of the requests that were completed.
        tier_writes: blocks whose copy into each tier was ordered.
    """

    num_groups: int = 0
    num_tiers: int = 0
    rows: int = 0
    messages: int = 0
    resumed: int = 0
    resumed_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tier_writes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tier_hit_tokens = self.tier_hit_tokens or [0] * self.num_tiers
        self.tier_writes = self.tier_writes or [0] * self.num_tiers
        for column in ("allocated_blocks", "hit_blocks", "evicted_blocks"):
            setattr(self, column, getattr(self, column) or [0] * self.num_groups)

    def count(self, part: Part, answer: PartResult) -> None:
        """Count one step that has one part, from the part and its result."""
        self.steps += 1
        self.messages += 2
        self.rows += len(part.facts.slot) + len(part.news.slot) + len(part.run.slot) + len(part.admit.slot)
        self.preempted += len(answer.preempted)
        self.granted_tokens += sum(answer.granted)
        self.refused += answer.admit_status.count(AdmitStatus.REFUSED)
        self._count_blocks(part, answer)
        for job, gained in zip(answer.admit_job, answer.admit_tier_tokens, strict=False):
            if job:
                rows = zip(answer.orders.load_job, answer.orders.load_tier, strict=True)
                self.tier_hit_tokens[max(tier for one, tier in rows if one == job)] += gained
        for tier in (*answer.orders.save_tier, *answer.orders.move_to_tier):
            self.tier_writes[tier] += 1
        for run in runs_of(answer.events):
            if run.kind is EventKind.REMOVED and run.reason in EVICTIONS:
                self.evicted_blocks[run.group] += len(run.hashes)

    def count_admission(self, known_tokens: int, hit: int, granted: int, is_resumed: bool) -> None:
        """Count one granted admission of a request."""
        self.admitted += 1
        self.queried_tokens += known_tokens
        self.hit_tokens += hit
        self.granted_tokens += granted
        if is_resumed:
            self.resumed += 1
            self.resumed_hit_tokens += hit

    def _count_blocks(self, part: Part, answer: PartResult) -> None:
        """Count new blocks and hit blocks.

        New blocks are those that the result lists as new; hit blocks are those of an admission's table that are not
        new.
        """
        first_admit_row = len(part.run.slot)
        for row, group, count in _real_blocks(answer.new_blocks):
            self.allocated_blocks[group] += count
            if row >= first_admit_row:
                self.hit_blocks[group] -= count
        for _, group, count in _real_blocks(answer.tables):
            self.hit_blocks[group] += count


def _real_blocks(blocks: Blocks) -> Iterator[tuple[int, int, int]]:
    """Yield (row, group, number of blocks), without null blocks (placeholders that have no memory), for each list of
    blocks.
    """
    start = 0
    for row, group, count in zip(blocks.row, blocks.group, blocks.count, strict=True):
        yield row, group, count - blocks.ids[start : start + count].count(0)
        start += count


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of one workload on the replicas of one model.

    Attributes:
        workload, model: their names.
        spec: settings of each replica.
        num_replicas: number of equal replicas.
        cost: the cost model that advanced the virtual clock.
        requests, completed: requests read from the workload, and those that completed.
        refusals: the refused requests.
        counts: the service's counters.
        tally: the engines' counts.
        counts_evictions: whether results contained cache events, from which the engines count evictions.
        virtual_ns, wall_s: virtual time in nanoseconds, real time in seconds.
        fault: why reading the workload stopped early; "" if it did not.
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
        """The virtual time in seconds."""
        return self.virtual_ns / NS_PER_SECOND

    @property
    def tier_shares(self) -> dict[str, float]:
        """The part of the hit share that loads added, by tier."""
        queried = max(1, self.counts.queried_tokens)
        tiers = zip(self.spec.tiers, self.counts.tier_hit_tokens, strict=True)
        return {tier.kind.value: tokens / queried for tier, tokens in tiers}

    def refused_by_reason(self) -> dict[str, int]:
        """Return the number of refused requests by reason, most frequent first."""
        return dict(Counter(refusal.reason for refusal in self.refusals).most_common())

    def disagreements(self) -> list[str]:
        """Return the contradictions between the counts; an empty list if they agree."""
        return list(self._disagreements())

    def _disagreements(self) -> Iterator[str]:
        if self.completed + len(self.refusals) != self.requests:
            yield f"{self.completed} completed and {len(self.refusals)} refused are not {self.requests} requests"
        for name in (one.name for one in fields(ServiceCounts)):
            if name == "evicted_blocks" and not self.counts_evictions:
                continue
            ours, theirs = getattr(self.tally, name), getattr(self.counts, name)
            if ours != theirs:
                yield f"{name}: the service counts {theirs}, the engine {ours}"

    def as_json(self) -> dict[str, Any]:
        """Return the whole outcome as JSON values, with the counts of both sides."""
        return {
            "workload": self.workload,
            "model": self.model,
            "replicas": self.num_replicas,
            "groups": [{"kind": g.kind.value, "block_size": g.block_size} for g in self.spec.groups],
            "num_blocks": self.spec.num_blocks,
            "tiers": [
                {
                    "kind": tier.kind.value,
                    "num_blocks": tier.num_blocks,
                    "save": tier.save.value,
                    "checkpoint_percent": tier.checkpoint_percent,
                }
                for tier in self.spec.tiers
            ],
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
