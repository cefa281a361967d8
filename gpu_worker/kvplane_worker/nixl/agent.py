"""The process of a worker that has NIXL. It imports no torch, and nothing of the worker but messages.

    python -m kvplane_worker.nixl.agent NAME ARENA BYTES STAGING LANE_BYTES CONTROL LANE [LANE ...]

ARENA and STAGING are descriptors of memory files, CONTROL and LANE of sockets. It ends with the worker: its sockets are
closed then. A transfer that was begun is never released before it has ended, since it may still write its lane; so a
peer is forgotten when no read of it is under way.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kvplane_worker.nixl.messages import ADD, ADDRESS, DONE, FAILED, MAX_MESSAGE_BYTES, PACKAGES, PEER, REMOVE, Read

PROGRESS_US = 100  # between looks of NIXL's thread at the network; without a pause it takes a core
POLL_S = 0.0001  # between looks at reads under way
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass
class Peer:
    """An agent whose memory is read.

    Attributes:
        name: of the agent.
        metadata: of it.
        readers: number of peers of the worker that are read through it.
        reads: reads of it that are under way.
    """

    name: str
    metadata: bytes
    readers: int = 0
    reads: int = 0


@dataclass
class Lane:
    """A part of the staging memory, for one read at a time.

    Attributes:
        connection: socket to the worker.
        address: where it begins.
        handle: of the transfer that is under way; 0 = none.
        peer: of which it reads.
    """

    connection: socket.socket
    address: int
    handle: int = 0
    peer: Peer = field(default_factory=lambda: Peer("", b""))


class Agent:
    """NIXL's agent, the peers it reads, and its lanes."""

    def __init__(
        self,
        nixl: Any,  # noqa: ANN401
        name: str,
        arena: tuple[int, int],
        staging: tuple[int, int],
        lanes: list[socket.socket],
    ) -> None:
        """`arena`, `staging`: descriptor and bytes of the memory, of each lane for `staging`."""
        self._nixl, self._errors = nixl, errors_of(nixl)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_US
        self._agent = self._nixl.nixlAgent(name, config)
        self._agent.createBackend("UCX", {})
        base = _mapped(*arena, mmap.PROT_READ)  # the kernel permits no more
        first = _mapped(staging[0], staging[1] * len(lanes), mmap.PROT_READ | mmap.PROT_WRITE)
        regions = self._region(base, arena[1])
        self._agent.registerMem(regions, [])
        self._agent.registerMem(self._region(first, staging[1] * len(lanes)), [])
        # Only what is lent: the address of staging memory is nothing that a peer needs.
        self.metadata = ADDRESS.pack(base) + self._agent.getLocalPartialMD(regions, True, [])
        self._lanes = [Lane(one, first + number * staging[1]) for number, one in enumerate(lanes)]
        self._peers: dict[int, Peer] = {}
        self._agents: dict[bytes, Peer] = {}  # by metadata

    def _region(self, address: int, num_bytes: int) -> Any:  # noqa: ANN401
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0, "")])

    def serve(self, control: socket.socket) -> None:
        """Do what the worker orders, until it ends."""
        lanes = {lane.connection.fileno(): lane for lane in self._lanes}
        poll = select.poll()
        for one in (control, *(lane.connection for lane in self._lanes)):
            poll.register(one, select.POLLIN)
        while True:
            is_busy = any(lane.handle for lane in self._lanes)
            for descriptor, _ in poll.poll(0 if is_busy else None):
                lane = lanes.get(descriptor)
                message = (lane.connection if lane else control).recv(MAX_MESSAGE_BYTES)
                if not message:
                    return
                if lane is None:
                    control.send(self._order(message))
                elif not self._begin(lane, Read.unpack(message)):
                    lane.connection.send(FAILED)
            for lane in self._lanes:
                if lane.handle:
                    self._look_at(lane)
            if is_busy:
                time.sleep(POLL_S)

    # -- peers -------------------------------------------------------------------------------------------------------

    def _order(self, message: bytes) -> bytes:
        (number,) = PEER.unpack_from(message, 1)
        content = message[1 + PEER.size :]
        if message[:1] == REMOVE:
            self._remove(self._peers.pop(number, None))
            return DONE
        assert message[:1] == ADD
        peer = self._agents.get(content)
        if peer is None:  # once only: it would end what is read of the agent
            try:
                peer = Peer(self._agent.loadRemoteMD(content).decode(), content)
            except self._errors as error:
                return FAILED + str(error).encode()
            self._agents[content] = peer
        peer.readers += 1
        self._peers[number] = peer
        return DONE + peer.name.encode()

    def _remove(self, peer: Peer | None) -> None:
        """Forget an agent, if no peer and no read needs it."""
        if peer is not None:
            peer.readers -= 1
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if peer.readers or peer.reads:
            return
        del self._agents[peer.metadata]
        try:
            self._agent.invalidateRemoteMD(peer.name)
        except self._errors as error:
            sys.stderr.write(f"{peer.name} was not forgotten: {error}\n")

    # -- reads -------------------------------------------------------------------------------------------------------

    def _begin(self, lane: Lane, read: Read) -> bool:
        peer = self._peers.get(read.peer)
        if peer is None:
            return False
        nixl, pieces, at = self._nixl, read.pieces, lane.address
        places = []
        for _, size in pieces:
            places.append((at, size, 0))
            at += size
        local = nixl.nixlXferDList(nixl.DRAM_SEG, places)
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, size, 0) for address, size in pieces])
        try:
            handle = self._agent.createXferReq(nixl.NIXL_READ, local, remote, peer.name)
        except self._errors:
            return False  # of a peer that is gone, or a place that it has not registered
        lane.handle, lane.peer = handle, peer
        peer.reads += 1
        try:
            self._agent.postXferReq(handle)
        except self._errors:
            self._end(lane, FAILED)
        return True

    def _look_at(self, lane: Lane) -> None:
        """Answer if the read of a lane has ended."""
        try:
            status = self._agent.getXferStatus(lane.handle)
        except self._errors:
            self._end(lane, FAILED)
            return
        if status != self._nixl.NIXL_IN_PROG:
            self._end(lane, DONE if status == self._nixl.NIXL_SUCCESS else FAILED)

    def _end(self, lane: Lane, answer: bytes) -> None:
        peer, handle = lane.peer, lane.handle
        lane.handle = 0
        peer.reads -= 1
        self._agent.releaseXferReq(handle)
        self._forget(peer)
        lane.connection.send(answer)


def library() -> Any:  # noqa: ANN401 - it has no types
    """Import NIXL's binding. Its Python layer gives no way to set how often its thread looks at the network."""
    for name in PACKAGES:
        try:
            return import_module(f"{name}._bindings")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of the packages {', '.join(PACKAGES)} is installed")


def errors_of(nixl: Any) -> tuple[type[Exception], ...]:  # noqa: ANN401
    """Return the errors of the binding, which have no class in common."""
    return tuple(one for one in vars(nixl).values() if isinstance(one, type) and issubclass(one, Exception))


def _mapped(descriptor: int, num_bytes: int, access: int) -> int:
    """Map a file until this process ends; returns the address, which Python gives of no read-only mapping."""
    found = _LIBC.mmap(None, num_bytes, access, mmap.MAP_SHARED, descriptor, 0)
    if found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")
    return int(found)


def main(arguments: list[str]) -> None:
    """Run the agent of a worker."""
    name, arena, num_bytes, staging, lane_bytes, control, *lanes = arguments
    connection = socket.socket(fileno=int(control))
    sockets = [socket.socket(fileno=int(one)) for one in lanes]
    nixl = library()
    errors: tuple[type[Exception], ...] = (OSError, *errors_of(nixl))
    try:
        agent = Agent(nixl, name, (int(arena), int(num_bytes)), (int(staging), int(lane_bytes)), sockets)
    except errors as error:
        connection.send(FAILED + str(error).encode())
        return
    connection.send(DONE + agent.metadata)
    agent.serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
