"""The messages of a session's stream, as the client writes and reads them."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TypeAlias

from kvplane.base.errors import InternalError, KvplaneError, LimitExceeded
from kvplane.base.hashing.native import read_answer
from kvplane.base.packed_ints import PackedInts
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Blocks, Orders, PartResult, Step, StepResult
from kvplane.base.when_read import made_with
from kvplane.v1.allocation_pb2 import Heartbeat, SessionClose, SessionRequest, SessionResponse
from kvplane.wire.packed_step import step_bytes
from kvplane.wire.result import decode_result, encode_result
from kvplane.wire.session import decode_opened, decode_step_error, encode_open
from kvplane.wire.step import encode_step

SESSION = "/kvplane.v1.Allocation/Session"
Taken: TypeAlias = SessionResponse | StepResult  # a message of the service; the result of a step is decoded already
Sent: TypeAlias = SessionRequest | bytes  # a message of the client; that of a step is serialized already


def open_message(request: OpenRequest) -> SessionRequest:
    """Return the message that opens the session."""
    return SessionRequest(open=encode_open(request))


def serialized(message: Sent) -> bytes:
    """Return the bytes of a message."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def step_message(step: Step, max_bytes: int) -> bytes:
    """Return the bytes of the message with a step. Raises LimitExceeded if there are more than `max_bytes`, since the
    service would end the stream.
    """
    message = step_bytes(step) or SessionRequest(step=encode_step(step)).SerializeToString()
    if len(message) > max_bytes:
        raise LimitExceeded(
            f"the message of step {step.seq} has {len(message)} bytes, the maximum is {max_bytes}",
            remedy="send the step in several parts, or hashes instead of tokens",
        )
    return message


def heartbeat_message(waiting_requests: int | None = None) -> SessionRequest:
    """Return the message that keeps the lease, with the number of waiting requests if it is known."""
    return SessionRequest(heartbeat=Heartbeat(waiting_requests=waiting_requests))


def close_message() -> SessionRequest:
    """Return the message that closes the session."""
    return SessionRequest(close=SessionClose())


_reader = cache(read_answer)


def result_message(result: StepResult) -> bytes:
    """Return the bytes of the message with a step's result."""
    return SessionResponse(result=encode_result(result)).SerializeToString()


def taken(raw: bytes) -> Taken:
    """Parse a message of the service, and decode it; see `decoded`. One compiled call reads the usual answer: grants,
    admissions, blocks and orders.
    """
    read = _reader()
    if read is None or (found := read(raw, PackedInts)) is None:
        return decoded(SessionResponse.FromString(raw))
    seq, part, published_through, fields, blocks, tables, orders = found
    if blocks:
        fields["new_blocks"] = Blocks(**blocks)
    if tables:
        fields["tables"] = Blocks(**tables)
    if orders:
        fields["orders"] = made_with(Orders, orders)
    return StepResult(seq, part, [made_with(PartResult, fields)], published_through)


def decoded(response: SessionResponse) -> Taken:
    """Decode a message if it is the result of a step, and return any other as it is. Raises no KvplaneError: a result
    that cannot be decoded stays a message, and `answer_of` raises its error where the answer is awaited.
    """
    if response.HasField("result"):
        with suppress(KvplaneError):
            return decode_result(response.result)
    return response


def opened_of(response: Taken) -> Opened:
    """Return the service's answer to the opening of the session. Raises InternalError for any other message."""
    kind = "result" if isinstance(response, StepResult) else response.WhichOneof("kind")
    if isinstance(response, StepResult) or kind != "opened":
        raise InternalError(
            f"the service sent {kind!r} first, expected 'opened'",
            remedy="use the same version of client and service",
        )
    return decode_opened(response.opened)


def answer_of(response: Taken) -> StepResult | KvplaneError | None:
    """Return a step's result or refusal; None for the notice that the service drains."""
    if isinstance(response, StepResult):
        return response
    kind = response.WhichOneof("kind")
    if kind == "result":
        return decode_result(response.result)
    if kind == "error":
        return decode_step_error(response.error)
    if kind == "draining":
        return None
    raise InternalError(
        f"the service sent {kind!r}, expected 'result', 'error' or 'draining'",
        remedy="use the same version of client and service",
    )


def reader_failed(bug: Exception) -> InternalError:
    """Return the error for those who wait for an answer when reading the stream failed with this exception."""
    error = InternalError(
        f"the reader of the session's stream failed: {bug!r}", remedy="open a new session, and report this bug"
    )
    error.__cause__ = bug
    return error
