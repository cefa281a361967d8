"""The messages of a session's stream, as a client writes and reads them."""

from __future__ import annotations

from kvplane.base.errors import InternalError, KvplaneError, LimitExceeded
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.v1.allocation_pb2 import Heartbeat, SessionClose, SessionRequest, SessionResponse
from kvplane.wire.result import decode_result
from kvplane.wire.session import decode_opened, decode_step_error, encode_open
from kvplane.wire.step import encode_step


def open_message(request: OpenRequest) -> SessionRequest:
    """Opens the stream."""
    return SessionRequest(open=encode_open(request))


def step_message(step: Step, max_bytes: int) -> SessionRequest:
    """Sends a step. Raises LimitExceeded for a message above `max_bytes`, which would end the stream."""
    message = SessionRequest(step=encode_step(step))
    size = message.ByteSize()
    if size > max_bytes:
        raise LimitExceeded(
            f"step {step.seq} takes {size} bytes, a message at most {max_bytes}",
            remedy="send it in several parts, or hashes instead of tokens",
        )
    return message


def heartbeat_message() -> SessionRequest:
    """Keeps the lease."""
    return SessionRequest(heartbeat=Heartbeat())


def close_message() -> SessionRequest:
    """Closes the session."""
    return SessionRequest(close=SessionClose())


def opened_of(response: SessionResponse) -> Opened:
    """The answer in the first response."""
    if response.WhichOneof("kind") != "opened":
        raise InternalError("the service did not answer the open of the session")
    return decode_opened(response.opened)


def answer_of(response: SessionResponse) -> StepResult | KvplaneError | None:
    """The answer in a later response; None for the notice that the service drains."""
    kind = response.WhichOneof("kind")
    if kind == "result":
        return decode_result(response.result)
    if kind == "error":
        return decode_step_error(response.error)
    if kind == "draining":
        return None
    raise InternalError(f"the service sent {kind!r} instead of an answer")
