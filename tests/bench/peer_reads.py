"""`python -m tests.bench.peer_reads`: what a reader adds to the transfer of a peer's bytes, by shared memory and NIXL.

    copy     the pieces that are read, copied from the memory of the peer in one process
    mapped   the same, read as a worker of the same host reads them
    raw      the same bytes, read by NIXL from the peer's agent in one transfer, into memory that is registered
    NIXL     the same, read as a worker of another host reads them, over the loopback device

Each is the time of one piece, median of runs that take turns; `verified` includes the checksum of the seal.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.worker import PeerArena
from kvplane_worker.nixl import agent
from kvplane_worker.nixl.messages import ADDRESS
from kvplane_worker.nixl.process import NixlMemory, NixlProcess
from kvplane_worker.tiers import HostSlots, Peer, PeerSlots
from kvplane_worker.tiers.arena import Arena, aligned
from kvplane_worker.tiers.seal import HEADER_BYTES, Content
from tests.bench.goals import goal
from tests.bench.machine import machine_line

SHAPES = ((64, 64 << 10), (8, 512 << 10), (2, 2 << 20))  # slots of a piece, bytes of each
MANY = 16  # pieces of a host tier, so that no cache has the next one


class Raw:
    """Reads of a peer's memory by NIXL and nothing else, in this process."""

    def __init__(self, arena: bytes, offset: int, num_bytes: int) -> None:
        """`arena`: what the peer lends. `offset`: of the first byte that is read."""
        self._nixl = nixl = agent.library()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, agent.PROGRESS_US
        self._agent = nixl.nixlAgent("raw", config)
        self._agent.createBackend("UCX", {})
        self.target = torch.zeros(num_bytes, dtype=torch.uint8)
        self._num_bytes = num_bytes
        self._agent.registerMem(self._descriptors(nixl.nixlRegDList, self.target.data_ptr(), ""), [])
        self._peer = self._agent.loadRemoteMD(arena[ADDRESS.size :]).decode()
        self._first = ADDRESS.unpack_from(arena)[0] + offset

    def _descriptors(self, kind: Any, address: int, *more: str) -> Any:
        return kind(self._nixl.DRAM_SEG, [(address, self._num_bytes, 0, *more)])

    def read(self, piece: int) -> None:
        nixl, first = self._nixl, self._first + piece * self._num_bytes
        local, remote = (self._descriptors(nixl.nixlXferDList, at) for at in (self.target.data_ptr(), first))
        made = self._agent.createXferReq(nixl.NIXL_READ, local, remote, self._peer)
        status = self._agent.postXferReq(made)
        while status == nixl.NIXL_IN_PROG:
            time.sleep(agent.POLL_S)
            status = self._agent.getXferStatus(made)
        assert status == nixl.NIXL_SUCCESS
        self._agent.releaseXferReq(made)


def filled(count: int, width: int) -> HostSlots:
    """A host tier of MANY pieces, whose slots are sealed."""
    slots = HostSlots(TierSpec(TierKind.HOST, MANY * count), width, "cpu")

    def fill(rows: torch.Tensor) -> list[bool]:
        rows.random_()
        return [True] * len(rows)

    for first in range(0, MANY * count, count):
        slots.write([content(slots, slot) for slot in range(first, first + count)], width, fill)
    return slots


def content(slots: HostSlots, slot: int) -> Content:
    return Content(slots.identity, 0, slot, 0, 1 + slot, slot)


@contextmanager
def agents(host: HostSlots) -> Iterator[tuple[NixlProcess, NixlMemory]]:
    """The process that lends a host tier, and that tier as another worker reads it."""
    lender = NixlProcess(host.arena, host.incarnation)
    reader = NixlProcess(host.arena, host.incarnation)
    try:
        place = PeerArena(0, host.spec.num_blocks, "", host.incarnation, lender.nixl_arena)
        yield lender, reader.open(place)
    finally:
        lender.close()
        reader.close()


def measure(count: int, width: int, runs: int) -> dict[str, float]:
    """Seconds of each way to read a piece of this number of slots, of this number of bytes."""
    host = filled(count, width)
    mapped = Arena.open(os.dup(host.arena.descriptor), host.arena.num_slots, host.arena.slot_bytes)
    headers, payloads = memoryview(bytearray(count * HEADER_BYTES)), memoryview(bytearray(count * width))
    with agents(host) as (lender, far):
        first_row = aligned(host.arena.num_slots * HEADER_BYTES)
        raw = Raw(lender.nixl_arena, first_row, count * width)

        def copy(piece: int) -> None:
            for slot in range(count):
                first = (piece * count + slot) * host.slot_bytes
                payloads[slot * width : (slot + 1) * width] = host.arena.rows[first : first + width]

        def read(memory: Arena | NixlMemory) -> Callable[[int], None]:
            def act(piece: int) -> None:
                assert memory.read(piece * count, headers, payloads)

            return act

        def verified(memory: Arena | NixlMemory) -> Callable[[int], None]:
            peers = PeerSlots(TierSpec(TierKind.PEERS, host.spec.num_blocks), width)
            peers.set_peers([Peer(0, host.incarnation, memory)])

            def act(piece: int) -> None:
                rows = [content(host, slot) for slot in range(piece * count, (piece + 1) * count)]
                assert peers.read(rows, width) is not None

            return act

        ways: dict[str, Callable[[int], None]] = {
            "copy": copy,
            "mapped": read(mapped),
            "mapped, verified": verified(mapped),
            "raw": raw.read,
            "NIXL": read(far),
            "NIXL, verified": verified(far),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(runs + 1):  # the first one connects
            for name, act in ways.items():
                began = time.perf_counter()
                act(run % MANY)
                times[name].append(time.perf_counter() - began)
    last = host.arena.rows[runs % MANY * count * width :][: count * width]
    assert bytes(raw.target.numpy()) == bytes(last)
    del last
    host.close()
    return {name: median(values[1:]) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peer_reads", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    os.environ.setdefault("UCX_TLS", "tcp")
    torch.set_num_threads(1)
    print(machine_line())
    reached = list[bool]()
    for count, width in SHAPES:
        times = measure(count, width, given.runs)
        speeds = ", ".join(f"{name} {count * width / value / 1e9:.2f}" for name, value in times.items())
        print(f"{count} slots of {width:,} bytes, GB/s: {speeds}")
        what = f"of {count} slots of {width:,} bytes"
        reached.append(goal("mapped", f"{what}, as a share of a copy", times["copy"] / times["mapped"], least=0.9))
        reached.append(goal("NIXL", f"{what}, as a share of its raw transfer", times["raw"] / times["NIXL"], least=0.8))
    return not all(reached)


if __name__ == "__main__":
    sys.exit(main())
