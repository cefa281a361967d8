"""The socket at which a worker passes the descriptor of its host tier to workers of peers on this host.

    worker of a peer ── arena.sock ──▶ whose process is it? (SO_PEERCRED) ──▶ layout, incarnation, descriptor

A gRPC message carries no descriptor, so this is a socket of its own. It answers processes of this worker's user alone,
and the kernel refuses every write through the descriptor (`tiers.arena`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Self

from kvplane.base.errors import FailedPrecondition, KvplaneError, PermissionDenied, Unavailable
from kvplane.base.worker import INCARNATION_BYTES, PeerArena
from kvplane.rpc.peers import peer_of
from kvplane_worker.lending.rundir import ARENA_SOCKET, run_dir_of
from kvplane_worker.nixl.process import NixlMemory, NixlProcess
from kvplane_worker.nixl.transport import PeerTransport
from kvplane_worker.tiers import HostSlots, Peer, PeerSlots, Slots
from kvplane_worker.tiers.arena import Arena

TIMEOUT_S = 1.0
MOST_CALLS = 32  # from one attempt to open a host tier to the next; a worker calls every few seconds
RETRY_S = 0.1  # after a connection that could not be accepted
MOST_WAIT_S = 0.2  # of a renewal for peers, twice: it must not last as long as the lease, which they may
_LAYOUT = struct.Struct(f"<QQ{INCARNATION_BYTES}s")  # slots, bytes of a slot, incarnation

_log = logging.getLogger(__name__)


class ArenaLender:
    """Passes the descriptor of a host tier on."""

    def __init__(self, arena: Arena, run_dir: Path) -> None:
        """Bind the socket, and begin to answer."""
        self._layout = _LAYOUT.pack(arena.num_slots, arena.slot_bytes, arena.incarnation)
        self._descriptor = arena.descriptor
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(run_dir / ARENA_SOCKET))
        self._listener.listen()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvplane-arena", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Memory that was passed on stays mapped where it is."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up `accept`
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("a connection was not accepted: %s", error)
                    time.sleep(RETRY_S)
                continue
            with connection:
                peer = peer_of(connection)
                if not peer.is_trusted:
                    _log.warning("closed a connection of process %d of user %d", peer.pid, peer.uid)
                    continue
                connection.settimeout(TIMEOUT_S)
                with contextlib.suppress(OSError):  # the caller has gone
                    socket.send_fds(connection, [self._layout], [self._descriptor])


class Refused(NamedTuple):
    """A host tier that could not be opened: the last error, how often, and calls until it is tried again."""

    error: str = ""
    tries: int = 0
    calls_left: int = 0


class PeersOfWorker:
    """What a worker lends of its host tier, and reads of those of peers: mapped on this host, over NIXL of other hosts.

    Attributes:
        incarnation: names the memory of the host tier.
    """

    def __init__(
        self,
        arena: Arena,
        peers: PeerSlots | None,
        run_dir: Path,
        transport: PeerTransport = PeerTransport.SHARED_MEMORY,
    ) -> None:
        self.incarnation = arena.incarnation
        self._arena, self._peers, self._transport = arena, peers, transport
        self._nixl = self._started() if transport is not PeerTransport.SHARED_MEMORY else None
        self._lender = ArenaLender(arena, run_dir)
        self._wanted: tuple[PeerArena, ...] = ()
        self._read: dict[PeerArena, Peer] = {}
        self._refused: dict[PeerArena, Refused] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvplane-peers")
        self._change: Future[bool] | None = None  # that takes longer than the call that began it
        self._is_closed = False

    def _started(self) -> NixlProcess:
        return NixlProcess(self._arena, self._arena.incarnation)

    @classmethod
    def of(
        cls, tiers: Sequence[Slots], run_dir: Path, transport: PeerTransport = PeerTransport.SHARED_MEMORY
    ) -> Self | None:
        """Begin to lend the host tier; None without one. Raises FailedPrecondition if it cannot be lent over NIXL."""
        hosts = [one for one in tiers if isinstance(one, HostSlots)]
        peers = [one for one in tiers if isinstance(one, PeerSlots)]
        return cls(hosts[0].arena, peers[0] if peers else None, run_dir, transport) if hosts else None

    @property
    def nixl_arena(self) -> bytes:
        """How the host tier is read over NIXL; b"" = it is not."""
        return self._nixl.nixl_arena if self._nixl is not None else b""

    @property
    def nixl_peers(self) -> int:
        """How many host tiers are read over NIXL."""
        return sum(isinstance(one.memory, NixlMemory) for one in self._peers.peers) if self._peers is not None else 0

    @property
    def mapped(self) -> tuple[bytes, ...]:
        """The host tiers that can be read, by incarnation."""
        return tuple(one.incarnation for one in self._peers.peers) if self._peers is not None else ()

    def follow(self, arenas: Sequence[PeerArena]) -> bool:
        """Read these host tiers and no others: those of before are left at once, new ones are opened on a thread, since
        a peer that hangs takes a second, and NIXL more. Returns whether what the worker reports has changed; of a
        change that takes longer, a later call says it.
        """
        self._wanted = tuple(arenas)
        self._show()
        is_new = self._has_changed()  # by an earlier call
        if self._change is None:
            self._change = self._thread.submit(self._open_wanted)
        return self._has_changed() or is_new

    def read_only(self, arenas: Sequence[PeerArena]) -> bool:
        """As `follow`, without the thread: returns when all are open, or cannot be."""
        self._wanted = tuple(arenas)
        self._show()
        return self._open_wanted()

    def _has_changed(self) -> bool:
        """Wait for the change that is under way, not long; returns whether it has ended and what is reported is new."""
        if self._change is None:
            return False
        wait([self._change], MOST_WAIT_S)
        if not self._change.done():
            return False
        done, self._change = self._change, None
        return done.result()

    def _open_wanted(self) -> bool:
        """Open what is to be read. One that cannot be read is tried again at the next call, and then after twice as
        many each time: an attempt over NIXL takes its thread some seconds, and a descriptor that UCX keeps. Returns
        whether what the worker reports has changed.
        """
        wanted, before, refused = self._wanted, self._read, self._refused
        self._read = {one: before[one] for one in wanted if one in before}
        for arena in before.keys() - self._read.keys():
            before[arena].memory.close()
        is_new, self._refused = self._restart(), {}
        for arena in wanted if self._peers is not None else ():
            if arena not in self._read and not self._is_closed:
                last = refused.get(arena, Refused())
                if last.calls_left:
                    self._refused[arena] = last._replace(calls_left=last.calls_left - 1)
                    continue
                try:
                    self._read[arena] = self._open(arena)
                except KvplaneError as error:
                    tries = last.tries + 1
                    self._refused[arena] = Refused(str(error), tries, min(1 << tries - 1, MOST_CALLS) - 1)
                    if last.error != str(error):
                        _log.warning("a peer is not read: %s", error)
        self._show()
        return is_new or self._read.keys() != before.keys()

    def _show(self) -> None:
        """Let the movers read what is open and wanted: not what was wanted when the thread began to open."""
        if self._peers is not None:
            opened = list(self._read.items())  # a copy: the thread adds to it
            self._peers.set_peers([peer for arena, peer in opened if arena in self._wanted])

    def _open(self, arena: PeerArena) -> Peer:
        """Map the host tier of a peer on this host; use NIXL for one of another host. Raises KvplaneError."""
        if self._transport is not PeerTransport.NIXL_ONLY:
            try:
                return borrow(arena)
            except (PermissionDenied, Unavailable) as error:  # of another host, the path is that of no peer here
                if not arena.nixl_arena:
                    raise
                if self._nixl is None:
                    raise FailedPrecondition(
                        f"its worker is on another host: {error}",
                        field="--peer-transport",
                        remedy="start this worker with --peer-transport nixl",
                    ) from None
        if not arena.nixl_arena or self._nixl is None:
            raise FailedPrecondition(
                f"the worker at {arena.address} does not lend its host tier over NIXL",
                field="--peer-transport",
                remedy="start that worker with --peer-transport nixl",
            )
        return Peer(arena.first_slot, arena.incarnation, self._nixl.open(arena))

    def _restart(self) -> bool:
        """Start NIXL's process again if it has ended or all its lanes are late; returns whether it was. Then it lends
        the host tier under another name, and reads again what it read.
        """
        if self._nixl is None or self._nixl.is_usable or self._is_closed:
            return False
        _log.warning("the process that has NIXL (%d) is started again", self._nixl.pid)
        self._nixl.close()
        self._read = {arena: one for arena, one in self._read.items() if not isinstance(one.memory, NixlMemory)}
        try:
            self._nixl = self._started()
        except KvplaneError as error:
            _log.warning("%s", error)
        return True

    def close(self) -> None:
        """Lend and read nothing more."""
        self._is_closed = True
        self._lender.close()
        if self._nixl is not None:
            self._nixl.close()  # what waits for its answers waits no more
        self._thread.shutdown()
        if self._nixl is not None:
            self._nixl.close()  # the one that was started meanwhile


def borrow(arena: PeerArena) -> Peer:
    """Map the host tier of a peer, read-only.

    Raises:
        Unavailable: no worker answers there within TIMEOUT_S, or its memory is another one than the service said.
        PermissionDenied: a process of another user answers.
    """
    path = run_dir_of(arena.address) / ARENA_SOCKET
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(path))
            owner = peer_of(connection)
            if not owner.is_trusted:
                raise PermissionDenied(
                    f"a process of user {owner.uid} listens at {path}, and not one of user {os.getuid()}",
                    field="address",
                    remedy="run the workers of all replicas of a namespace as one user",
                )
            layout, descriptors, _, _ = socket.recv_fds(connection, _LAYOUT.size, 1)
    except OSError as error:
        raise Unavailable(f"the host tier at {path} cannot be reached: {error}") from None
    return Peer(arena.first_slot, arena.incarnation, _mapped(arena, layout, descriptors))


def _mapped(arena: PeerArena, layout: bytes, descriptors: list[int]) -> Arena:
    try:
        num_slots, slot_bytes, incarnation = _LAYOUT.unpack(layout)
        if (num_slots, incarnation) != (arena.num_slots, arena.incarnation):
            raise ValueError("the memory is another one than the service said")
        (descriptor,) = descriptors
        return Arena.open(descriptor, num_slots, slot_bytes)
    except (struct.error, ValueError, OSError) as error:
        for one in descriptors:
            os.close(one)
        raise Unavailable(f"the host tier at {arena.address} cannot be read: {error}") from None
