"""Answers of recent unary calls by op_id, so that a retry changes nothing."""

from __future__ import annotations

from collections import OrderedDict

from kvplane.base.errors import InvalidArgument, OpIdReused

MAX_OP_ID_CHARS = 128


class OpWindow:
    """The answers of the last `size` calls with an op_id, fewer when they take more than `max_bytes`.

    The newest is always kept, whatever its size, so that a client can always retry its last call.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def find(self, op_id: str, fingerprint: bytes) -> bytes | None:
        """The stored answer of this op_id, None when it is new or empty.

        Raises:
            OpIdReused: the op_id was used with other content.
            InvalidArgument: the op_id is too long.
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
        """Store an answer, and drop the oldest ones when the window is full. Does nothing for an empty op_id."""
        if not op_id:
            return
        self._answers[op_id] = (fingerprint, answer)
        self._num_bytes += len(answer)
        while len(self._answers) > self._size or (self._num_bytes > self._max_bytes and len(self._answers) > 1):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest)

    def clear(self) -> None:
        """Drop all answers: a new engine life has begun, in which they are invalid."""
        self._answers.clear()
        self._num_bytes = 0
