"""What the engine counts of the answers, to be compared with the service's own counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvplane.base.step import AdmitStatus, Blocks, EventKind, Part, PartResult, RemoveReason
from kvplane_service.core.cache_events import runs_of


@dataclass(slots=True)
class Tally:
    """Counts of one engine; every field only grows. Lists have one entry per KV cache group.

    Attributes:
        steps, rows: steps sent, and rows of their facts, news, run and admit sections.
        messages: messages sent and answers received.
        admitted, resumed: granted admissions, and those of them that followed a preemption.
        ended, preempted: requests that finished or were given up; requests that lost their blocks.
        refused: admissions that found too few blocks.
        queried_tokens, hit_tokens: tokens of granted admissions, and those found cached.
        resumed_hit_tokens: of hit_tokens, those of resumptions.
        granted_tokens: tokens scheduled.
        allocated_blocks, hit_blocks: blocks handed out, and blocks adopted by hits.
        evicted_blocks: keys lost to another request, counted from the events; all 0 in a session without events.
        prompt_tokens, generated_tokens: of the requests that were completed.
    """

    num_groups: int
    steps: int = 0
    rows: int = 0
    messages: int = 0
    admitted: int = 0
    resumed: int = 0
    ended: int = 0
    preempted: int = 0
    refused: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    granted_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    allocated_blocks: list[int] = field(default_factory=list)
    hit_blocks: list[int] = field(default_factory=list)
    evicted_blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for column in ("allocated_blocks", "hit_blocks", "evicted_blocks"):
            setattr(self, column, getattr(self, column) or [0] * self.num_groups)

    def count(self, part: Part, answer: PartResult) -> None:
        """Count one step that had one part."""
        self.steps += 1
        self.messages += 2
        self.rows += len(part.facts.slot) + len(part.news.slot) + len(part.run.slot) + len(part.admit.slot)
        self.preempted += len(answer.preempted)
        self.granted_tokens += sum(answer.granted)
        self.refused += answer.admit_status.count(AdmitStatus.REFUSED)
        self._count_blocks(part, answer)
        for run in runs_of(answer.events):
            if run.kind is EventKind.REMOVED and run.reason is RemoveReason.EVICTED:
                self.evicted_blocks[run.group] += len(run.hashes)

    def count_admission(self, known_tokens: int, hit: int, granted: int, is_resumed: bool) -> None:
        """Count one granted admission."""
        self.admitted += 1
        self.queried_tokens += known_tokens
        self.hit_tokens += hit
        self.granted_tokens += granted
        if is_resumed:
            self.resumed += 1
            self.resumed_hit_tokens += hit

    def _count_blocks(self, part: Part, answer: PartResult) -> None:
        """New blocks as the answer lists them; hit blocks are those of an admission's table that are not new."""
        first_admit_row = len(part.run.slot)
        for row, group, count in _real_blocks(answer.new_blocks):
            self.allocated_blocks[group] += count
            if row >= first_admit_row:
                self.hit_blocks[group] -= count
        for _, group, count in _real_blocks(answer.tables):
            self.hit_blocks[group] += count

    def add(self, other: Tally) -> None:
        """Add what another engine of the same groups counted."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "num_groups":
                assert mine == theirs, "engines of one fleet have equal groups"
            elif isinstance(mine, list):
                setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])
            else:
                setattr(self, name, mine + theirs)


def _real_blocks(blocks: Blocks) -> Iterator[tuple[int, int, int]]:
    """(row, group, blocks that are not the null block) of each entry."""
    start = 0
    for row, group, count in zip(blocks.row, blocks.group, blocks.count, strict=True):
        yield row, group, count - blocks.ids[start : start + count].count(0)
        start += count
