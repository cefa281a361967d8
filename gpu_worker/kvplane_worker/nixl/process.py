"""Starts the process that has NIXL, and reads the host tiers of peers through it.

    mover ── lane: what to read ──▶ agent ── NIXL ──▶ agent of the peer
    mover ◀── one byte: read ────── agent     into the lane, a part of memory that both processes map

A mover has a lane for one read, copies what it got to memory that no transfer writes, and only there is it verified. A
read that takes too long fails; its lane is not used again before the agent says that the transfer has ended, or the
agent itself ends. A peer with MOST_LATE such reads is not read meanwhile.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count

from kvplane.base.errors import FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.installed import command_for
from kvplane.base.worker import MAX_NIXL_BYTES, PeerArena
from kvplane_worker.nixl.messages import ADD, ADDRESS, DONE, MAX_MESSAGE_BYTES, PACKAGES, PEER, REMOVE, Read
from kvplane_worker.tiers.arena import Arena, aligned, arena_bytes, sizes
from kvplane_worker.tiers.seal import HEADER_BYTES

NUM_LANES = 8  # twice the threads that read: a late read takes a lane with it
MOST_LATE = 2  # of one peer
MOST_FAILED = 256  # peers that could not be opened, of each of which UCX keeps a descriptor or two
MAX_ADDRESS_BITS = 63
NO_PEER = 0  # numbers of peers begin above it
LANE_BYTES = 4 << 20  # at least; a piece of a job is not larger, except of one block
START_S, ORDER_S, READ_S = 20.0, 5.0, 5.0  # that the agent may take for its start, an order, a read

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lane:
    """A part of the staging memory, and the socket on which reads into it are ordered.

    Attributes:
        peer: whose read is late; None = the lane is free, or in use.
    """

    connection: socket.socket
    memory: memoryview
    peer: NixlMemory | None = None

    def wait(self, limit_s: float) -> bytes | None:
        """Return the agent's answer; None after the limit, b"" if the agent has ended."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return self.connection.recv(1) if poll.poll(limit_s * 1000) else None
        except (OSError, ValueError):  # closed meanwhile
            return b""


class NixlMemory:
    """The host tier of a peer, read over NIXL. See `PeerMemory`."""

    def __init__(self, process: NixlProcess, number: int, address: int, layout: tuple[int, int]) -> None:
        """`number`: of the peer at the agent. `address`: of the memory in the peer's process. `layout`: of `Arena`."""
        self.num_slots, self.slot_bytes = layout
        self._process, self._number, self._headers = process, number, address
        self._rows = address + aligned(self.num_slots * HEADER_BYTES)

    def read(self, slot: int, headers: memoryview, payloads: memoryview) -> bool:
        """See `PeerMemory.read`."""
        num_slots, width = sizes(headers, payloads)
        most = max(1, self._process.lane_bytes // (HEADER_BYTES + width))
        for first in range(0, num_slots, most):
            end = min(first + most, num_slots)
            to = headers[first * HEADER_BYTES : end * HEADER_BYTES], payloads[first * width : end * width]
            read = Read(
                self._number,
                self._headers + (slot + first) * HEADER_BYTES,
                len(to[0]),
                self._rows + (slot + first) * self.slot_bytes,
                self.slot_bytes,
                width,
                end - first,
            )
            if not self._process.read(self, read, *to):
                return False
        return True

    def close(self) -> None:
        """Let the agent forget the peer."""
        self._process.forget(self._number)


class NixlProcess:
    """The process that has NIXL.

    Attributes:
        nixl_arena: what workers on other hosts need to read the host tier (`WorkerInfo.nixl_arena`).
        lane_bytes: size of a lane.
        read_s: how long a read may take.
        late_reads: how many took longer.
        pid: of the process.
    """

    def __init__(self, arena: Arena, incarnation: bytes, read_s: float = READ_S) -> None:
        """Start it: it lends this memory, which `incarnation` names.

        Raises:
            FailedPrecondition: NIXL is not installed, or cannot lend the memory.
        """
        if not any(find_spec(name) for name in PACKAGES):
            raise FailedPrecondition(
                f"none of the packages {', '.join(PACKAGES)} is installed",
                field="--peer-transport",
                remedy=command_for("worker,nixl"),
            )
        self.read_s, self.late_reads, self._num_failed = read_s, 0, 0
        self.lane_bytes = aligned(max(LANE_BYTES, arena.slot_bytes) + LANE_BYTES // 8)
        self._slot_bytes = arena.slot_bytes
        self._numbers, self._lock, self._is_closed = count(1), threading.Lock(), False
        with ExitStack() as undo:
            staging = os.memfd_create("kvplane-nixl-staging", os.MFD_CLOEXEC)
            undo.callback(os.close, staging)
            os.ftruncate(staging, NUM_LANES * self.lane_bytes)
            self._staging = mmap.mmap(staging, NUM_LANES * self.lane_bytes, access=mmap.ACCESS_READ)
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + NUM_LANES)]
            for _, theirs in pairs:
                undo.callback(theirs.close)
            given = arena.descriptor, staging, *(theirs.fileno() for _, theirs in pairs)
            # Another start over the same memory has another name: peers that have the first one's metadata load it.
            name = f"{incarnation.hex()}.{secrets.token_hex(4)}"
            sizes = (arena_bytes(arena.num_slots, arena.slot_bytes), self.lane_bytes)
            numbers = (given[0], sizes[0], given[1], sizes[1], *given[2:])
            command = [sys.executable, "-m", "kvplane_worker.nixl.agent", name, *map(str, numbers)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=given)
        (self._control, _), *lanes = pairs
        memory = memoryview(self._staging)
        self._lanes = [
            Lane(ours, memory[number * self.lane_bytes : (number + 1) * self.lane_bytes])
            for number, (ours, _) in enumerate(lanes)
        ]
        self._free = list(self._lanes)
        self.pid = self._process.pid
        try:
            self.nixl_arena = self._answer(START_S)
        except KvplaneError as error:
            self.close()
            raise FailedPrecondition(
                f"the host tier cannot be lent over NIXL: {error}",
                field="--peer-transport",
                remedy="set UCX_TLS and UCX_NET_DEVICES to what this host has, or start the worker without it",
            ) from None
        if len(self.nixl_arena) > MAX_NIXL_BYTES:
            self.close()
            raise FailedPrecondition(
                f"the metadata of NIXL's agent has {len(self.nixl_arena)} bytes, at most {MAX_NIXL_BYTES} are sent",
                field="--peer-transport",
                remedy="name the network devices to use in UCX_NET_DEVICES",
            )

    @property
    def is_usable(self) -> bool:
        """Whether the process runs, answers, has a lane that is not late, and has not failed to open many peers."""
        if self.num_late:  # is it the peer that hangs, or this process?
            self.forget(NO_PEER)
        return self._process.poll() is None and self.num_late < NUM_LANES and self._num_failed < MOST_FAILED

    @property
    def num_late(self) -> int:
        """Lanes of reads that took too long, and may still be written."""
        self._take_back()
        return sum(lane.peer is not None for lane in self._lanes)

    def open(self, arena: PeerArena) -> NixlMemory:
        """Let the agent connect to that of a peer, whose slots are as wide as those of this worker.

        Raises:
            Unavailable: the agent cannot, or what the service sent is the metadata of another memory.
        """
        number = next(self._numbers)
        try:
            with self._lock:
                named = ADD + PEER.pack(number) + arena.nixl_arena[ADDRESS.size :]
                self._control.send(named)
                name = self._answer(ORDER_S)
            (address,) = ADDRESS.unpack_from(arena.nixl_arena)
        except KvplaneError:
            self._num_failed += 1
            raise
        except (OSError, ValueError) as error:
            raise Unavailable(f"the agent of NIXL cannot be reached: {error}") from None
        memory = NixlMemory(self, number, address, (arena.num_slots, self._slot_bytes))
        is_right = name.decode(errors="replace").partition(".")[0] == arena.incarnation.hex()
        if not is_right or address + arena_bytes(arena.num_slots, self._slot_bytes) >> MAX_ADDRESS_BITS:
            memory.close()
            raise Unavailable("the agent has the metadata of another memory than the service said")
        return memory

    def forget(self, number: int) -> None:
        """Let the agent forget a peer, when no read of it is under way. Ends an agent that does not answer."""
        if self._process.poll() is not None:
            return
        try:
            with self._lock:
                self._control.send(REMOVE + PEER.pack(number))
                self._answer(ORDER_S)
        except (OSError, KvplaneError) as error:
            _log.warning("a peer was not removed: %s", error)

    def read(self, memory: NixlMemory, read: Read, headers: memoryview, payloads: memoryview) -> bool:
        """Read into memory of the caller. Returns False if the peer cannot be read, now or within `read_s`."""
        lane = self._lane_for(memory)
        if lane is None:
            return False
        try:
            lane.connection.send(read.pack())
        except OSError:
            self._end()
            return False
        answer = lane.wait(self.read_s)
        if answer is None:
            _log.warning("a read of a peer over NIXL takes more than %.1f s", self.read_s)
            lane.peer = memory
            self.late_reads += 1
            return False
        if not answer:
            self._end()
        if answer == DONE:
            headers[:] = lane.memory[: len(headers)]
            payloads[:] = lane.memory[len(headers) : len(headers) + len(payloads)]
        with self._lock:
            if self._is_closed:
                lane.connection.close()
            elif answer:
                self._free.append(lane)
        return answer == DONE

    def close(self) -> None:
        """End the process: it writes nothing more."""
        self._end()
        with self._lock:  # a thread that waits for an answer closes its lane itself
            self._is_closed = True
            self._control.close()
            for lane in (*self._free, *(one for one in self._lanes if one.peer is not None)):
                lane.connection.close()
            self._free.clear()

    def _end(self) -> None:
        """End the process, or wait for its end: one that is killed closes its connections before it counts as ended."""
        self._process.kill()
        self._process.wait()

    def _lane_for(self, memory: NixlMemory) -> Lane | None:
        """Take a lane; None if there is none, or reads of this peer are late."""
        self._take_back()
        with self._lock:
            if sum(lane.peer is memory for lane in self._lanes) >= MOST_LATE:
                return None
            return self._free.pop() if self._free else None

    def _take_back(self) -> None:
        """Use lanes again whose late reads have ended."""
        with self._lock:
            for lane in self._lanes:
                if lane.peer is not None and lane.wait(0):
                    lane.peer = None
                    self._free.append(lane)

    def _answer(self, limit_s: float) -> bytes:
        """Return the answer to an order. Raises Unavailable."""
        self._control.settimeout(limit_s)
        try:
            answer = self._control.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            self._end()  # a later answer would be taken for that of the next order
            raise Unavailable(f"the agent of NIXL does not answer: {error}") from None
        if answer[:1] != DONE:
            raise Unavailable(answer[1:].decode(errors="replace") or "the agent of NIXL has ended")
        return answer[1:]
