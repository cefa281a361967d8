"""A session over gRPC, driven by asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc
import grpc.aio

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.session import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, STEP_TIMEOUT_S, Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.rpc.channel import MAX_MESSAGE_BYTES
from kvplane.rpc.status import error_of_rpc
from kvplane.sansio.owners import Owners, Route, moving_is_breaking
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.wire import stream as stream_messages

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2_grpc import AllocationAsyncStub

_Call: TypeAlias = "grpc.aio.StreamStreamCall[SessionRequest, SessionResponse]"
_T = TypeVar("_T")
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the second: written to after its end
_WRITTEN_TOO_LATE = "Internal error from Core"  # grpc.aio's details of a write that came after the end of the stream
_STATUS_WAIT_S = 2.0


class GrpcTransport:
    """Carries one session over a channel, which it does not close. Implements AsyncSessionTransport."""

    def __init__(
        self,
        channel: grpc.aio.Channel | Owners[grpc.aio.Channel],
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """`max_message_bytes`: larger steps are refused here, since the service would end the stream."""
        self._owners = channel if isinstance(channel, Owners) else Owners(channel)
        self._stubs: dict[grpc.aio.Channel, AllocationAsyncStub] = {}
        self._channel = self._owners.present  # of the stream
        self._stub(self._channel)
        self._open_timeout_s, self._step_timeout_s = open_timeout_s, step_timeout_s
        self._max_message_bytes = max_message_bytes
        self._call: _Call | None = None
        self._first_outcome: grpc.aio.AioRpcError | None = None  # of the call
        self.draining = self.can_move = False

    async def open(self, request: OpenRequest) -> Opened:
        """Open a stream. Raises Unavailable, DeadlineExceeded after `open_timeout_s`, or the service's refusal.

        After the first two the next attempt uses the next address of the list.
        """
        message = stream_messages.open_message(request)
        route = Route(self._owners)
        while True:
            try:
                opened = await self._open_at(self._stub(route.channel), message)
            except KvplaneError as failed:
                route.after(failed)
            else:
                self._channel, self.can_move = route.channel, self._owners.has_other_than(route.channel)
                return opened

    def _stub(self, channel: grpc.aio.Channel) -> AllocationAsyncStub:
        """The channel's stub, created once while the channel is open: gRPC crashes on a stub of a closed channel."""
        if channel not in self._stubs:
            self._stubs[channel] = AllocationStub(channel)
        return self._stubs[channel]

    async def _open_at(self, stub: AllocationAsyncStub, message: SessionRequest) -> Opened:
        self.abort()
        self.draining = False
        try:
            self._first_outcome = None
            self._call = stub.Session()
            self._call.add_done_callback(self._note_outcome)
            async with self._within(self._open_timeout_s):
                await self._write(message)
                return stream_messages.opened_of(await self._read())
        except grpc.aio.UsageError as error:
            raise FailedPrecondition("the channel is closed", remedy="connect again") from error
        except KvplaneError:
            self.abort()
            raise

    async def send(self, step: Step) -> None:
        """Write a step to the stream. A stream that accepts nothing for `step_timeout_s` is broken.

        Raises InvalidArgument for a value that cannot be encoded, LimitExceeded for a step above `max_message_bytes`.
        """
        message = stream_messages.step_message(step, self._max_message_bytes)
        with suppress(DeadlineExceeded):
            async with self._within(self._step_timeout_s):
                await self._write(message)

    async def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer; DeadlineExceeded after `step_timeout_s`. Cancellation and the deadline break the
        stream, since grpc.aio cancels a call whose read is cancelled.
        """
        while True:
            with moving_is_breaking():
                async with self._within(self._step_timeout_s):
                    answer = stream_messages.answer_of(await self._read())
            if answer is not None:
                return answer
            self.draining = True

    async def heartbeat(self) -> None:
        """Keep the lease. Raises the error that ended the stream, if it has ended."""
        if self._call is None or self._call.done():
            with moving_is_breaking():
                await self._read()
        with suppress(DeadlineExceeded):
            async with self._within(self._step_timeout_s):
                await self._write(stream_messages.heartbeat_message())

    async def close(self) -> None:
        """Close the stream and wait up to two seconds for the end: the service has then freed the requests.

        When the service drains, the next `open` uses the next address of the list.
        """
        if self.draining:
            self._owners.instead_of(self._channel)
        if self._call is None:
            return
        with suppress(KvplaneError):  # the end of the stream, or a broken stream
            async with self._within(CLOSE_TIMEOUT_S):
                await self._write(stream_messages.close_message())
                while True:
                    await self._read()
        self.abort()

    def abort(self) -> None:
        """Cancel the stream; on the event loop's thread. Waiting calls raise Unavailable."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    @asynccontextmanager
    async def _within(self, timeout_s: float) -> AsyncIterator[None]:
        """Cancel the stream when the block takes longer or is cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            self.abort()
            raise DeadlineExceeded(f"no answer within {timeout_s} s") from None
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _write(self, message: SessionRequest) -> None:
        """Write a message. The end of the stream is not an error here: `_read` raises it."""
        if self._call is not None:
            with suppress(*_ENDED, Unavailable):
                await self._on_stream(self._call.write(message))

    async def _read(self) -> SessionResponse:
        """The next message. Raises the error that ended the stream."""
        if self._call is None:
            raise Unavailable("no stream is open")
        try:
            response = await self._on_stream(self._read_to_the_end(self._call))
        except grpc.aio.AioRpcError as outcome:
            raise error_of_rpc(outcome) from None
        if not isinstance(response, SessionResponse):  # grpc.aio.EOF
            raise Unavailable("the service ended the stream")
        return response

    async def _on_stream(self, reading: Awaitable[_T]) -> _T:
        """Distinguish a cancelled stream (`abort`, closed channel), which is Unavailable, from a cancelled task."""
        task = asyncio.current_task()
        assert task is not None
        asked = task.cancelling()
        try:
            return await reading
        except asyncio.CancelledError:
            if task.cancelling() > asked:
                raise
            raise Unavailable("the stream was cancelled") from None

    async def _read_to_the_end(self, call: _Call) -> object:
        """The next message, EOF, or an AioRpcError with the status that the service sent.

        A write after the end of the stream makes grpc.aio report its own INTERNAL, either until the service's status
        arrives, or, when that arrived first, permanently; then the recorded first outcome is raised.
        """
        deadline_s = asyncio.get_running_loop().time() + _STATUS_WAIT_S
        while True:
            try:
                return await call.read()
            except grpc.aio.AioRpcError as outcome:
                if outcome.details() != _WRITTEN_TOO_LATE:
                    raise
                if self._first_outcome is not None and self._first_outcome.details() != _WRITTEN_TOO_LATE:
                    raise self._first_outcome from None
                if asyncio.get_running_loop().time() > deadline_s:
                    raise Unavailable("the session's stream broke during a write", remedy="reopen it") from None
            await asyncio.sleep(0.001)

    def _note_outcome(self, call: _Call) -> None:
        """Record the call's first outcome. It is called when the call is done, so that the read does not wait."""
        if call is self._call and not call.cancelled():
            reading = call.read()
            try:
                reading.send(None)
            except grpc.aio.AioRpcError as outcome:
                self._first_outcome = outcome
            except StopIteration:
                return
            finally:
                reading.close()
