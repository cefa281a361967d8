"""The messages of a session's stream, as the client writes and reads them."""

from __future__ import annotations

from kvplane.base.errors import InternalError, KvplaneError, LimitExceeded
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.v1.allocation_pb2 import Heartbeat, SessionClose, SessionRequest, SessionResponse
from kvplane.wire.result import decode_result
from kvplane.wire.session import decode_opened, decode_step_error, encode_open
from kvplane.wire.step import encode_step


def open_message(request: OpenRequest) -> SessionRequest:
    """Return the message that opens the session."""
    return SessionRequest(open=encode_open(request))


def step_message(step: Step, max_bytes: int) -> SessionRequest:
    """Return the message with a step. Raises LimitExceeded if the message has more than `max_bytes` bytes, since the
    service would end the stream.
    """
    message = SessionRequest(step=encode_step(step))
    size = message.ByteSize()
    if size > max_bytes:
        raise LimitExceeded(
            f"the message of step {step.seq} has {size} bytes, the maximum is {max_bytes}",
            remedy="send the step in several parts, or hashes instead of tokens",
        )
    return message


def heartbeat_message() -> SessionRequest:
    """Return the message that keeps the lease."""
    return SessionRequest(heartbeat=Heartbeat())


def close_message() -> SessionRequest:
    """Return the message that closes the session."""
    return SessionRequest(close=SessionClose())


def opened_of(response: SessionResponse) -> Opened:
    """Return the service's answer to the opening of the session. Raises InternalError for any other message."""
    if response.WhichOneof("kind") != "opened":
        raise InternalError(
            f"the service sent {response.WhichOneof('kind')!r} first, expected 'opened'",
            remedy="use the same version of client and service",
        )
    return decode_opened(response.opened)


def answer_of(response: SessionResponse) -> StepResult | KvplaneError | None:
    """Return a step's result or refusal; None for the notice that the service drains."""
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
