"""Parts of decode steps, built from columns that an engine fills in place and uses again for each step.

    builder = StepBuilder(slots)                # one row per running request, in scheduling order
    builder.tokens[:] = sampled                 # an array("I"); or through numpy.asarray(builder.tokens)
    session.apply(builder.part(AdmitRow(7)))    # other rows of the step are given as rows

Such a step takes a few operations on arrays, however many requests it has. Its message has the same bytes as that of a
part built from rows (`kvplane.session.rows`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Budget, Cache, Facts, Part, Run
from kvplane.base.when_read import made_of
from kvplane.session.rows import CONTENT, FactRow, Row, RunRow, part_of
from kvplane.wire.packed_step import RowsWriter

_FACTS = {one.name: one.default for one in fields(FactRow) if one.name not in CONTENT}
_FACTS |= {"appended": 0, "num_hashes": 0}
_NO_TOKENS, _NO_EXTRA = array("I"), array("i")
_RUN = {one.name: one.default for one in fields(RunRow)}


class StepBuilder:
    """The rows of a decode step: each request got one token, and asks for the slot of the next one.

    Attributes:
        tokens: u32, writable, one per row: the token that was appended to each request. Not sent with `hashed`.
        extra: i32, writable, one per row, 0 at first: tokens that a row asks for beyond the known ones, such as drafts,
            or 1 for a step that is sent before the tokens of the step before it are known.
    """

    tokens: memoryview[int]
    extra: memoryview[int]

    def __init__(self, slots: Sequence[int] = (), *, hashed: bool = False) -> None:
        """Start with these rows. `hashed`: the engine hashes its tokens itself and gives the hash of each block that
        becomes full (`add_hash`); otherwise the service hashes the tokens.
        """
        self._hashed = hashed
        self.set_rows(slots)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> Sequence[int]:
        """The slots of the rows, in order."""
        return self._shown

    def set_rows(self, slots: Sequence[int]) -> None:
        """Replace the rows, for instance after a request ended: one for each slot. `tokens` and `extra` are 0 again, in
        new memory, and hashes are dropped.

        Raises InvalidArgument for a slot that is no u32.
        """
        try:
            self._slots = array("I", slots)
        except (OverflowError, TypeError) as error:
            raise InvalidArgument(str(error), field="slots", remedy="give integers from 0 to 4294967295") from error
        num_rows, self._shown = len(self._slots), memoryview(self._slots).toreadonly()
        self._ones = array("I", [1]) * num_rows
        self._tokens, self._extra = array("I", bytes(4 * num_rows)), array("i", bytes(4 * num_rows))
        self._zeros = self._extra[:]
        self.tokens, self.extra = memoryview(self._tokens), memoryview(self._extra)
        self._digests: dict[int, list[bytes]] = {}
        self._writer = RowsWriter(self._slots, not self._hashed) if num_rows and sys.byteorder == "little" else None

    def add_hash(self, row: int, digest: bytes) -> None:
        """Give the hash of a block that the next part's token completes. `row` counts from 0.

        Raises InvalidArgument without `hashed`, or if there is no such row.
        """
        if not self._hashed:
            raise InvalidArgument(
                "the builder sends tokens, which the service hashes", field="hashed", remedy="StepBuilder(hashed=True)"
            )
        if not 0 <= row < len(self):
            raise InvalidArgument(
                f"there is no row {row}, but {len(self)} rows", field="row", remedy="give the number of a row, from 0"
            )
        self._digests.setdefault(row, []).append(digest)

    def part(self, *rows: Row, budget: Budget | None = None, cache: Cache | None = None, appended: bool = True) -> Part:
        """Return a part with the builder's rows, and then the given ones in the same sections or in others. The columns
        may be filled again at once: the part has copies of them.

        Args:
            rows: the other rows of the step, such as admissions and the ends of requests.
            budget: limits of the run and admit rows.
            cache: what happened to pages.
            appended: whether the requests got tokens; False for a step that is sent before the first tokens are known.
        """
        has_tokens, has_extra = appended and not self._hashed, self._extra != self._zeros
        if self._writer is not None and not (rows or budget or cache):
            tokens, extra = self._tokens if has_tokens else _NO_TOKENS, self._extra if has_extra else _NO_EXTRA
            if appended and self._digests:
                return made_of(Part, self._writer.hashed(*self._take_hashes(), extra))
            return made_of(Part, self._writer.rows(appended, tokens, extra))
        extra = array("i") if self._extra == self._zeros else self._extra[:]
        tokens = self._tokens[:] if appended and not self._hashed else array("I")
        counts, hashes = self._take_hashes() if appended and self._digests else (array("I"), b"")
        if rows or not self._slots:
            part = part_of(*rows) if rows else Part()
            if appended and self._slots:
                part.facts.hashes = hashes + part.facts.hashes
                part.facts.tokens = tokens + array("I", part.facts.tokens)
                _put_first(part.facts, _FACTS, {"slot": self._slots, "appended": self._ones, "num_hashes": counts})
            if self._slots:
                _put_first(part.run, _RUN, {"slot": self._slots, "extra": extra})
        elif appended:
            facts = Facts(self._slots, [], self._ones, tokens, counts, hashes)
            part = Part(facts=facts, run=Run(self._slots, extra))
        else:
            part = Part(run=Run(self._slots, extra))
        if budget is not None:
            part.budget = budget
        if cache is not None:
            part.cache = cache
        return part

    def _take_hashes(self) -> tuple[array[int], bytes]:
        """Return the number of hashes of each row, and the hashes; and forget them."""
        counts, digests = array("I", bytes(4 * len(self))), self._digests
        self._digests = {}
        for row, given in digests.items():
            counts[row] = len(given)
        return counts, b"".join(digest for row in sorted(digests) for digest in digests[row])


def _put_first(section: Facts | Run, defaults: Mapping[str, object], columns: Mapping[str, array[int]]) -> None:
    """Put rows, given as columns, before the rows of a section. An empty column is one of defaults."""
    num_rows, num_behind = len(columns["slot"]), len(section.slot)
    if not num_behind:
        for name, column in columns.items():
            setattr(section, name, column)
        return
    for name, default in defaults.items():
        mine, behind = columns.get(name), getattr(section, name)
        if mine or behind:
            setattr(section, name, [*(mine or [default] * num_rows), *(behind or [default] * num_behind)])
