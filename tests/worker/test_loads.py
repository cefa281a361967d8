"""Loads: a load waits for launches that may use its pages, and is refused after its engine life has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, LimitExceeded, StaleEpoch
from kvplane.base.step import End
from kvplane.rank import RankGroup
from kvplane.session.rows import FactRow, RunRow, part_of
from kvplane.v1 import allocation_pb2
from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.attach import WorkerClient, pages_under_transfer, read_stamps
from kvplane_worker.lending.rundir import read_token, run_dir_of
from kvplane_worker.rpc.servicer import MAX_THREADS, THREADS_FOR_CLAIMS
from tests.service.rig import column, until
from tests.worker.rig import BLOCKS, Child, World, refusal

PROMPT = list(range(1000, 1100))
BYTE = 7
SCATTER, ZERO, COPY, GATHER = (f"TRANSFER_KIND_{name}" for name in ("SCATTER", "ZERO", "COPY", "GATHER"))


class Moved:
    """A worker with a gate, an engine on it, and a client that transfers pages as another process would."""

    def __init__(self, here: World) -> None:
        self.here, self.gate = here, here.folder / "gate"
        self.worker, self.address = here.gated_worker(self.gate)
        self.engine = here.engine()
        self.engine.do("attach", self.address)
        self.epoch, _ = self.engine.do("open", here.service.address, "r")
        self.token = read_token(run_dir_of(self.address))
        self.client = WorkerClient(run_dir_of(self.address), timeout_s=30)
        self.threads = ThreadPoolExecutor(16)

    def transfer(self, kind: str, **fields: Any) -> pb.TransferResponse:
        given = {"token": self.token, "epoch": self.epoch, "kind": kind, "group": 0, **fields}
        return self.client.call("Transfer", pb.TransferRequest(**given), pb.TransferResponse)

    def load(self, **fields: Any) -> Future[pb.TransferResponse]:
        """Start a transfer that stops before its last block."""
        self.gate.touch()
        begun = self.threads.submit(self.transfer, SCATTER, **fields)
        until(self.gate.with_suffix(".reached").exists)
        return begun

    def checksums(self, blocks: list[int]) -> list[int]:
        request = pb.ChecksumRequest(token=self.token, blocks=blocks)
        return list(self.client.call("Checksum", request, pb.ChecksumResponse).checksums)

    def end(self) -> None:
        self.gate.unlink(missing_ok=True)
        self.threads.shutdown()
        self.client.close()


@pytest.fixture
def moved(here: World) -> Iterator[Moved]:
    it = Moved(here)
    yield it
    it.end()


def blocks_of(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


def test_load_is_refused_before_the_orders_of_its_admission(moved: Moved):
    seq, table = moved.engine.do("load", 0, PROMPT, 64, False)
    before = moved.checksums(table)
    for kind, more in ((SCATTER, {}), (ZERO, {}), (COPY, {"dst_blocks": table})):
        error = refusal(lambda kind=kind, more=more: moved.transfer(kind, blocks=table, seq=seq, **more))
        assert (type(error), error.field) == (FailedPrecondition, "seq")
    assert moved.checksums(table) == before
    assert moved.transfer(GATHER, blocks=table[:1]).discarded == [], "a transfer that only reads does not wait"
    moved.engine.do("carry_out", moved.epoch, seq)
    assert moved.transfer(SCATTER, blocks=table, seq=seq).discarded == []
    assert isinstance(refusal(lambda: moved.transfer(SCATTER, blocks=table, seq=seq, part=1)), FailedPrecondition)


def test_load_is_refused_before_step_load_after(moved: Moved):
    seq, table = moved.engine.do("load", 0, PROMPT, 64)
    error = refusal(lambda: moved.transfer(SCATTER, blocks=table, seq=seq, load_after=seq + 1))
    assert (type(error), error.field) == (FailedPrecondition, "load_after")
    moved.engine.do("carry_out", moved.epoch, seq + 1)
    assert moved.transfer(SCATTER, blocks=table, seq=seq, load_after=seq + 1).discarded == []


def test_transfer_that_writes_must_name_its_admission(moved: Moved):
    _, table = moved.engine.do("load", 0, PROMPT, 64)
    error = refusal(lambda: moved.transfer(SCATTER, blocks=table))
    assert (type(error), error.field) == (InvalidArgument, "seq")


def test_loaded_tokens_are_hit_by_the_next_request(moved: Moved):
    """The procedure of docs/engines.md: admit, carry out, query the ranks, transfer, commit."""
    moved.engine.do("fill", 0, 0, BLOCKS - 1, BYTE)
    seq, table = moved.engine.do("load", 0, PROMPT, 64)
    assert RankGroup([read_stamps(moved.address)]).may_load(moved.epoch, seq, 0, 0)
    pages = table[:4]
    moved.transfer(GATHER, blocks=[BLOCKS - 1] * 4)
    assert moved.transfer(SCATTER, blocks=pages, seq=seq).discarded == []
    assert [moved.engine.do("look", 0, 0, block) for block in pages] == [{BYTE}] * 4
    moved.engine.do("step", part_of(FactRow(0, commit=64), RunRow(0)))
    moved.engine.do("step", part_of(FactRow(0, end=End.FREE)))
    hit, adopted = moved.engine.do("serve", 1, PROMPT)
    assert hit >= 64
    assert adopted[:4] == pages


def test_load_of_a_killed_engine_writes_no_page_of_the_next_engine_life(moved: Moved):
    """The engine is killed while its transfer writes.
    The claim does not wait for the transfer, and lists its blocks.
    """
    here, (seq, table) = moved.here, moved.engine.do("load", 0, PROMPT, 64)
    load = moved.load(blocks=table, seq=seq)
    assert list(pages_under_transfer(moved.address)) == table
    moved.engine.kill()
    stamps = read_stamps(moved.address).stamp_bytes()
    stream = here.service.open(stamp_table=stamps)
    assert set(table) <= set(blocks_of(stream.opened.busy_blocks))
    assert stream.opened.free_blocks == BLOCKS - 1 - len(blocks_of(stream.opened.busy_blocks))
    slots = range(4)
    tokens = column(*(slot for slot in slots for _ in range(100)))
    news = {"slot": column(*slots), "num_tokens": column(*[100] * 4), "tokens": tokens}
    answer = stream.step({"news": news, "admit": {"slot": column(*slots)}})
    (part,) = answer.result.parts
    given = blocks_of(part.tables.ids)
    assert len(given) > stream.opened.free_blocks // 2
    assert not set(given) & set(table)
    before = moved.checksums(given)
    moved.gate.unlink()
    assert load.result(30).discarded == []
    assert moved.checksums(given) == before
    assert pages_under_transfer(moved.address) == ()
    assert isinstance(refusal(lambda: moved.transfer(SCATTER, blocks=table, seq=seq)), StaleEpoch)
    error = stream.refused({"cache": {"loads_over": column(given[0])}})
    assert error.field == "parts[0].cache.loads_over[0]"
    held = blocks_of(stream.opened.busy_blocks)
    (part,) = stream.step({"cache": {"loads_over": column(*held)}}).result.parts
    assert part.free_blocks == BLOCKS - 1 - len(given)


def test_blocks_of_a_running_transfer_are_busy_for_a_service_that_lost_its_store(moved: Moved):
    """Deregister and register the replica, as after a crash of service and store."""
    here, (seq, table) = moved.here, moved.engine.do("load", 0, PROMPT, 64)
    load = moved.load(blocks=table[:2], seq=seq)
    moved.engine.kill()
    worker = here.shown()[0]
    here.service.allocation.DeregisterReplica(allocation_pb2.DeregisterReplicaRequest(replica="r"))
    here.register()
    until(lambda: [one.worker_id for one in here.shown()] == [worker.worker_id])
    stream = here.service.open()
    assert blocks_of(stream.opened.busy_blocks) == sorted(table[:2])
    moved.gate.unlink()
    load.result(30)


def test_attach_waits_for_the_transfer_of_the_previous_process(moved: Moved):
    seq, table = moved.engine.do("load", 0, PROMPT, 64)
    load = moved.load(blocks=table, seq=seq)
    moved.engine.kill()
    other: Child = moved.here.engine()
    attached = moved.threads.submit(other.do, "attach", moved.address)
    for _ in range(300):  # long enough to show an attach that does not wait
        assert list(pages_under_transfer(moved.address)) == table
    assert not attached.done()
    moved.gate.unlink()
    assert attached.result(30)[1] == moved.epoch
    assert load.result(30).discarded == []


def test_claims_are_answered_while_transfers_wait(moved: Moved):
    seq, table = moved.engine.do("load", 0, PROMPT, 64)
    load = moved.load(blocks=table, seq=seq)
    refused = threading.Event()

    def wait_or_be_refused() -> pb.TransferResponse | None:
        try:
            return moved.transfer(SCATTER, blocks=table, seq=seq)
        except LimitExceeded:
            refused.set()
            return None
        except StaleEpoch:
            return None

    others = [moved.threads.submit(wait_or_be_refused) for _ in range(MAX_THREADS - THREADS_FOR_CLAIMS)]
    assert refused.wait(30), "more calls than threads may wait"
    claim = pb.ClaimRequest(token=moved.token, epoch=moved.epoch + 1)
    assert blocks_of(moved.client.call("Claim", claim, pb.ClaimResponse).busy) == table
    moved.gate.unlink()
    assert load.result(30).discarded == []
    assert [other.result(30) for other in others] == [None] * len(others), (
        "no transfer of the old engine life starts after the claim"
    )


def test_queued_transfer_is_busy_after_its_client_timed_out(moved: Moved):
    first_seq, first = moved.engine.do("load", 0, PROMPT, 64)
    seq, table = moved.engine.do("load", 1, list(range(2000, 2100)), 64)
    running = moved.load(blocks=first[:4], seq=first_seq)
    order = pb.TransferRequest(
        token=moved.token, epoch=moved.epoch, kind=SCATTER, group=0, blocks=table[:4], seq=seq, first_row=0
    )
    with WorkerClient(run_dir_of(moved.address), timeout_s=1) as client, pytest.raises(DeadlineExceeded):
        client.call("Transfer", order, pb.TransferResponse)
    assert set(pages_under_transfer(moved.address)) == {*first[:4], *table[:4]}
    moved.gate.unlink()
    running.result(30)
    until(lambda: not pages_under_transfer(moved.address))
