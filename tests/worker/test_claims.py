"""Claims: a session raises the owner epoch of every rank, after which orders of earlier engine lives are refused."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvplane
from kvplane.base.errors import InvalidArgument, StaleEpoch, Unavailable
from kvplane.base.stamps import Stamp
from kvplane.base.worker import WorkerInfo
from kvplane.v1 import plan_pb2
from kvplane.v1 import worker_pb2 as pb
from kvplane_service.rpc import claims
from kvplane_worker.attach import read_stamps
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.lending.writer import ProcessName
from kvplane_worker.rpc.callers import Caller
from kvplane_worker.rpc.server import service_handler
from tests.service.rig import NONCES, Stream
from tests.worker.rig import World, world

WORKER = pb.DESCRIPTOR.services_by_name["Worker"]
PROMPT = list(range(1000, 1100))


@pytest.fixture
def pair(tmp_path):
    """Two ranks with an engine that has served a request, and both stamp tables."""
    with world(tmp_path) as it:
        it.register(num_ranks=2, retention_interval=-1)
        workers = [it.worker(rank) for rank in range(2)]
        engine = it.engine()
        for _, address in workers:
            engine.do("attach", address)
        engine.do("open", it.service.address, "r")
        engine.do("serve", 0, PROMPT)
        yield it, engine, [child for child, _ in workers], [read_stamps(address) for _, address in workers]


def open_without_claim(here: World, stamps: tuple[int, ...] = ()) -> Stream:
    """Open a session for an engine that has not claimed the ranks itself."""
    return here.service.open(stamp_table=b"".join(stamp.to_bytes(8, "little") for stamp in stamps))


def epochs(tables) -> list[int]:
    return [table.owner_epoch for table in tables]


def test_session_raises_the_owner_epoch_of_every_rank(pair):
    here, engine, _, tables = pair
    before = epochs(tables)
    opened = open_without_claim(here).opened
    assert epochs(tables) == [opened.epoch] * 2
    assert before[0] < opened.epoch
    assert isinstance(engine.do("carry_out", before[0], 50), StaleEpoch), "orders of the old engine life are refused"


def test_keys_are_verified_by_stamps_read_after_the_claim(pair):
    here, engine, _, tables = pair
    shown = tables[0].read_all()
    kept = open_without_claim(here, shown).opened.kept_keys
    assert kept > 1
    with_key = [block for block, stamp in enumerate(shown) if stamp]
    engine.do(
        "restamp", 1, with_key[0], Stamp(0, 1, 999).pack()
    )  # changed on one rank after the engine read its tables
    assert 0 < open_without_claim(here, shown).opened.kept_keys < kept


def test_new_epoch_is_above_the_owner_epoch_of_the_memory(pair):
    here, engine, _, tables = pair
    engine.do("claim", 40)
    assert open_without_claim(here).opened.epoch == 41
    assert epochs(tables) == [41, 41]


def test_refused_session_claims_nothing(pair):
    here, _, _, tables = pair
    before = epochs(tables)
    stream = Stream(here.service.channel)
    stream.send(open={"replica": "r", "nonce": next(NONCES), "stamp_table": bytes(8)})
    assert isinstance(stream.end(), InvalidArgument)
    assert epochs(tables) == before


def test_resumed_session_claims_nothing(pair):
    here, _, _, tables = pair
    begun = open_without_claim(here)
    epoch = begun.opened.epoch
    assert here.service.open(epoch=epoch, life_nonce=begun.nonce).opened.epoch == epoch
    assert epochs(tables) == [epoch] * 2


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_unreachable_worker_is_claimed_by_the_engine(pair, how):
    here, _, workers, tables = pair
    before = epochs(tables)
    if how == "killed":
        workers[1].kill()
    else:
        os.kill(workers[1].pid, signal.SIGSTOP)
    opened = open_without_claim(here).opened
    assert epochs(tables) == [opened.epoch, before[1]]
    if how == "stopped":
        os.kill(workers[1].pid, signal.SIGCONT)


def test_reopened_session_continues_its_step_numbers_after_the_claim(pair):
    """The engine's next step has another number than the first step of the engine life that the service claimed."""
    here, engine, _, _ = pair
    epoch = open_without_claim(here).opened.epoch
    assert engine.do("claim_from", epoch, 31) == (30, 30)
    engine.do("carry_out", epoch, 31)
    assert engine.do("claim_from", epoch, 50) == (31, 31), "refused after the first orders"
    assert isinstance(engine.do("carry_out", epoch, 50), kvplane.SequenceError)


def test_claim_skips_a_directory_that_other_users_can_enter(pair):
    here, _, _, tables = pair
    before = epochs(tables)
    folders = [here.folder / f"r-{rank}" for rank in range(2)]
    for folder in folders:
        folder.chmod(0o755)
    opened = open_without_claim(here).opened
    for folder in folders:
        folder.chmod(0o700)
    assert epochs(tables) == before
    assert opened.epoch == before[0] + 1


def test_address_registered_by_another_owner_is_not_claimed(pair):
    """Otherwise an owner could register the address of another owner's worker and take its pages from the engine."""
    here, engine, _, tables = pair
    before = epochs(tables)
    here.register("x", retention_interval=-1)
    address = f"unix:{here.folder / 'r-0' / 'worker.sock'}"
    worker = {"rank": 0, "worker_id": 77, "address": address, "pid": 1, "device": "cpu", "state": "WORKER_STATE_READY"}
    register = here.service.channel.unary_unary("/kvplane.v1.Workers/RegisterWorker")
    register(plan_pb2.RegisterWorkerRequest(replica="x", worker=worker).SerializeToString())
    for _ in range(3):  # its epochs exceed those of the other owner
        here.service.open("x").close()
    assert epochs(tables) == before
    assert not isinstance(engine.do("carry_out", before[0], 50), StaleEpoch)


def no_process(peer: str) -> ProcessName:
    raise AssertionError(peer)


class Thief:
    """A worker's API on a socket of an attacker: it answers every claim and keeps what it is sent."""

    Describe = Attach = Transfer = Checksum = None

    def __init__(self, path: Path) -> None:
        self.got: list[str] = []
        self.server = grpc.server(ThreadPoolExecutor(1))
        self.server.add_generic_rpc_handlers((service_handler(WORKER, self, no_process),))
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def Claim(self, request: pb.ClaimRequest, _: Caller) -> pb.ClaimResponse:  # noqa: N802
        self.got.append(request.token)
        return pb.ClaimResponse()


@pytest.fixture
def theft(tmp_path):
    """A private directory with a token and a socket of its own, and the socket of an attacker next to it."""
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / "victim" / "token").write_text("secret")
    (tmp_path / "evil").mkdir()
    thief = Thief(tmp_path / "evil" / "worker.sock")
    yield tmp_path, thief
    thief.server.stop(None).wait()


ATTACKS = {
    "escape read by gRPC": "victim/..%2Fevil%2Fworker.sock",
    "parent directory": "victim/../evil/worker.sock",
    "socket linked to that of the attacker": "victim/link.sock",
    "directory linked to the private one": "evil/linked/worker.sock",
    "directory of everybody": "evil/worker.sock",
    "no such directory": "none/worker.sock",
    "no socket": "victim/token",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_token_goes_only_to_a_socket_in_the_same_directory(theft, attack):
    """A client with the scope `worker` may register any address; the service reads the token of its own user there."""
    folder, thief = theft
    (folder / "victim" / "link.sock").symlink_to(folder / "evil" / "worker.sock")
    (folder / "evil" / "linked").symlink_to(folder / "victim")
    (folder / "evil" / "token").write_text("its own")
    worker = WorkerInfo(0, 42, f"unix:{folder / 'x'}".removesuffix("x") + ATTACKS[attack], 1, "cpu")
    with pytest.raises(Unavailable):
        asyncio.run(claims.claim_worker(worker, 5))
    assert not thief.got


def test_directory_replaced_during_a_claim_does_not_get_the_token(theft, monkeypatch):
    folder, thief = theft
    honest = Thief(folder / "victim" / "worker.sock")
    token_in = claims._token_in

    def read_and_replace(*place: Any) -> str:
        token = token_in(*place)
        (folder / "victim").rename(folder / "moved")
        (folder / "victim").symlink_to(folder / "evil")
        return token

    monkeypatch.setattr(claims, "_token_in", read_and_replace)
    try:
        asyncio.run(claims.claim_worker(WorkerInfo(0, 42, f"unix:{folder}/victim/worker.sock", 1, "cpu"), 5))
    finally:
        honest.server.stop(None).wait()
    assert (honest.got, thief.got) == (["secret"], [])


def test_worker_refuses_a_directory_that_grpc_reads_differently(tmp_path):
    with pytest.raises(InvalidArgument) as caught:
        RunDir(tmp_path / "a%2Fb")
    assert caught.value.field == "run_dir"
    assert not list(tmp_path.iterdir())
