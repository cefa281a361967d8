"""A session over gRPC, driven by asyncio."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import grpc
import grpc.aio

from kvplane.base.errors import FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.channel import MAX_MESSAGE_BYTES
from kvplane.status import error_of_rpc
from kvplane.transport import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.wire import stream as stream_messages

_Call: TypeAlias = "grpc.aio.StreamStreamCall[SessionRequest, SessionResponse]"
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the second: written to after its end


class GrpcTransport:
    """Carries one session over a channel, which it does not close. Implements AsyncSessionTransport."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`max_message_bytes`: larger steps are refused here, for the service would end the stream."""
        self._stub = AllocationStub(channel)
        self._open_timeout_s = open_timeout_s
        self._max_message_bytes = max_message_bytes
        self._call: _Call | None = None
        self.draining = False

    async def open(self, request: OpenRequest) -> Opened:
        """Open a stream; raises Unavailable after `open_timeout_s`, or the service's refusal."""
        message = stream_messages.open_message(request)
        self.cut()
        self.draining = False
        try:
            self._call = self._stub.Session()
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
            answer = stream_messages.answer_of(await self._read())
            if answer is not None:
                return answer
            self.draining = True

    async def heartbeat(self) -> None:
        """Keep the lease; raises what ended the stream when it has ended."""
        if self._call is None or self._call.done():
            await self._read()
        await self._write(stream_messages.heartbeat_message())

    async def close(self) -> None:
        """Say goodbye, and wait a moment for the answer: then the service has freed the requests."""
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
            response = await self._call.read()
        except grpc.aio.AioRpcError as outcome:
            raise error_of_rpc(outcome) from None
        except asyncio.CancelledError:
            self.cut()
            raise
        if not isinstance(response, SessionResponse):  # grpc.aio.EOF
            raise Unavailable("the service ended the stream")
        return response

    def cut(self) -> None:
        """End the stream now, without a goodbye."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
