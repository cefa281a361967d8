"""Stores the answers of recent unary calls by op_id, so that a retry gets the same answer and changes nothing."""

from __future__ import annotations

from collections import OrderedDict

from kvplane.base.errors import InvalidArgument, OpIdReused

MAX_OP_ID_CHARS = 128


class OpWindow:
    """The answers of the last `size` calls with an op_id, or of fewer calls, so that the answers take at most
    `max_bytes` bytes.

    The newest answer is always kept, whatever its size, so that a client can always retry its last call.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def find(self, op_id: str, fingerprint: bytes) -> bytes | None:
        """Return the stored answer of this op_id, None if the op_id is new or empty.

        Raises:
            OpIdReused: the op_id was used with other content.
            InvalidArgument: the op_id is too long.
        """
        if len(op_id) > MAX_OP_ID_CHARS:
            raise InvalidArgument(
                f"{len(op_id)} characters", field="header.op_id", remedy=f"give at most {MAX_OP_ID_CHARS} characters"
            )
        known = self._answers.get(op_id)
        if known is None:
            return None
        check_equal(op_id, known[0], fingerprint)
        return known[1]

    def keep(self, op_id: str, fingerprint: bytes, answer: bytes) -> None:
        """Store an answer, and drop the oldest ones if there are too many. Does nothing for an empty op_id."""
        if not op_id:
            return
        self._answers[op_id] = (fingerprint, answer)
        self._num_bytes += len(answer)
        while len(self._answers) > self._size or (self._num_bytes > self._max_bytes and len(self._answers) > 1):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest)

    def clear(self) -> None:
        """Drop all answers: a new engine life has begun, in which answers of the previous one are invalid."""
        self._answers.clear()
        self._num_bytes = 0


def check_equal(op_id: str, known: bytes, fingerprint: bytes) -> None:
    """Raise OpIdReused if two calls with this op_id have different content."""
    if known != fingerprint:
        raise OpIdReused(
            f"op_id {op_id!r} was used for another call",
            field="header.op_id",
            remedy="choose a new op_id",
        )
