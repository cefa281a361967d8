"""A step that an engine applies row by row on the compiled core, in its own process: the methods of `OpenStep`.

Each method is one call of the core. A row that the core does not accept is given to an `OpenStep` on a `Replica` with
the state of the core, which names the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import UNLIMITED, AdmitStatus, Cache, News, PartResult, RowFlag, StepResult
from kvplane_service.core.facts import Update
from kvplane_service.core.lookup import Hit
from kvplane_service.core.native import _native
from kvplane_service.core.open_step import NO_TERMS, AdmitTerms, OpenStep

if TYPE_CHECKING:
    from kvplane_service.core.native import NativeReplica

_ADMIT_STATUS = tuple(AdmitStatus)


class NativeOpenStep:
    """See `OpenStep`. The rows are not recorded: a mirrored engine decides on a `Replica`."""

    def __init__(self, replica: NativeReplica, executed_through: int) -> None:
        """Begin the next step of the replica; all steps up to `executed_through` have finished on all ranks."""
        self._replica = replica
        self._core = replica.changed()
        self.seq = _native.open_step(self._core, executed_through)
        self._executed_through = executed_through
        self._loads: set[int] = set()
        self._results: list[PartResult] = []
        self.new_blocks: list[list[int]] = []
        self.reset_done = False

    def close(self) -> StepResult:
        """End the step; returns the result of the step."""
        parts, through = _native.close_step(self._replica.changed())
        self._results += parts
        return StepResult(self.seq, 0, self._results, through)

    def flush(self) -> list[PartResult]:
        """Complete the results of the rows so far; further rows start the next part."""
        self._results += _native.flush_step(self._replica.changed())
        return self._results

    @property
    def results(self) -> list[PartResult]:
        """The results that are complete and were returned by `flush`."""
        return self._results

    @property
    def has_events(self) -> bool:
        """Whether there are cache events that no complete result has."""
        return _native.has_events(self._core)

    def is_granted(self, slot: int) -> bool:
        """Whether the slot runs in this step."""
        return _native.is_granted(self._core, slot)

    @property
    def any_granted(self) -> bool:
        """Whether a slot runs in this step."""
        return _native.is_granted(self._core, -1)

    def update(self, update: Update) -> list[int]:
        """Apply one row of facts; returns the slots that are preempted by it."""
        preempted = _native.update_row(self._replica.changed(), tuple(update))
        return self._refused("update", update) if preempted is NotImplemented else preempted

    def change_cache(self, cache: Cache) -> list[int]:
        """Apply a cache section; returns the slots that are preempted by it."""
        changed = _native.cache_row(self._replica.changed(), cache)
        if changed is NotImplemented:
            self._refused("change_cache", cache)
        preempted, self.reset_done = changed
        return preempted

    def add(self, slot: int, num_tokens: int, digests: Sequence[bytes], **columns: str | int) -> None:
        """Put a new request of `num_tokens` tokens into a free slot."""
        news = News([slot], [num_tokens], num_hashes=[len(digests)], hashes=b"".join(digests))
        for name, value in columns.items():
            setattr(news, name, [value])
        if _native.add_row(self._replica.changed(), news) is NotImplemented:
            self._refused("add", slot, num_tokens, digests, **columns)

    def decode(
        self, slot: int, num_tokens: int, digests: Sequence[bytes], num_new: int, lookahead: int, in_flight: int
    ) -> Sequence[list[int]] | Literal[False] | None:
        """Append what a running request gained, and grant it tokens: `update` and `extend` in one call."""
        return _native.decode_row(self._replica.changed(), slot, num_tokens, digests, num_new, lookahead, in_flight)

    def extend(
        self, slot: int, num_new: int, lookahead: int = 0, in_flight: int = -1, flags: int = 0, reserved: int = 0
    ) -> Sequence[list[int]] | None:
        """Grant `num_new` tokens to a running request; None, and no change, if too few blocks are free."""
        row = slot, num_new, lookahead, in_flight, int(flags), reserved
        new = _native.extend_row(self._replica.changed(), *row)
        return self._refused("extend", *row) if new is False else new

    def look_up(self, slot: int, limit: int = UNLIMITED) -> Hit:
        """Find the request's longest cached prefix of at most `limit` tokens. Changes nothing."""
        found = _native.look_up(self._core, slot, limit)
        if found is None:
            raise InvalidArgument(f"slot {slot} has no request", field="slot")
        return Hit(found[0], found[1], tuple(found[2]))

    def admit(self, slot: int, num_hit: int, num_new: int, terms: AdmitTerms = NO_TERMS) -> AdmitStatus:
        """Admit a waiting request: adopt a hit of `num_hit` tokens and grant `num_new` more."""
        answer = _native.admit_row(self._replica.changed(), slot, num_hit, num_new, terms)
        if answer is NotImplemented:
            self._refused("admit", slot, num_hit, num_new, terms)
        number, new = answer
        status = _ADMIT_STATUS[number]
        if status is AdmitStatus.GRANTED:
            self.new_blocks = new
            if terms.external and terms.flags & RowFlag.DELAY_CACHING:
                self._loads.add(slot)
        return status

    def _refused(self, name: str, *row: object, **columns: object) -> NoReturn:
        """Raise the InvalidArgument of a row that the core did not accept."""
        reference = self._replica.reference()
        step = OpenStep.within(reference, self.seq, self._executed_through)
        granted = [slot for slot in reference.requests.slots() if self.is_granted(slot)]
        step.granted.update(granted)
        step.loads.update(self._loads)
        getattr(step, name)(*row, **columns)
        raise AssertionError(f"the compiled core does not accept the row {name}{row}")
