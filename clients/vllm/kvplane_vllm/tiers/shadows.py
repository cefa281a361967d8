"""The shadows of vLLM's requests in the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
