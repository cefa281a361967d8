"""Main functions of child processes: a worker, or an engine that executes the commands of a test."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import kvplane
from kvplane.base.errors import KvplaneError, error_of_reason
from kvplane.base.key_records import RECORD_BYTES, KeyRecord, KeyRecords
from kvplane.base.rank_plan import RankPlan
from kvplane.rank import Rank, RankGroup
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.attach import attach
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.pages import PageMover
from kvplane_worker.process import WorkerOptions, run


def worker(connection: Connection, options: WorkerOptions) -> None:
    """Run a worker until it is signalled. Sends its address, or the error."""
    torch.set_num_threads(1)
    try:
        run(options, connection.send)
    except KvplaneError as error:
        connection.send(picklable(error))


def gated_worker(connection: Connection, options: WorkerOptions, gate: Path) -> None:
    """Run a worker whose scatters stop before the last block while the file `gate` exists; they create `.reached`."""
    scatter = TorchOps.scatter

    def stop_on_the_way(self: TorchOps, group: Any, blocks: Any, staging: Any) -> None:
        scatter(self, group, blocks[:-1], staging[:-1])
        if gate.exists():
            gate.with_suffix(".reached").touch()
        while gate.exists():
            time.sleep(0.005)
        scatter(self, group, blocks[-1:], staging[-1:])

    TorchOps.scatter = stop_on_the_way  # type: ignore[method-assign]
    worker(connection, options)


def engine(connection: Connection, user: int = 0) -> None:
    """Execute commands from the connection until the test closes it."""
    torch.set_num_threads(1)
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    hands = Hands()
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            act: Callable[..., object] = getattr(hands, name)
            try:
                connection.send(act(*arguments))
            except KvplaneError as error:
                connection.send(picklable(error))


def attach_once(where: Path) -> None:
    """Attach as an engine does, and exit."""
    attach(where).close()


def picklable(error: KvplaneError) -> KvplaneError:
    """The error in a form that can be pickled."""
    return error_of_reason(error.reason, error.message, field=error.field, remedy=error.remedy, metadata=error.metadata)


class Hands:
    """The commands of an engine process, with its ranks and its session. Each block is filled with one byte value."""

    def __init__(self) -> None:
        self.attached: list[Holdings] = []
        self.ranks: list[Rank] = []
        self.session: Any = None
        self.client: Any = None
        self.listener: Any = None

    def attach(self, where: str) -> tuple[int, int]:
        """Attach to the worker of one more rank. Returns incarnation and owner epoch."""
        one = attach(where)
        self.attached.append(one)
        self.ranks.append(Rank(one.stamps, PageMover(one.buffers, TorchOps())))
        return one.stamps.incarnation, one.stamps.owner_epoch

    def greeting(self, where: str) -> bytes:
        """Connect to the socket of a worker. Returns the first bytes of its server; b"" if the connection is closed."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(where.removeprefix("unix:"))
            return connection.recv(100)

    def listen(self, path: str) -> None:
        """Listen at the path of a socket."""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()

    def received(self) -> bytes:
        """Accept the connections that wait. Returns what was sent on them."""
        self.listener.settimeout(0)
        received = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.listener.accept()
                connection.settimeout(30)
                while data := connection.recv(1000):
                    received += data
        return received

    def attach_opaque(self, where: str, plan: RankPlan) -> int:
        """Attach to a worker without a service. Returns the incarnation."""
        self.attached.append(attach(where, opaque_plan=plan))
        return self.attached[-1].stamps.incarnation

    def write_raw(self, start: int, content: bytes, stamps: list[tuple[int, int]]) -> None:
        """Write bytes into opaque pages, and stamps of blocks."""
        one = self.attached[-1]
        one.buffers.memory[start : start + len(content)].copy_(torch.tensor(list(content), dtype=torch.uint8))
        for block, stamp in stamps:
            one.stamps.write([block], [stamp])

    def read_raw(self, start: int, count: int) -> bytes:
        return bytes(self.attached[-1].buffers.memory[start : start + count].tolist())

    def write_record(self, record: KeyRecord) -> None:
        KeyRecords.create(self.attached[-1].records, self.attached[-1].plan.num_blocks, 32).write(record)

    def read_record(self, block: int) -> int:
        """Return the stamp of a block's record."""
        records = KeyRecords(self.attached[-1].records).records()
        return int.from_bytes(records[block * RECORD_BYTES : block * RECORD_BYTES + 8], "little")

    def group_of_opaque(self) -> None:
        self.attached[-1].buffers.group(0)

    def open(self, address: str, replica: str) -> tuple[int, int]:
        """Open a session with the stamps of the ranks, and claim them. Returns epoch and number of kept keys."""
        self.client = kvplane.connect(address)
        group = RankGroup([one.stamps for one in self.attached])
        self.session = self.client.session(replica, stamp_table=group.agreed_stamps())
        group.claim(self.session.epoch, self.session.next_seq)
        return self.session.epoch, self.session.kept_keys

    def serve(self, slot: int, tokens: list[int]) -> tuple[int, list[int]]:
        """Prefill a request and end it. Returns hit tokens, and the block table of group 0."""
        part = kvplane.part_of(kvplane.NewsRow(slot, tokens=tokens), kvplane.AdmitRow(slot))
        answer = self.step(part)
        table = answer.tables.by_row()[0][0]
        self.step(kvplane.part_of(kvplane.FactRow(slot, end=kvplane.End.FREE)))
        return answer.admit_hit[0], table

    def load(self, slot: int, tokens: list[int], external: int, carry_out: bool = True) -> tuple[int, list[int]]:
        """Admit a request whose tokens are loaded. Returns the step, and the block table of group 0."""
        late = kvplane.AdmitRow(slot, cap=0, external=external, flags=kvplane.RowFlag.DELAY_CACHING)
        part = kvplane.part_of(kvplane.NewsRow(slot, tokens=tokens), late)
        if carry_out:
            answer = self.step(part)
            return self.session.next_seq - 1, answer.tables.by_row()[0][0]
        result = self.session.apply(part)
        return result.seq, result.parts[0].tables.by_row()[0][0]

    def step(self, part: Any) -> Any:
        """Apply one step, and execute it on every rank."""
        group = RankGroup([one.stamps for one in self.attached])
        through = group.executed_through(self.session.epoch)
        result = self.session.apply(part, executed_through=through)
        for rank in self.ranks:
            rank.carry_out(self.session.epoch, result.seq, result.part, result.parts[0].orders)
            rank.executed(result.seq)
        return result.parts[0]

    def claim(self, epoch: int) -> None:
        for rank in self.ranks:
            rank.claim(epoch)

    def claim_from(self, epoch: int, next_seq: int) -> tuple[int, int]:
        """Claim with a given first step. Returns the position of two ranks afterwards."""
        for rank in self.ranks:
            rank.claim(epoch, next_seq)
        first, second = (one.stamps.position[0] for one in self.attached)
        return first, second

    def carry_out(self, epoch: int, seq: int) -> None:
        """Execute a step without orders on every rank."""
        for rank in self.ranks:
            rank.carry_out(epoch, seq, 0, kvplane.Orders())
            rank.executed(seq)

    def fill(self, rank: int, group: int, block: int, byte: int) -> None:
        for layer in self.attached[rank].buffers.group(group).layers:
            layer[block] = byte
            if layer.is_cuda:  # other processes read without waiting for this one
                torch.cuda.synchronize(layer.device)

    def look(self, rank: int, group: int, block: int) -> set[int]:
        return {byte for layer in self.attached[rank].buffers.group(group).layers for byte in layer[block].tolist()}

    def restamp(self, rank: int, block: int, stamp: int) -> None:
        self.attached[rank].stamps.write([block], [stamp])

    def stamps(self, rank: int) -> tuple[int, ...]:
        return self.attached[rank].stamps.read_all()
