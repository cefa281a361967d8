"""Checks of the values in a column of a step, which name the field at fault."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from operator import or_

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import MAX_TOKEN_ID
from kvplane.base.prefetch import Prefetch
from kvplane.base.retain import Retain
from kvplane.base.step import Admit, Facts, News, Peek, RowFlag, Run


class ValueChecks:
    """Raises InvalidArgument for values out of range. `_where` is the prefix of the names of fields."""

    _where = ""

    def _columns(
        self, section: Facts | News | Run | Admit | Peek | Prefetch | Retain, names: Sequence[str], where: str
    ) -> None:
        """Require that each of these columns has one entry per row, or no entry."""
        rows = len(section.num_hashes if isinstance(section, Retain) else section.slot)
        for name in names:
            column = getattr(section, name)
            if column and len(column) != rows:
                self._require(
                    False, f"{where}.{name}", f"{len(column)} entries for {rows} rows; send one per row, or none"
                )

    def _range(self, column: Sequence[int], low: int, high: int, field: str) -> None:
        if column and not (low <= min(column) and max(column) <= high):
            self._require(False, field, f"every entry must be {low} to {high}, found {min(column)} to {max(column)}")

    def _bits(self, column: Sequence[int], allowed: int, field: str) -> None:
        unknown = reduce(or_, column, 0) & ~int(allowed)  # the complement of a RowFlag has its own bits alone
        if unknown:
            name = ": LOAD is for admit rows of a replica with tiers" if unknown & RowFlag.LOAD else ""
            what = f"bit {unknown & -unknown} is not a flag of these rows{name}"
            raise InvalidArgument(what, field=self._where + field, remedy="leave it out")

    def _token_ids(self, tokens: Sequence[int], field: str) -> None:
        if not isinstance(tokens, array) or tokens.typecode not in "BHI":  # each entry of such an array is an id
            self._range(tokens, 0, MAX_TOKEN_ID, field)

    def _require(self, holds: bool, field: str, message: str) -> None:
        if not holds:
            raise InvalidArgument(message, field=self._where + field)
