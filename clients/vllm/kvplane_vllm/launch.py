"""What a step's SchedulerOutput carries to the ranks when a kvplane worker lends the pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvplane.base.step import Orders

ATTRIBUTE = "kvplane_launch"  # of a SchedulerOutput


@dataclass(slots=True)
class Launch:
    """The orders that each rank carries out before it launches the step.

    Attributes:
        epoch: the engine life that owns the pages.
        executed: number of the last step that has finished on all ranks; 0 = none.
        parts: the orders, with step and part: of this step, and of the steps that ended since the last launch.
    """

    epoch: int
    executed: int = 0
    parts: list[tuple[int, int, Orders]] = field(default_factory=list)
