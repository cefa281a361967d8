"""Host tiers that are read over NIXL: what is copied, what a late read may still write, what no client can write."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvplane.base.errors import FailedPrecondition, Unavailable
from kvplane.base.worker import MAX_NIXL_BYTES, PeerArena
from kvplane_worker.nixl import process as nixl
from kvplane_worker.nixl.messages import ADDRESS, PACKAGES, Read
from kvplane_worker.nixl.process import MOST_LATE, NUM_LANES, NixlMemory, NixlProcess
from kvplane_worker.nixl.transport import PeerTransport
from kvplane_worker.rpc.arenas import PeersOfWorker
from kvplane_worker.tiers import HostSlots, Peer, PeerSlots
from kvplane_worker.tiers.arena import Arena
from kvplane_worker.tiers.seal import HEADER_BYTES
from tests.service.rig import until
from tests.worker.nixl_writer import NUM_BYTES, VALUE, write
from tests.worker.test_arenas import HOST, NAMESPACE, PEERS, SLOTS, WIDTH, row, written

pytestmark = pytest.mark.skipif(
    not any(find_spec(name) for name in PACKAGES), reason="NIXL is not installed: pip install '.[nixl]'"
)


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch):
    """As between hosts: UCX would take memory that two processes of this host share."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@contextmanager
def two(read_s: float = 20.0) -> Iterator[tuple[HostSlots, NixlProcess, NixlProcess, NixlMemory]]:
    """A host tier, the process that lends it, another worker's, and the memory as that one reads it."""
    host, other = HostSlots(HOST, WIDTH, "cpu", NAMESPACE), HostSlots(HOST, WIDTH, "cpu", NAMESPACE)
    lender = NixlProcess(host.arena, host.incarnation)
    reader = NixlProcess(other.arena, other.incarnation, read_s)
    try:
        yield host, lender, reader, reader.open(arena_of(host, lender))
    finally:
        for closed in (lender, reader, host, other):
            closed.close()


def arena_of(host: HostSlots, lender: NixlProcess) -> PeerArena:
    return PeerArena(10, SLOTS, "unix:/of/another/host/worker.sock", host.incarnation, lender.nixl_arena)


def test_a_peer_reads_what_its_job_names_and_nothing_else():
    with two() as (host, lender, _, memory):
        payloads = [written(host, slot, 7, 90 + slot, b"right%d" % slot) for slot in range(SLOTS)]
        peers = PeerSlots(PEERS, WIDTH, NAMESPACE)
        peers.set_peers([Peer(10, host.incarnation, memory)])
        found = peers.read([row(10 + slot, 7, 90 + slot) for slot in range(SLOTS)], WIDTH)
        assert found is not None
        assert [bytes(one.tolist()) for one in found] == payloads
        assert peers.held(12) == (3, WIDTH)
        for other in (row(12, 8, 92), row(12, 7, 93), row(16, 7, 92), row(9, 7, 92)):
            assert peers.read([other], WIDTH) is None
        written(host, 2, 8, 92, b"other")
        assert peers.read([row(12, 7, 92)], WIDTH) is None
        assert peers.read([row(12, 8, 92)], WIDTH) is not None
        assert len(lender.nixl_arena) < MAX_NIXL_BYTES


def test_more_than_a_lane_is_read_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl, "LANE_BYTES", 1 << 12)
    with two() as (host, _, reader, memory):
        payloads = [written(host, slot, 1, slot, b"%d" % slot) for slot in range(SLOTS)]
        assert reader.lane_bytes < 3 * WIDTH
        headers, found = bytearray(SLOTS * HEADER_BYTES), bytearray(SLOTS * WIDTH)
        assert memory.read(0, memoryview(headers), memoryview(found))
        assert bytes(found) == b"".join(payloads)
        assert bytes(headers) == bytes(host.arena.headers[: len(headers)])


@pytest.mark.parametrize(("width", "pieces"), [(60, [(1000, 60), (1100, 60)]), (100, [(1000, 200)]), (0, [])])
def test_payloads_without_a_gap_are_one_piece(width: int, pieces: list[tuple[int, int]]):
    assert Read(1, 7, 8, 1000, 100, width, 2).pieces == [(7, 8), *pieces]


def test_a_lane_of_a_late_read_is_not_used_before_it_has_ended():
    with two(read_s=0.2) as (host, lender, reader, memory):
        written(host, 0, 1, 5, b"late")
        peers = PeerSlots(PEERS, WIDTH, NAMESPACE)
        peers.set_peers([Peer(10, host.incarnation, memory)])
        until(lambda: peers.read([row(10, 1, 5)], WIDTH) is not None)
        stop(lender.pid)
        for _ in range(2 * MOST_LATE):
            assert peers.read([row(10, 1, 5)], WIDTH) is None
        late = [lane for lane in reader._lanes if lane.peer is memory]
        assert len(late) == MOST_LATE, "then the peer is not read, and takes no further lane"
        assert not set(map(id, late)) & set(map(id, reader._free))
        assert reader.is_usable
        memory.close()
        assert len([lane for lane in reader._lanes if lane.peer is memory]) == MOST_LATE, "also of a peer that is left"
        os.kill(lender.pid, signal.SIGCONT)
        until(lambda: reader.is_usable and len(reader._free) == NUM_LANES)
        assert peers.read([row(10, 1, 5)], WIDTH) is None, "the agent has forgotten it"


def test_an_agent_that_hangs_is_ended_and_a_peer_that_hangs_is_not_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl, "ORDER_S", 2.0)
    for hangs, is_usable in (("lender", True), ("reader", False)):
        with two(read_s=0.2) as (host, lender, reader, memory):
            written(host, 0, 1, 5, b"hangs")
            to = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(WIDTH))
            until(lambda memory=memory, to=to: memory.read(0, *to))  # type: ignore[misc]
            stop({"lender": lender, "reader": reader}[hangs].pid)
            assert not memory.read(0, *to)
            assert reader.is_usable == is_usable


def test_a_peer_whose_agent_is_killed_fails_reads_under_way():
    with two() as (host, lender, reader, memory):
        written(host, 0, 1, 5, b"gone")
        peers = PeerSlots(PEERS, WIDTH, NAMESPACE)
        peers.set_peers([Peer(10, host.incarnation, memory)])
        assert peers.read([row(10, 1, 5)], WIDTH) is not None
        os.kill(lender.pid, signal.SIGKILL)
        assert peers.read([row(10, 1, 5)], WIDTH) is None
        peers.note_unread([row(10, 1, 5)])
        assert (peers.counts.failed, peers.counts.refused) == (1, 0)
        assert len(reader._free) == NUM_LANES


def test_metadata_of_another_memory_than_the_service_said_is_refused():
    with two() as (host, lender, reader, _):
        right = arena_of(host, lender)
        with pytest.raises(Unavailable, match="another memory"):
            reader.open(replace(right, incarnation=bytes(16)))
        for wrong in (b"", b"short", bytes(200), right.nixl_arena[:-40]):
            with pytest.raises(Unavailable):
                reader.open(replace(right, nixl_arena=wrong))
        assert reader.is_usable


def test_an_address_that_the_agent_has_not_registered_is_not_read():
    with two() as (host, lender, reader, _):
        blob = lender.nixl_arena
        (base,) = ADDRESS.unpack_from(blob)

        def at(address: int) -> PeerArena:
            return replace(arena_of(host, lender), nixl_arena=ADDRESS.pack(address) + blob[ADDRESS.size :])

        with pytest.raises(Unavailable, match="another memory"):
            reader.open(at((1 << 64) - 1))
        for moved in (base + 4096, base - 4096, 0, 1 << 62):
            memory = reader.open(at(moved))
            headers, payloads = bytearray(SLOTS * HEADER_BYTES), bytearray(SLOTS * host.slot_bytes)
            assert not memory.read(0, memoryview(headers), memoryview(payloads))
        assert reader.is_usable


def test_a_holder_of_the_metadata_cannot_write_the_host_tier():
    """Its write ends the process that lends, and not the worker: that process has the memory mapped read-only."""
    host = HostSlots(HOST, WIDTH, "cpu", NAMESPACE)
    payload = written(host, 0, 1, 5, b"kept")
    lender = NixlProcess(host.arena, host.incarnation)
    try:
        before = bytes(host.arena.headers), bytes(host.arena.rows)
        (base,) = ADDRESS.unpack_from(lender.nixl_arena)
        assert not write(lender.nixl_arena, base + HEADER_BYTES)
        assert (bytes(host.arena.headers), bytes(host.arena.rows)) == before
        assert payload in before[1]
        until(lambda: not lender.is_usable)
    finally:
        lender.close()


def test_forged_metadata_reaches_memory_of_that_process_that_it_does_not_give_out():
    """Nothing at the peer compares an address with what it has registered: so no other memory is in its process."""
    with two() as (_, lender, _, _):
        maps = Path(f"/proc/{lender.pid}/maps").read_text().splitlines()
        (staging,) = (int(line.partition("-")[0], 16) for line in maps if "kvplane-nixl-staging" in line)
        base, forged = lender.nixl_arena[: ADDRESS.size], ADDRESS.pack(staging)
        assert lender.nixl_arena.count(base) == 2, "in front, and in the metadata"
        assert write(lender.nixl_arena.replace(base, forged), staging)
        assert bytes(lender._staging[:NUM_BYTES]) == bytes([VALUE]) * NUM_BYTES


def test_no_descriptor_and_no_process_is_left():

    def pids_of() -> tuple[int, int]:
        with two() as (host, lender, reader, memory):
            written(host, 0, 1, 5, b"read")
            assert memory.read(0, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(WIDTH)))
            return lender.pid, reader.pid

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    pids_of()
    before = descriptors()
    pids = [*pids_of(), *pids_of()]
    assert descriptors() <= before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_peers_that_come_and_go_leave_nothing_at_an_agent():
    with two() as (host, lender, reader, memory):
        written(host, 0, 1, 5, b"stays")

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{reader.pid}/fd"))

        def reads(one: NixlMemory) -> bool:
            return one.read(0, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(WIDTH)))

        found = list[int]()
        for number in range(8):
            other = NixlProcess(host.arena, host.incarnation) if number % 2 else lender
            again = [reader.open(arena_of(host, other)) for _ in range(3)]
            assert all(map(reads, again))
            if other is not lender:
                other.close()
                until(lambda gone=again[0]: not reads(gone))  # type: ignore[misc]
            for one in again:
                one.close()
            assert reads(memory), "others that were read of the same agent are closed"
            found.append(descriptors())
        assert max(found[4:]) <= max(found[:4])


def test_memory_that_cannot_be_lent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    arena = Arena.create(2, 4096)
    monkeypatch.setenv("UCX_TLS", "none_of_them")
    with pytest.raises(FailedPrecondition, match="UCX_TLS"):
        NixlProcess(arena, bytes(16))
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_nixl",))
    with pytest.raises(FailedPrecondition, match=r"nixl.*pip install|pip install.*nixl"):
        NixlProcess(arena, bytes(16))


class Worker:
    """What a worker has of peers, in this process."""

    def __init__(self, folder: Path, transport: PeerTransport, first: int) -> None:
        folder.mkdir()
        self.folder, self.first = folder, first
        self.host, self.slots = HostSlots(HOST, WIDTH, "cpu", NAMESPACE), PeerSlots(PEERS, WIDTH, NAMESPACE)
        made = PeersOfWorker.of([self.host, self.slots], folder, transport)
        assert made is not None
        self.peers = made

    def arena(self, is_far: bool = False) -> PeerArena:
        """What the service sends of it to others; `is_far`: as if it were on another host."""
        folder = self.folder / "far" if is_far else self.folder
        address = f"unix:{folder}/worker.sock"
        return PeerArena(self.first, SLOTS, address, self.host.incarnation, self.peers.nixl_arena)


@contextmanager
def workers(folder: Path, *transports: PeerTransport) -> Iterator[list[Worker]]:
    made = [Worker(folder / str(number), one, number * SLOTS) for number, one in enumerate(transports)]
    try:
        yield made
    finally:
        for one in made:
            one.peers.close()


def test_a_worker_maps_peers_on_its_host_and_reads_others_over_nixl(tmp_path: Path):
    with workers(tmp_path, PeerTransport.NIXL, PeerTransport.NIXL, PeerTransport.NIXL_ONLY) as (one, other, only):
        written(one.host, 2, 7, 99, b"right")
        for is_far, number in ((False, 0), (True, 1)):
            assert other.peers.read_only([one.arena(is_far)])
            assert (other.peers.mapped, other.peers.nixl_peers) == ((one.host.incarnation,), number)
            assert other.slots.read([row(2, 7, 99)], WIDTH) is not None
            assert not other.peers.read_only([one.arena(is_far)])
        assert only.peers.read_only([one.arena()])
        assert only.peers.nixl_peers == 1
        assert only.slots.read([row(2, 7, 99)], WIDTH) is not None


def test_peers_on_other_hosts_are_refused_by_name_without_nixl(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with workers(tmp_path, PeerTransport.NIXL, PeerTransport.SHARED_MEMORY) as (one, other):
        for _ in range(2):
            assert not other.peers.read_only([one.arena(is_far=True)])
        assert caplog.text.count("--peer-transport nixl") == 1, "said once"
        assert not one.peers.read_only([other.arena(is_far=True)])
        assert other.peers.nixl_arena == b""
        assert one.peers.mapped == other.peers.mapped == ()


def test_a_peer_that_cannot_be_opened_is_tried_ever_more_rarely_and_another_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried = list[tuple[int, bytes]]()
    call = 0

    def refuse(_: object, arena: PeerArena) -> Peer:
        tried.append((call, arena.incarnation))
        raise Unavailable("no worker answers")

    monkeypatch.setattr(PeersOfWorker, "_open", refuse)
    with workers(tmp_path, PeerTransport.SHARED_MEMORY, PeerTransport.SHARED_MEMORY) as (one, other):
        silent = one.arena()
        for call in range(1, 101):  # noqa: B007 - `refuse` reads it
            assert not other.peers.read_only([silent])
        assert [at for at, _ in tried] == [1, 2, 4, 8, 16, 32, 64, 96]
        again = replace(silent, incarnation=bytes(16))
        assert not other.peers.read_only([silent, again])
        assert tried[-1] == (100, bytes(16)), "its worker was started again"


def test_an_agent_that_failed_to_open_many_peers_is_started_again(monkeypatch: pytest.MonkeyPatch):
    """UCX keeps descriptors of each."""
    monkeypatch.setattr(nixl, "MOST_FAILED", 3)
    with two() as (host, lender, reader, _):
        right = arena_of(host, lender)
        for _ in range(3):
            assert reader.is_usable
            with pytest.raises(Unavailable):
                reader.open(replace(right, nixl_arena=right.nixl_arena[:8] + b"no metadata"))
        assert not reader.is_usable


def test_a_killed_process_is_started_again_and_peers_find_it(tmp_path: Path):
    with workers(tmp_path, PeerTransport.NIXL_ONLY, PeerTransport.NIXL_ONLY) as (one, other):
        written(one.host, 2, 7, 99, b"right")
        written(other.host, 1, 3, 44, b"also")
        one.peers.read_only([other.arena()])
        other.peers.read_only([one.arena()])
        before = one.peers.nixl_arena
        assert one.peers._nixl is not None
        os.kill(one.peers._nixl.pid, signal.SIGKILL)
        until(lambda: one.slots.read([row(SLOTS + 1, 3, 44)], WIDTH) is None)
        assert other.slots.read([row(2, 7, 99)], WIDTH) is None
        assert one.peers.read_only([other.arena()])
        assert one.slots.read([row(SLOTS + 1, 3, 44)], WIDTH) is not None
        assert one.peers.nixl_arena != before
        assert other.peers.read_only([one.arena()])
        assert other.slots.read([row(2, 7, 99)], WIDTH) is not None


def stop(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
