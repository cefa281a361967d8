"""The shadows of vLLM's requests in the tiers, and what a step of vLLM says of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING

from kvplane_vllm.tiers.messages import Copies

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
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
    unsaved: int = 0  # requests that lost a block before it could be saved
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
    resumable: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """All of its tokens."""
        return self.num_tokens


def computed_of(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Return the requests of a step, with their computed tokens before it."""
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    return chain(
        [(one.req_id, one.num_computed_tokens) for one in new],
        zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    )


def blocks_of(state: KVConnectorBlockState | None, name: str) -> Sequence[Sequence[int]]:
    """Return the blocks of a request of a step, by group."""
    found = state.get_block_ids(name) if state is not None else None
    assert found is not None, "vLLM gives the blocks of each request that it schedules"
    return found


def overwritten_by(output: SchedulerOutput, loads: dict[str, list[Copies] | None]) -> set[int]:
    """Return the blocks that a step may zero, copy into, load into or compute; further ones do no harm.

    What it computes is stored in blocks that it allocates, or behind the full blocks of a table, which no save reads.
    """
    rows = [one.block_ids for one in output.scheduled_new_reqs]
    rows += [row for row in output.scheduled_cached_reqs.new_block_ids if row is not None]
    found = set(chain.from_iterable(chain.from_iterable(rows)))
    found.update(output.new_block_ids_to_zero or ())
    found.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    found.update(block for copies in loads.values() for one in copies or () for block in one.device)
    return found
