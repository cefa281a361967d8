"""Answers of the last unary calls by op_id, so that a repeat changes nothing."""

from __future__ import annotations

from collections import OrderedDict

from kvplane.base.errors import InvalidArgument, OpIdReused

MAX_OP_ID_CHARS = 128


class OpWindow:
    """The answers of the last `size` calls that had an op_id, fewer when they take more than `max_bytes`.

    The newest is always kept: a client that repeats its last call gets its answer, however long.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def find(self, op_id: str, fingerprint: bytes) -> bytes | None:
        """The first answer to this op_id, None when it is new or empty.

        Raises:
            OpIdReused: the op_id was used with other content.
            InvalidArgument: it is too long.
        """
        if len(op_id) > MAX_OP_ID_CHARS:
            raise InvalidArgument(
                f"{len(op_id)} characters", field="header.op_id", remedy=f"give at most {MAX_OP_ID_CHARS}"
            )
        known = self._answers.get(op_id)
        if known is None:
            return None
        if known[0] != fingerprint:
            raise OpIdReused(
                f"op_id {op_id!r} was used for another call",
                field="header.op_id",
                remedy="choose a new op_id",
            )
        return known[1]

    def keep(self, op_id: str, fingerprint: bytes, answer: bytes) -> None:
        """Keep an answer, in place of the oldest when the window is full; nothing for an empty op_id."""
        if not op_id:
            return
        self._answers[op_id] = (fingerprint, answer)
        self._num_bytes += len(answer)
        while len(self._answers) > self._size or (self._num_bytes > self._max_bytes and len(self._answers) > 1):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest)

    def clear(self) -> None:
        """Forget all answers: a new engine life has begun and they hold no longer."""
        self._answers.clear()
        self._num_bytes = 0
