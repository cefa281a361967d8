"""The rows of a decode step that an engine filled in columns, as bytes: made once, sent, and recorded.

A part with such rows has no facts and run sections until one is read (`kvplane.base.when_read`). None is in
the usual case, where making them would cost more than all else that a client does for a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping


class DecodeRows:
    """A step that asks for the next slot of each request, and usually gives each the token before it. Never modified.

    Attributes:
        slots: of the rows, in order. Rows that a builder made of the same slots have the same object.
        message: the sections `facts` and `run` in the bytes of a Part message, little-endian.
        tokens: the slice of it with the tokens, u32; empty if the engine gives hashes.
        extra: the slice of it with the column `extra` of the run section, i32; empty = 0 in all rows.
        appended: whether there are facts, that each request got one token.
    """

    __slots__ = ("appended", "extra", "message", "slots", "tokens")

    def __init__(self, slots: array[int], message: bytes, tokens: slice, extra: slice, appended: bool) -> None:
        self.slots, self.message = slots, message
        self.tokens, self.extra, self.appended = tokens, extra, appended

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.message[self.tokens]) // 4

    def appended_tokens(self) -> array[int]:
        """Return a copy of the tokens."""
        return array("I", self.message[self.tokens])

    def unpacked(self) -> Mapping[str, object]:
        """Return the sections, by name. They are copies."""
        from kvplane.base.step import Facts, Run  # which imports this module

        run = Run(self.slots[:], array("i", self.message[self.extra]))
        if not self.appended:
            return {"run": run}
        facts = Facts(self.slots[:], appended=array("I", [1]) * len(self.slots), tokens=self.appended_tokens())
        return {"facts": facts, "run": run}
