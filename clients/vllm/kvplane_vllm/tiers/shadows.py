"""The shadows of vLLM's requests in the tiers, and which of them may have filled a block in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class State(Enum):
    """Where a shadow is."""

    IDLE = auto()  # it holds no blocks
    FETCHING = auto()  # the disk is read into its blocks
    LOADING = auto()  # its blocks are copied to those of vLLM
    RUNNING = auto()  # vLLM has computed tokens of it


@dataclass(slots=True)
class Shadow:
    """The shadow of a request.

    Attributes:
        slot: of the allocator.
        num_tokens, num_hashes: of the request, as the allocator knows them.
        held: leading tokens whose blocks the shadow holds or that are being copied.
        asked: tokens that vLLM had of its own when it asked last.
        job: load from the disk in flight.
        since: when it began to wait for the disk; 0 = it does not.
        tries: loads from the disk since vLLM took a hit.
        due: the step of vLLM in which it may fill a block, if it gains a token in each before.
        is_over: vLLM's request has ended, and its load has not.
        is_computed: a load to the device failed: it would fail again.
    """

    slot: int
    request: Request | Prompt
    num_tokens: int = 0
    num_hashes: int = 0
    state: State = State.IDLE
    held: int = 0
    asked: int = 0
    job: int = 0
    since: float = 0.0
    tries: int = 0
    due: int = 0
    is_over: bool = False
    is_computed: bool = False


@dataclass(slots=True)
class Counts:
    """What happened, in tokens or requests."""

    loaded_tokens: int = 0
    fetched_loads: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    refused: int = 0  # times that there was no room in host memory for what a request loads or saves
    unsaved: int = 0  # steps of which a block was lost before it could be saved
    mismatched: int = 0  # hits with other blocks than vLLM has for them


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that no request has yet: it is read from the disk into host memory.

    Attributes:
        request_id: names it in the decisions.
        num_tokens: one more than its hashes cover, since the last token of a request is never a hit.
        block_hashes: of its full blocks.
    """

    request_id: str
    num_tokens: int
    block_hashes: Sequence[bytes]
    num_computed_tokens: int = 0
    resumable: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """All of its tokens."""
        return self.num_tokens


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
