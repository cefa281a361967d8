"""Leaves out intents as long as the two sides still differ in the same way (delta debugging)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.conformance.divergence import Divergence
from tests.conformance.live.driver import Driver
from tests.conformance.live.intents import Intent
from tests.conformance.live.peer import Reference, ReferenceFailed

MOST_RUNS = 400


def shrink(
    peer: Reference, header: dict[str, Any], sequence: Sequence[Intent], found: Divergence
) -> tuple[list[Intent], Driver, Divergence]:
    """A sequence from which nothing can be left out, the driver that ran it, and how it ends.

    First whole requests, then ever smaller runs of intents; at most MOST_RUNS tries.
    """
    search = _Search(peer, header, list(sequence), (found.op["op"], found.name))
    assert search.try_out(search.best), "the same intents gave another outcome"
    for name in sorted({one.name for one in sequence if hasattr(one, "name")}):
        search.try_out([one for one in search.best if getattr(one, "name", None) != name])
    width = max(1, len(search.best) // 2)
    while True:
        shorter = search.leave_out(width)
        if width == 1 and not shorter:
            break
        width = max(1, width // 2)
    assert search.driver is not None
    assert search.error is not None
    return search.best, search.driver, search.error


class _Search:
    def __init__(self, peer: Reference, header: dict[str, Any], best: list[Intent], signature: tuple[str, str]) -> None:
        self.best = best
        self.driver: Driver | None = None
        self.error: Divergence | None = None
        self._peer = peer
        self._header = header
        self._signature = signature
        self._runs = 0

    def leave_out(self, width: int) -> bool:
        """Try without each run of `width` intents; whether any was left out."""
        at, shorter = 0, False
        while at < len(self.best) and self._runs < MOST_RUNS:
            if self.try_out(self.best[:at] + self.best[at + width :]):
                shorter = True
            else:
                at += width
        return shorter

    def try_out(self, sequence: list[Intent]) -> bool:
        """Whether it still ends in the same kind of difference; then it is the best so far."""
        self._runs += 1
        driver = Driver(self._peer.ask(self._header), self._peer)
        try:
            driver.perform_all(sequence)
        except Divergence as error:
            if (error.op["op"], error.name) == self._signature:
                self.best, self.driver, self.error = sequence, driver, error
                return True
        except ReferenceFailed:
            return False
        return False
