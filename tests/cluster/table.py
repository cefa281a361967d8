"""The table of a run: a row per case, as soon as it has ended, and a line that counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PASSED, PARTLY, FAILED = "passed", "partly", "FAILED"
NAME, TIME = 44, 6


@dataclass(frozen=True)
class Row:
    """What a case showed.

    Attributes:
        seconds: how long it took.
        seen: what was measured, or why it failed.
        left_out: parts that this cluster does not permit, and why.
        kept: folder of what was kept of a failure; "" = none.
    """

    name: str
    seconds: float
    seen: str
    left_out: tuple[str, ...] = ()
    failed: bool = False
    kept: str = ""

    @property
    def result(self) -> str:
        return FAILED if self.failed else PARTLY if self.left_out else PASSED

    def lines(self) -> list[str]:
        """The row, and a line for each part that was left out and for what was kept."""
        first = f"{self.result:8}{self.seconds:{TIME}.1f} s  {self.name:{NAME}}  {' '.join(self.seen.split())}"
        more = [f"left out: {part}" for part in self.left_out] + [f"kept in {self.kept}"] * bool(self.kept)
        return [first.rstrip(), *(f"{'':{8 + TIME + 4}}{line}" for line in more)]


class Table:
    """Rows, each shown when it is added."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self.rows: list[Row] = []
        self._show = show

    def add(self, row: Row) -> None:
        self.rows.append(row)
        for line in row.lines():
            self._show(line)

    @property
    def is_good(self) -> bool:
        """Whether there is a row, and none failed."""
        return bool(self.rows) and not any(row.failed for row in self.rows)

    def summary(self) -> str:
        return counts([row.result for row in self.rows], sum(row.seconds for row in self.rows))


def counts(results: Sequence[str], seconds: float) -> str:
    """The last line of a run."""
    passed, partly, failed = (results.count(one) for one in (PASSED, PARTLY, FAILED))
    return f"cluster-test: {passed} passed, {partly} with parts left out, {failed} failed, in {seconds:.0f} s"
