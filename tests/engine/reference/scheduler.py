"""The scheduler of the reference engine: `kvplane.scheduling`, plus recurrent states and the choice of tokens from
logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvplane import scheduling
from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import Part, PartResult
from kvplane.scheduling import Drafter, Limits
from tests.engine.reference import batch
from tests.engine.reference.batch import NO_STATE, state_index
from tests.engine.reference.drafter import draft
from tests.engine.reference.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Limits):
    """The limits of the engine; see `Limits` for the other attributes.

    Attributes:
        report_lag: number of steps by which the engine delays its report of executed steps, to imitate several steps in
            flight: at most 3, and 2 where launches may fail (the service accepts 4 steps in flight).
        load_deadline_s: after this time a request waits no longer for its load from a tier, and computes its hit.
        canary_rate: share of the requests, 0 to 1, whose hits the engine computes again to compare them
            (`tests.engine.reference.canary`).
        weighs_loads: whether the engine reports what it measures, so that a hit is loaded only if that is faster than
            to compute it.
    """

    max_running: int = 8
    token_budget: int = 96
    admit_rows: int = 4
    num_drafts: int = 3
    drafter: Drafter = draft
    commits: bool = True
    report_lag: int = 0
    load_deadline_s: float = 30.0
    weighs_loads: bool = False
    canary_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's row of a launch, with the blocks of its recurrent states.

    `row.tokens` are known tokens, then drafts. `planned` is the row as `kvplane.scheduling` returned it.
    """

    request: Request
    row: batch.Row
    planned: scheduling.Scheduled


class Scheduler(scheduling.Scheduler):
    """The queue and the running requests of the reference engine, for one engine life (the time of one epoch)."""

    def __init__(self, spec: ReplicaSpec, config: SchedulerConfig) -> None:
        """Start with empty queues. Raises InvalidArgument if the groups store states for fewer drafts than
        `config.num_drafts`.
        """
        super().__init__(spec, config)
        self._state_sizes = {
            number: group.block_size for number, group in enumerate(spec.groups) if group.kind is GroupKind.MAMBA
        }

    def apply_result(self, part: Part, result: PartResult) -> list[Scheduled]:
        """Apply the result of a step and return the rows to compute."""
        return [self._with_states(row) for row in self.update(part, result)]

    def _with_states(self, planned: scheduling.Scheduled) -> Scheduled:
        request, tables = planned.request, planned.tables
        assert isinstance(request, Request), "the engine queues its own requests"
        if planned.is_admission:
            request.state_at = {group: state_index(planned.start, size) for group, size in self._state_sizes.items()}
        states = {group: tables[group][at] if at >= 0 else NO_STATE for group, at in request.state_at.items()}
        return Scheduled(
            request, batch.Row(planned.tokens, planned.start, planned.num_outputs, tables, states), planned
        )

    def take(self, scheduled: list[Scheduled], logits: Tensor) -> None:
        """Choose the tokens with the highest logits for the rows of a launch. The logits are [outputs, vocabulary], in
        row order.
        """
        chosen: list[int] = logits.argmax(dim=1).tolist()
        first = 0
        for one in scheduled:
            request, end = one.request, first + one.row.num_outputs
            accepted = self.finish_row(one.planned, chosen[first:end])
            if request.keep_logits:
                request.logits.extend(logits[first : first + accepted].cpu())
            rejected = one.row.end - request.computed
            request.state_at = {
                group: state_index(one.row.end, size) + rejected for group, size in self._state_sizes.items()
            }
            first = end
