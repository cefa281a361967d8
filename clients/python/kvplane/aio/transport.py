"""The gRPC transport of an asyncio session: one stream, with a task that takes each answer when it arrives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias, TypeVar
from weakref import finalize

import grpc
import grpc.aio

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.session import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, STEP_TIMEOUT_S, Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.rpc.channel import MAX_MESSAGE_BYTES
from kvplane.rpc.status import error_of_rpc
from kvplane.sansio.owners import Owners, Route, moving_is_breaking
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.wire import stream as stream_messages

_Call: TypeAlias = "grpc.aio.StreamStreamCall[stream_messages.Sent, SessionResponse]"
_Method: TypeAlias = "grpc.aio.StreamStreamMultiCallable[stream_messages.Sent, SessionResponse]"
_T = TypeVar("_T")
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the second: written to after its end
_WRITTEN_TOO_LATE = "Internal error from Core"  # grpc.aio's details of a write that came after the end of the stream
_STATUS_WAIT_S = 2.0
_NEVER = float("inf")


class GrpcTransport:
    """Carry the messages of one session over a gRPC channel, which the transport does not close. Implements
    AsyncSessionTransport.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | Owners[grpc.aio.Channel],
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """Create a transport without a stream. `send` refuses steps above `max_message_bytes` bytes, since the service
        ends a stream on which a larger message arrives.
        """
        self._owners = channel if isinstance(channel, Owners) else Owners(channel)
        self._methods: dict[grpc.aio.Channel, _Method] = {}
        self._channel = self._owners.present  # of the stream
        self._method(self._channel)
        self._open_timeout_s, self._step_timeout_s = open_timeout_s, step_timeout_s
        self._max_message_bytes = max_message_bytes
        self._stream: _Stream | None = None
        self.draining = self.can_move = False

    async def open(self, request: OpenRequest) -> Opened:
        """Open a stream and return the service's first answer.

        Raises:
            Unavailable: no service was reached; the next `open` tries the next address of the list.
            DeadlineExceeded: no answer within `open_timeout_s` seconds; the next `open` tries the next address of the
                list.
            KvplaneError: the service refused the session.
        """
        message = stream_messages.open_message(request)
        route = Route(self._owners)
        while True:
            try:
                opened = await self._open_at(self._method(route.channel), message)
            except KvplaneError as failed:
                route.after(failed)
            else:
                self._channel, self.can_move = route.channel, self._owners.has_other_than(route.channel)
                return opened

    def _method(self, channel: grpc.aio.Channel) -> _Method:
        """Return the gRPC method of a channel. It is created while the channel is open, since gRPC crashes if the
        channel is closed.
        """
        if channel not in self._methods:
            self._methods[channel] = channel.stream_stream(
                stream_messages.SESSION, stream_messages.serialized, SessionResponse.FromString
            )
        return self._methods[channel]

    async def _open_at(self, method: _Method, message: SessionRequest) -> Opened:
        self.abort()
        self.draining = False
        try:
            self._stream = _Stream(method())
            self._ending = finalize(self, self._stream.cancel_soon)
            self._ending.atexit = False
            async with self._within(self._open_timeout_s):
                await self._write(message)
                return stream_messages.opened_of(await self._read())
        except grpc.aio.UsageError as error:
            raise FailedPrecondition("the channel is closed", remedy="connect again") from error
        except KvplaneError:
            self.abort()
            raise

    async def send(self, step: Step) -> None:
        """Write a step to the stream. If the stream accepts nothing for `step_timeout_s` seconds, the stream is
        cancelled.

        Raises:
            InvalidArgument: a value of the step cannot be encoded.
            LimitExceeded: the encoded step is larger than `max_message_bytes`.
        """
        message = stream_messages.step_message(step, self._max_message_bytes)
        with suppress(DeadlineExceeded):
            async with self._within(self._step_timeout_s):
                await self._write(message)

    async def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer: the result of a step, or the refusal of a step.

        The stream ends when the call is cancelled.

        Raises:
            DeadlineExceeded: no answer within `step_timeout_s` seconds; the stream is then cancelled too.
        """
        while True:
            with moving_is_breaking():
                async with self._within(self._step_timeout_s):
                    answer = stream_messages.answer_of(await self._read())
            if answer is not None:
                return answer
            self.draining = True

    def ready(self) -> StepResult | None:
        """Return the next answer if it is here and a result; None otherwise. Raises nothing."""
        return self._stream.ready() if self._stream is not None else None

    async def heartbeat(self, waiting_requests: int | None = None) -> None:
        """Send a heartbeat, with the number of waiting requests. If the stream has ended, raise the error with which it
        ended.
        """
        if self._stream is None or self._stream.call.done():
            with moving_is_breaking():
                await self._require_stream().raise_end()
        with suppress(DeadlineExceeded):
            async with self._within(self._step_timeout_s):
                await self._write(stream_messages.heartbeat_message(waiting_requests))

    async def close(self) -> None:
        """Close the stream and wait up to two seconds until the service has ended it. A service that has ended the
        stream has freed the session's requests.

        If the service drains, the next `open` uses the next address of the list.
        """
        if self.draining:
            self._owners.instead_of(self._channel)
        if self._stream is None:
            return
        with suppress(KvplaneError):  # the end of the stream, or a broken stream
            async with self._within(CLOSE_TIMEOUT_S):
                await self._write(stream_messages.close_message())
                while True:
                    await self._read()
        self.abort()

    def abort(self) -> None:
        """Cancel the stream. Call it on the event loop's thread. Calls that wait on the stream raise Unavailable."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._ending.detach()
            stream.cancel()

    @asynccontextmanager
    async def _within(self, timeout_s: float) -> AsyncIterator[None]:
        """Run the `with` block. Cancel the stream if the block takes longer than `timeout_s`
        seconds or is cancelled.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            self.abort()
            raise DeadlineExceeded(
                f"the service did not answer within {timeout_s} s",
                remedy="open the session again, or raise the timeout",
            ) from None
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _write(self, message: stream_messages.Sent) -> None:
        """Write a message. A stream that has ended is not an error here: `_read` then raises the error with which it
        ended.
        """
        if self._stream is not None:
            with suppress(*_ENDED, Unavailable):
                await self._on_stream(self._stream.call.write(message))

    async def _read(self) -> stream_messages.Taken:
        """Return the next answer. If the stream has ended, raise the error with which it ended."""
        return await self._require_stream().read()

    def _require_stream(self) -> _Stream:
        if self._stream is None:
            raise Unavailable("the session has no open stream", remedy="open the session again")
        return self._stream

    async def _on_stream(self, writing: Awaitable[_T]) -> _T:
        """Await `writing`, and raise Unavailable when it ends because the stream was cancelled, not because this task
        was.

        `abort` and the closing of the channel cancel the stream; grpc.aio reports both with CancelledError.
        """
        task = asyncio.current_task()
        assert task is not None
        asked = task.cancelling()
        try:
            return await writing
        except asyncio.CancelledError:
            if task.cancelling() > asked:
                raise
            raise _cancelled() from None


class _Stream:
    """One gRPC stream, and the task that reads it until it ends."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._answers: deque[stream_messages.Taken] = deque()
        self._arrived: asyncio.Future[None] | None = None  # of who waits for an answer, or for the end
        self._end: KvplaneError | None = None
        self._first_outcome: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note_outcome)
        self._reader = asyncio.create_task(self._read_on(), name="kvplane-answers")

    def cancel(self) -> None:
        """End the stream. Call it on the event loop's thread."""
        self.call.cancel()

    def cancel_soon(self) -> None:
        """Have the event loop end the stream. Any thread may call this method: a collection of garbage runs on any."""
        with suppress(RuntimeError):  # the loop is closed
            self._reader.get_loop().call_soon_threadsafe(self.cancel)

    async def read(self) -> stream_messages.Taken:
        """Return the next answer. If the stream has ended, raise the error with which it ended."""
        while not self._answers:
            if self._end is not None:
                raise self._end.with_traceback(None)
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self._answers.popleft()

    def ready(self) -> StepResult | None:
        """Return the next answer if it is here and a result."""
        if not self._answers or not isinstance(first := self._answers[0], StepResult):
            return None
        self._answers.popleft()
        return first

    async def raise_end(self) -> None:
        """Wait for the end of the stream, and raise the error with which it ended."""
        await asyncio.wait([self._reader])
        assert self._end is not None, "the reader ends with the stream"
        raise self._end.with_traceback(None)

    async def _read_on(self) -> None:
        try:
            self._end = await self._read_to_the_end()
        except asyncio.CancelledError:
            self._end = _cancelled()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        except Exception as bug:
            self._end = stream_messages.reader_failed(bug)
        finally:
            self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def _read_to_the_end(self) -> KvplaneError:
        """Take every answer, and return the error that describes the end of the stream.

        After a write to an ended stream, grpc.aio reports its own INTERNAL error until the service's status arrives, or
        always if the status arrived earlier. In the second case this returns the outcome that `_note_outcome` recorded.
        """
        deadline_s = _NEVER
        clock = asyncio.get_running_loop().time
        while True:
            try:
                message = await self.call.read()
            except grpc.aio.AioRpcError as outcome:
                if outcome.details() != _WRITTEN_TOO_LATE:
                    return error_of_rpc(outcome)
                if self._first_outcome is not None and self._first_outcome.details() != _WRITTEN_TOO_LATE:
                    return error_of_rpc(self._first_outcome)
                deadline_s = min(deadline_s, clock() + _STATUS_WAIT_S)
                if clock() > deadline_s:
                    return Unavailable("the session's stream broke during a write", remedy="reopen it")
                await asyncio.sleep(0.001)
                continue
            if not isinstance(message, SessionResponse):  # grpc.aio.EOF
                return Unavailable("the service ended the session's stream", remedy="open the session again")
            self._answers.append(stream_messages.decoded(message))
            self._wake()

    def _note_outcome(self, call: _Call) -> None:
        """Record the call's first outcome. gRPC calls this when the call is done, so that the read returns without
        waiting.
        """
        if not call.cancelled():
            reading = call.read()
            try:
                reading.send(None)
            except grpc.aio.AioRpcError as outcome:
                self._first_outcome = outcome
            except StopIteration:
                return
            finally:
                reading.close()


def _cancelled() -> KvplaneError:
    return Unavailable("the session's stream was cancelled", remedy="open the session again")
