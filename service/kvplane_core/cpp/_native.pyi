from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal

from typing_extensions import Buffer

from kvplane.base.groups import Medium
from kvplane.base.sections import Declined, Prefetched, Retained
from kvplane.base.step import Blocks, CacheEvent, EventKind, Orders, PartResult, RemoveReason, Step, StepResult
from kvplane_core.face.cache_events import CacheEvents

SOURCES: str  # digest of the C++ files

class Refused(Exception):
    """A step, or a row, cannot be applied; the arguments are those of `reasons.Refusal`."""

def new(
    settings: list[int],
    groups: list[list[int]],
    tiers: list[list[int]],
    hashing: tuple[bytes, tuple[object, int] | None],
    /,
) -> object: ...
def read_step(message: bytes, digest_size: int, /) -> tuple[Any, ...] | None: ...
def apply(
    core: object,
    step: Step,
    alone: bool,
    hash_tokens: Callable[[Step], tuple[Any, ...]],
    shown: Buffer,
    read: object,
    with_events: bool,
    /,
) -> StepResult | tuple[Any, ...]: ...
def read(core: object, question: str, /, *given: object) -> Any: ...  # noqa: ANN401  # see bind_reads.h
def change(core: object, name: str, /, *given: object) -> Any: ...  # noqa: ANN401  # see bind_changes.h
def decode_row(
    core: object, slot: int, num_tokens: int, digests: Sequence[bytes], num_new: int, lookahead: int, in_flight: int, /
) -> Sequence[list[int]] | Literal[False] | None: ...
def recorded_rows(recorded: object, /) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], bytes]]: ...
def advance(walk: object, /) -> bool | bytes | tuple[str, str] | None: ...
def pack_applied(head: bytes, core: object, step: Step, /) -> bytes | None: ...
def pack_events(head: bytes, shares: Sequence[tuple[object, int, int]], /) -> bytes: ...
def removals(events: object, /) -> list[int]: ...
def events(packed: object, /) -> list[CacheEvent]: ...
def answer_with(
    step: type[StepResult],
    part: type[PartResult],
    blocks: type[Blocks],
    orders: type[Orders],
    event: type[CacheEvent],
    kinds: tuple[EventKind | None, ...],
    reasons: tuple[RemoveReason, ...],
    device: Medium,
    events: type[CacheEvents],
    ints: type[array[int]],
    tier_events: type[object],
    declined: type[Declined],
    prefetched: type[Prefetched],
    hashed: type[Sequence[bytes]],
    retained: type[Retained],
    /,
) -> None: ...
