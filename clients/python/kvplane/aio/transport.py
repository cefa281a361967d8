"""A session over gRPC, driven by asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio

from kvplane.base.errors import FailedPrecondition, KvplaneError, Moved, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.channel import MAX_MESSAGE_BYTES
from kvplane.owners import Owners
from kvplane.status import error_of_rpc
from kvplane.transport import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, moving_is_breaking
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.wire import stream as stream_messages

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2_grpc import AllocationAsyncStub

_Call: TypeAlias = "grpc.aio.StreamStreamCall[SessionRequest, SessionResponse]"
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the second: written to after its end
_WRITTEN_TOO_LATE = "Internal error from Core"  # what grpc.aio says of a write that the end of the stream overtook
_STATUS_WAIT_S = 2.0


class GrpcTransport:
    """Carries one session over a channel, which it does not close. Implements AsyncSessionTransport."""

    def __init__(
        self,
        channel: grpc.aio.Channel | Owners[grpc.aio.Channel],
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`max_message_bytes`: larger steps are refused here, for the service would end the stream."""
        self._owners = channel if isinstance(channel, Owners) else Owners(channel)
        self._stubs: dict[grpc.aio.Channel, AllocationAsyncStub] = {}
        self._channel = self._owners.present  # of the stream
        self._stub(self._channel)
        self._open_timeout_s = open_timeout_s
        self._max_message_bytes = max_message_bytes
        self._call: _Call | None = None
        self._first_outcome: grpc.aio.AioRpcError | None = None  # of the call
        self.draining = self.can_move = False

    async def open(self, request: OpenRequest) -> Opened:
        """Open a stream; raises Unavailable after `open_timeout_s`, or the service's refusal.

        After Unavailable the next attempt asks the next address of the list.
        """
        message = stream_messages.open_message(request)
        channel, hops = self._owners.present, 0
        while True:
            try:
                opened = await self._open_at(self._stub(channel), message)
            except Moved as moved:
                hops += 1
                channel = self._owners.after(moved, hops)
            except Unavailable:
                self._owners.instead_of(channel)
                raise
            else:
                self._channel, self.can_move = channel, self._owners.has_other_than(channel)
                return opened

    def _stub(self, channel: grpc.aio.Channel) -> AllocationAsyncStub:
        """Made once, while the channel is open: gRPC crashes where it is made on a closed one."""
        if channel not in self._stubs:
            self._stubs[channel] = AllocationStub(channel)
        return self._stubs[channel]

    async def _open_at(self, stub: AllocationAsyncStub, message: SessionRequest) -> Opened:
        self.cut()
        self.draining = False
        try:
            self._first_outcome = None
            self._call = stub.Session()
            self._call.add_done_callback(self._note_outcome)
            async with asyncio.timeout(self._open_timeout_s):
                await self._write(message)
                return stream_messages.opened_of(await self._read())
        except TimeoutError:
            self.cut()
            raise Unavailable(f"no answer within {self._open_timeout_s} s") from None
        except grpc.aio.UsageError as error:
            raise FailedPrecondition("the channel is closed", remedy="connect again") from error
        except KvplaneError:
            self.cut()
            raise

    async def send(self, step: Step) -> None:
        """Hand the step to the stream.

        InvalidArgument: it holds a value that cannot be sent. LimitExceeded: it is too large.
        """
        await self._write(stream_messages.step_message(step, self._max_message_bytes))

    async def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer. Cancelled, it breaks the stream, for grpc.aio does so."""
        while True:
            with moving_is_breaking():
                answer = stream_messages.answer_of(await self._read())
            if answer is not None:
                return answer
            self.draining = True

    async def heartbeat(self) -> None:
        """Keep the lease; raises what ended the stream when it has ended."""
        if self._call is None or self._call.done():
            with moving_is_breaking():
                await self._read()
        await self._write(stream_messages.heartbeat_message())

    async def close(self) -> None:
        """Say goodbye, and wait a moment for the answer: then the service has freed the requests.

        Who opens again after a service announced that it goes asks the next address of the list.
        """
        if self.draining:
            self._owners.instead_of(self._channel)
        if self._call is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write(stream_messages.close_message())
                while True:
                    await self._read()
        except (KvplaneError, TimeoutError):
            return  # the end of the stream, or nobody to say goodbye to
        finally:
            self.cut()

    async def _write(self, message: SessionRequest) -> None:
        """Send; a stream that has ended is for `_read` to tell."""
        if self._call is None:
            return
        try:
            await self._call.write(message)
        except _ENDED:
            return

    async def _read(self) -> SessionResponse:
        """The next message; raises what ended the stream."""
        if self._call is None:
            raise Unavailable("no stream is open")
        try:
            response = await self._read_to_the_end(self._call)
        except grpc.aio.AioRpcError as outcome:
            raise error_of_rpc(outcome) from None
        except asyncio.CancelledError:
            self.cut()
            raise
        if not isinstance(response, SessionResponse):  # grpc.aio.EOF
            raise Unavailable("the service ended the stream")
        return response

    async def _read_to_the_end(self, call: _Call) -> object:
        """The next message, EOF, or an AioRpcError with what the service said.

        A write that the end overtakes leaves an INTERNAL of grpc.aio's own: until the true status arrives, or in its
        place when that was first.
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
                    raise Unavailable("the stream broke while it was written to") from None
            await asyncio.sleep(0.001)

    def _note_outcome(self, call: _Call) -> None:
        """Called at once when the call has an outcome, so that reading it does not wait."""
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

    def cut(self) -> None:
        """End the stream now, without a goodbye."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
