"""Which requests of a step of vLLM may have filled a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvplane_vllm.tiers.shadows import Shadow

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Filled:
    """Finds them without a look at all others.

    A request that decodes gains a token in a step, so it comes up again in the step in which that can fill its next
    block. Whatever gains more is new, resumed, or has more tokens in the step.
    """

    def __init__(self, unit: int) -> None:
        """`unit`: tokens; blocks are full at its multiples."""
        self._unit = unit
        self._step = 0  # of vLLM
        self._due: dict[int, list[Shadow]] = {}  # by step; those that came up since have another one of their own

    def of(
        self, output: SchedulerOutput, shadows: Mapping[str, Shadow], offered: Iterable[str] = ()
    ) -> Iterator[tuple[Shadow, int]]:
        """Yield some of these shadows, among which are all that have filled a block in the step, with their tokens in
        it. Call it with each step once. `offered`: requests of which vLLM offers states, maybe a step later.
        """
        self._step += 1
        scheduled = output.num_scheduled_tokens
        names = [*(one.req_id for one in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids]
        names += offered
        if output.total_num_scheduled_tokens > len(scheduled):
            names += [name for name, count in scheduled.items() if count > 1]
        found = {name: shadows[name] for name in names if name in shadows}
        for shadow in self._due.pop(self._step, ()):
            name = shadow.request.request_id
            if shadow.due == self._step and shadows.get(name) is shadow:
                found[name] = shadow
        for name, shadow in found.items():
            known = min(shadow.request.num_computed_tokens, shadow.request.num_tokens)
            shadow.due = self._step + self._unit - known % self._unit
            self._due.setdefault(shadow.due, []).append(shadow)
            if name in scheduled:
                yield shadow, scheduled[name]
