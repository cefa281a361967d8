"""The memory of a host tier: how peers get it, and what they cannot do with it."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvplane.base.errors import PermissionDenied, Unavailable
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.worker import PeerArena
from kvplane.rpc.peers import Peer as Process
from kvplane_worker.rpc import arenas
from kvplane_worker.rpc.arenas import ArenaLender, PeersOfWorker, borrow
from kvplane_worker.tiers import HostSlots, Peer, PeerSlots
from kvplane_worker.tiers.arena import Arena, arena_bytes
from kvplane_worker.tiers.seal import IDENTITY_BYTES, Content
from kvplane_worker.tiers.slots import SlotCounts
from tests.service.rig import until
from tests.store.servers import wait_until

SLOTS, WIDTH, NAMESPACE = 6, 5000, b"weights and plan"
HOST, PEERS = TierSpec(TierKind.HOST, SLOTS), TierSpec(TierKind.PEERS, 40)


def written(slots: HostSlots, slot: int, version: int, key: int, text: bytes) -> bytes:
    """Write a slot of a host tier; returns its payload."""
    payload = (text * WIDTH)[:WIDTH]

    def fill(rows) -> list[bool]:
        rows[0].numpy().data[:] = payload
        return [True]

    assert slots.write([Content(slots.identity, 0, slot, 3, version, key)], WIDTH, fill) == [True]
    return payload


@contextmanager
def lent(folder: Path) -> Iterator[tuple[HostSlots, PeerArena]]:
    folder.mkdir(exist_ok=True)
    slots = HostSlots(HOST, WIDTH, "cpu", NAMESPACE)
    lender = ArenaLender(slots.arena, folder)
    try:
        yield slots, PeerArena(10, SLOTS, f"unix:{folder}/worker.sock", slots.incarnation)
    finally:
        lender.close()


def row(slot: int, version: int, key: int) -> Content:
    return Content(b"", 1, slot, 3, version, key)


def test_a_peer_reads_what_its_job_names_and_nothing_else(tmp_path: Path):
    with lent(tmp_path / "a") as (host, arena):
        payload = written(host, 2, 7, 99, b"right")
        peers = PeerSlots(PEERS, WIDTH, NAMESPACE)
        peers.set_peers([borrow(arena)])
        found = peers.read([row(12, 7, 99)], WIDTH)
        assert found is not None
        assert bytes(found[0].tolist()) == payload
        assert peers.held(12) == (3, WIDTH)
        for other in (row(12, 8, 99), row(12, 7, 98), row(11, 7, 99), row(9, 7, 99), row(16, 7, 99)):
            assert peers.read([other], WIDTH) is None
        assert peers.read([row(12, 7, 99)._replace(group=2)], WIDTH) is None
        assert peers.read([row(12, 7, 99)], WIDTH - 1) is None
        written(host, 2, 8, 99, b"other")
        assert peers.read([row(12, 7, 99)], WIDTH) is None
        assert bytes(found[0].tolist()) != host.arena.rows[:WIDTH], "what was read is a copy"


def test_what_cannot_be_read_is_counted_by_its_reason(tmp_path: Path):
    """Written again and gone are expected of a peer, and no damage."""
    again, gone, damaged = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    peers = PeerSlots(PEERS, WIDTH, NAMESPACE)

    def counted(content: Content) -> tuple[int, int, int]:
        assert peers.read([content], WIDTH) is None
        peers.counts = SlotCounts()
        peers.note_unread([content])
        return peers.counts.discarded, peers.counts.failed, peers.counts.refused

    with lent(tmp_path / "a") as (host, arena):
        peer = borrow(arena)
        peers.set_peers([peer])
        assert counted(row(12, 7, 99)) == again, "nothing was written yet"
        written(host, 2, 7, 99, b"right")
        for other in (row(12, 6, 99), row(12, 7, 98), row(12, 7, 99)._replace(group=2)):
            assert counted(other) == again
        host.arena.rows[2 * host.slot_bytes + 40] ^= 1
        assert counted(row(12, 7, 99)) == damaged
        peers.set_peers([type(peer)(peer.first, b"x" * 16, peer.memory)])
        assert counted(row(12, 7, 99)) == damaged, "another memory than the service named"
        peers.set_peers([])
        assert counted(row(12, 7, 99)) == gone


@pytest.mark.parametrize(
    ("namespace", "incarnation"), [(b"x" * 16, None), (NAMESPACE, b"x" * 16)], ids=["namespace", "incarnation"]
)
def test_a_reader_compares_with_what_it_knows_itself(tmp_path: Path, namespace: bytes, incarnation: bytes | None):
    with lent(tmp_path / "a") as (host, arena):
        written(host, 2, 7, 99, b"right")
        peers, peer = PeerSlots(PEERS, WIDTH, namespace), borrow(arena)
        peers.set_peers([type(peer)(peer.first, incarnation or peer.incarnation, peer.memory)])
        assert peers.read([row(12, 7, 99)], WIDTH) is None


def test_a_borrowed_memory_cannot_be_written(tmp_path: Path):
    with lent(tmp_path / "a") as (host, _), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "a" / "arena.sock"))
        _, (descriptor,), _, _ = socket.recv_fds(connection, 64, 1)
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            for one in (descriptor, again):
                with pytest.raises(PermissionError):
                    mmap.mmap(one, 4096, access=mmap.ACCESS_WRITE)
                with pytest.raises(PermissionError):
                    os.pwrite(one, b"x", 0)
                with pytest.raises(PermissionError):
                    os.ftruncate(one, 1)
            view = Arena.open(os.dup(descriptor), SLOTS, host.slot_bytes)
            with pytest.raises(TypeError):
                view.rows[0] = 1
        finally:
            os.close(descriptor)
            os.close(again)


def test_a_file_that_could_shrink_is_not_mapped():
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, arena_bytes(SLOTS, 8192))
    with pytest.raises(ValueError, match="no sealed memory"):
        Arena.open(descriptor, SLOTS, 8192)
    os.close(descriptor)


def test_the_memory_of_a_killed_peer_can_be_read_where_it_is_mapped(tmp_path: Path):
    peers = PeerSlots(PEERS, WIDTH, NAMESPACE)
    with lent(tmp_path / "a") as (host, arena):
        payload = written(host, 0, 1, 5, b"left")
        peers.set_peers([borrow(arena)])
        host.close()
    found = peers.read([row(10, 1, 5)], WIDTH)
    assert found is not None
    assert bytes(found[0].tolist()) == payload
    with pytest.raises(Unavailable, match="cannot be reached"):
        borrow(arena)


def test_another_memory_than_the_service_said_is_not_mapped(tmp_path: Path):
    with lent(tmp_path / "a") as (_, arena):
        before = len(os.listdir("/proc/self/fd"))
        for wrong in (arena.incarnation[::-1], bytes(IDENTITY_BYTES)):
            with pytest.raises(Unavailable, match="cannot be read"):
                borrow(PeerArena(arena.first_slot, SLOTS, arena.address, wrong))
        with pytest.raises(Unavailable, match="cannot be read"):
            borrow(PeerArena(arena.first_slot, SLOTS + 1, arena.address, arena.incarnation))
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == before, "no descriptor is left, of the lender either")


def test_processes_of_other_users_get_and_give_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with lent(tmp_path / "a") as (_, arena):
        monkeypatch.setattr(arenas, "peer_of", lambda _: Process(1, os.getuid() + 1))
        with pytest.raises(PermissionDenied, match="one user"):
            borrow(arena)


def test_a_worker_reads_the_peers_of_its_last_renewal_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with lent(tmp_path / "a") as (_, one), lent(tmp_path / "b") as (_, other):
        host, peers = HostSlots(HOST, WIDTH, "cpu", NAMESPACE), PeerSlots(PEERS, WIDTH, NAMESPACE)
        worker = PeersOfWorker.of([host, peers], tmp_path / "mine")
        assert worker is not None
        assert worker.read_only([one])
        assert worker.mapped == (one.incarnation,)
        assert not worker.read_only([one])
        other = PeerArena(20, other.num_slots, other.address, other.incarnation)
        assert worker.read_only([one, other])
        assert worker.read_only([other])
        assert worker.mapped == (other.incarnation,)
        worker.close()
    assert PeersOfWorker.of([], tmp_path / "mine") is None


def test_peers_that_hang_delay_no_renewal_and_what_can_be_read_is_said_later(tmp_path: Path):
    """Their sockets accept, and nothing comes: as of stopped processes."""
    silent = list[socket.socket]()
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].bind(str(tmp_path / name / "arena.sock"))
        silent[-1].listen()
    hanging = [PeerArena(20, SLOTS, f"unix:{tmp_path}/{name}/worker.sock", name.encode() * 16) for name in "xy"]
    (tmp_path / "mine").mkdir()
    with lent(tmp_path / "a") as (_, one):
        host, peers = HostSlots(HOST, WIDTH, "cpu", NAMESPACE), PeerSlots(PEERS, WIDTH, NAMESPACE)
        worker = PeersOfWorker.of([host, peers], tmp_path / "mine")
        assert worker is not None
        assert not worker.follow([*hanging, one]), "the two take a second each"
        until(lambda: worker.follow([*hanging, one]))
        assert worker.mapped == (one.incarnation,)
        worker.follow(hanging)
        worker.close()
        assert not worker.mapped
    for listener in silent:
        listener.close()


def test_a_peer_that_is_not_named_any_more_is_left_before_others_are_opened(tmp_path: Path, monkeypatch):
    (tmp_path / "mine").mkdir()
    goes_on = threading.Event()
    with lent(tmp_path / "a") as (_, one), lent(tmp_path / "b") as (_, other):
        host, peers = HostSlots(HOST, WIDTH, "cpu", NAMESPACE), PeerSlots(PEERS, WIDTH, NAMESPACE)
        worker = PeersOfWorker.of([host, peers], tmp_path / "mine")
        assert worker is not None
        until(lambda: worker.follow([one]))

        def hangs(arena: PeerArena) -> Peer:
            goes_on.wait()
            return borrow(arena)

        monkeypatch.setattr(arenas, "borrow", hangs)
        assert not worker.follow([one, other])
        assert worker.mapped == (one.incarnation,)
        assert not worker.follow([other]), "while the thread opens what an earlier renewal named"
        assert not worker.mapped
        goes_on.set()
        until(lambda: worker.follow([other]))
        assert worker.mapped == (other.incarnation,)
        worker.close()
