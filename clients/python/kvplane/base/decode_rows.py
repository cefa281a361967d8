"""The rows of a decode step that an engine filled in columns, as bytes: made once, sent, and recorded.

A part with such rows has no facts and run sections until one is read (`kvplane.base.when_read`). None is in
the usual case, where making them would cost more than all else that a client does for a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from kvplane.base.sections import Facts, Run


@dataclass(slots=True, eq=False)
class DecodeRows:
    """A step that asks for the next slot of each request, and usually gives each the token before it. Never modified.

    Attributes:
        slots: of the rows, in order. Rows that a builder made of the same slots have the same object.
        message: the sections `facts` and `run` in the bytes of a Part message, little-endian. The tokens, u32, begin at
            `tokens_at`, and the column `extra` of the run section, i32, is at the end.
        appended: whether there are facts, that each request got one token.
        tokens_at: see above.
        num_tokens: 0 if the engine gives hashes.
        num_extra: entries of `extra`; 0 = it is 0 in all rows.
        num_hashes: of each row, of an engine that gives hashes; empty = none is given.
        hashes: of the blocks that the tokens complete, joined.
    """

    slots: array[int]
    message: bytes
    appended: bool
    tokens_at: int
    num_tokens: int
    num_extra: int
    num_hashes: array[int] = field(default_factory=partial(array, "I"))
    hashes: bytes = b""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.num_tokens

    def appended_tokens(self) -> array[int]:
        """Return a copy of the tokens."""
        return array("I", self.message[self.tokens_at : self.tokens_at + 4 * self.num_tokens])

    def extra_tokens(self) -> array[int]:
        """Return a copy of the column `extra`."""
        return array("i", self.message[len(self.message) - 4 * self.num_extra :])

    def unpacked(self) -> Mapping[str, object]:
        """Return the sections, by name. They are copies."""
        made: dict[str, object] = {"run": Run(self.slots[:], self.extra_tokens())}
        if self.appended:
            ones, tokens = array("I", [1]) * len(self.slots), self.appended_tokens()
            made["facts"] = Facts(self.slots[:], [], ones, tokens, self.num_hashes[:], self.hashes)
        return made
