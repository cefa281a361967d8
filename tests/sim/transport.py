"""The client's end of the network: a session's transport, and single calls."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvplane.base.errors import KvplaneError, Moved, Unavailable
from kvplane.base.session import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.rpc.channel import MAX_MESSAGE_BYTES
from kvplane.rpc.status import error_of_rpc
from kvplane.sansio.owners import Owners
from kvplane.v1 import allocation_pb2, plan_pb2
from kvplane.v1.allocation_pb2 import SessionResponse
from kvplane.wire import stream as messages
from tests.sim.network import Ended, Network, Server, Stream

PACKAGE = "kvplane.v1."
_SESSION = f"/{PACKAGE}Allocation/Session"
_SERVICES = {
    service.full_name: service
    for file in (allocation_pb2.DESCRIPTOR, plan_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
}


class _Outcome:
    """A status as `kvplane.rpc.status` reads it."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def code(self) -> Any:
        return self._status.code

    def details(self) -> str:
        return str(self._status.details)

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


def error_of(ended: Ended) -> KvplaneError:
    """The error of an ended stream."""
    if ended.status is None:
        return Unavailable("the stream broke")
    return error_of_rpc(_Outcome(ended.status))


def owners_at(first: str, *others: str) -> Owners[str]:
    """The services of a list by address; redirects are followed."""
    return Owners(first, str, others)


async def call(network: Network, owners: Owners[str], place: str, name: str, request: Message) -> Any:
    """One unary call ("Workers/RenewWorker") to the service that has the replica; raises the refusal of that service,
    Unavailable if the call is lost.
    """
    address, hops = owners.present, 0
    while True:
        try:
            return await _call_at(network, address, place, name, request)
        except Moved as moved:
            hops += 1
            address = owners.after(moved, hops)
        except Unavailable:
            owners.instead_of(address)
            raise


async def _call_at(network: Network, address: str, place: str, name: str, request: Message) -> Any:
    service, _, method = name.partition("/")
    answer_type = GetMessageClass(_SERVICES[PACKAGE + service].methods_by_name[method].output_type)
    stream = await network.call(address, place, f"/{PACKAGE}{name}", request.SerializeToString())
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            answer = await stream.inward.receive()
    except (TimeoutError, Ended):
        raise Unavailable("no answer") from None
    finally:
        stream.cut()
    if isinstance(answer, Ended):
        raise error_of(answer)
    return answer_type.FromString(answer)


class SimTransport:
    """Carries one session. Implements AsyncSessionTransport.

    Attributes:
        heeds_notices: it reports a drain notice to its session.
        server: service process of the current or last stream.
    """

    def __init__(self, network: Network, owners: Owners[str], place: str) -> None:
        self._network, self._owners, self._place = network, owners, place
        self._address = owners.present  # of the stream
        self._stream: Stream | None = None
        self.server: Server | None = None
        self.draining = False
        self.can_move = False
        self.heeds_notices = True

    async def open(self, request: OpenRequest) -> Opened:
        address, hops = self._owners.present, 0
        while True:
            try:
                opened = await self._open_at(address, request)
            except Moved as moved:
                hops += 1
                address = self._owners.after(moved, hops)
            except Unavailable:
                self._owners.instead_of(address)
                raise
            else:
                self._address, self.can_move = address, self._owners.has_other_than(address)
                return opened

    async def _open_at(self, address: str, request: OpenRequest) -> Opened:
        self._cut()
        self.draining = False
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                self._stream = await self._network.call(address, self._place, _SESSION, None)
                self.server = self._stream.server
                self.write(messages.open_message(request))
                return messages.opened_of(await self.read())
        except TimeoutError:
            self._cut()
            raise Unavailable("no answer") from None
        except KvplaneError:
            self._cut()
            raise

    async def send(self, step: Step) -> None:
        self.write(messages.step_message(step, MAX_MESSAGE_BYTES))

    async def receive(self) -> StepResult | KvplaneError:
        while True:
            answer = messages.answer_of(await self._read_further())
            if answer is not None:
                return answer
            self.draining = self.heeds_notices

    async def heartbeat(self, waiting_requests: int | None = None) -> None:
        if self._stream is None or self._stream.inward.broken:
            await self._read_further()
        self.write(messages.heartbeat_message(waiting_requests))

    async def close(self) -> None:
        if self.draining:
            self._owners.instead_of(self._address)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                self.write(messages.close_message())
                while True:
                    await self.read()
        except (KvplaneError, TimeoutError):
            return
        finally:
            self._cut()

    def abort(self) -> None:
        self._cut()

    def move(self) -> None:
        """End the stream; the next one is opened at another service."""
        self._owners.instead_of(self._address)
        if self._stream is not None:
            self._stream.cut(server_s=self._network.draw_delay())

    def write(self, message: messages.Sent) -> None:
        """Send a message, if a stream is open."""
        if self._stream is not None:
            self._stream.outward.send(messages.serialized(message))

    async def _read_further(self) -> SessionResponse:
        """Break a stream whose replica another service has taken; a new one is redirected there."""
        try:
            return await self.read()
        except Moved as moved:
            raise Unavailable(moved.message) from moved

    async def read(self) -> SessionResponse:
        """Wait for the next message. Raises the error that ended the stream."""
        if self._stream is None:
            raise Unavailable("no stream is open")
        try:
            item = await self._stream.inward.receive()
        except Ended as ended:
            raise error_of(ended) from None
        if isinstance(item, Ended):
            self._stream.inward.break_off()
            raise error_of(item) if item.status else Unavailable("the service ended the stream")
        return SessionResponse.FromString(item)

    def _cut(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cut(server_s=self._network.draw_delay())


class SentTransport(SimTransport):
    """Records the service's number of the last step that was sent."""

    sent_seq = 0

    async def send(self, step: Step) -> None:
        self.sent_seq = step.seq
        await super().send(step)
