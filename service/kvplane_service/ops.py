"""Answers of the last unary calls by op_id, so that a repeat changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvplane.base.errors import InvalidArgument, OpIdReused

MAX_OP_ID_CHARS = 128


class OpWindow:
    """The answers of the last `size` calls that had an op_id."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def answer(self, op_id: str, fingerprint: bytes, compute: Callable[[], bytes]) -> bytes:
        """The first answer to this op_id, or what `compute` answers now. An error of `compute` is not kept.

        Raises:
            OpIdReused: the op_id was used with other content.
            InvalidArgument: it is too long.
        """
        if not op_id:
            return compute()
        if len(op_id) > MAX_OP_ID_CHARS:
            raise InvalidArgument(
                f"{len(op_id)} characters", field="header.op_id", remedy=f"give at most {MAX_OP_ID_CHARS}"
            )
        known = self._answers.get(op_id)
        if known is None:
            answer = compute()
            self._answers[op_id] = (fingerprint, answer)
            if len(self._answers) > self._size:
                self._answers.popitem(last=False)
            return answer
        if known[0] != fingerprint:
            raise OpIdReused(
                f"op_id {op_id!r} was used for another call", field="header.op_id", remedy="choose a new op_id"
            )
        return known[1]

    def clear(self) -> None:
        """Forget all answers: a new engine life has begun and they hold no longer."""
        self._answers.clear()
