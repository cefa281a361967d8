"""Attach: pages are lent to one process of the same user, without a copy, until that process exits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvplane.base.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OtherWriter,
    PermissionDenied,
    StaleEpoch,
    WrongPlan,
)
from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.attach import WorkerClient, attach, describe, read_stamps
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import RunDir, read_token, run_dir_of
from kvplane_worker.lending.writer import ProcessName, Writer
from tests.worker.rig import BLOCKS, Child, World, open_files, refusal

NOBODY = 65534


class Lent:
    """A worker, with a client of its calls."""

    def __init__(self, here: World) -> None:
        self.world = here
        self.worker, self.address = here.worker()
        self.client = WorkerClient(run_dir_of(self.address))
        self.token = read_token(run_dir_of(self.address))

    def describe(self) -> pb.DescribeResponse:
        return describe(self.address)

    def checksums(self, group: int = 0) -> list[int]:
        request = pb.ChecksumRequest(token=self.token, group=group, blocks=range(BLOCKS))
        return list(self.client.call("Checksum", request, pb.ChecksumResponse).checksums)

    def transfer(self, **fields) -> pb.TransferResponse:
        request = pb.TransferRequest(**{"token": self.token, "epoch": 1, "seq": 1, **fields})
        return self.client.call("Transfer", request, pb.TransferResponse)

    def claim(self, epoch: int, token: str | None = None) -> pb.ClaimResponse:
        request = pb.ClaimRequest(token=self.token if token is None else token, epoch=epoch)
        return self.client.call("Claim", request, pb.ClaimResponse)

    def ask(self, **fields) -> pb.AttachResponse:
        request = pb.AttachRequest(**{"token": self.token, **fields})
        return self.client.call("Attach", request, pb.AttachResponse)

    def state(self) -> tuple[object, ...]:
        """Everything that a refusal must not change."""
        described = self.describe()
        described.ClearField("free_bytes")
        return (
            *self.checksums(0),
            *self.checksums(1),
            described.SerializeToString(),
            read_stamps(self.address).read_all(),
        )


@pytest.fixture
def lent(here: World):
    it = Lent(here)
    it.claim(1)
    with it.client:
        yield it


@pytest.fixture
def attached(lent: Lent):
    with attach(lent.address) as it:
        yield it


def test_attach_maps_the_same_memory(lent: Lent, attached: Holdings):
    empty = lent.checksums()
    attached.stamps.begin(1, 0)  # the admission whose pages are written
    attached.stamps.finish()
    attached.buffers.attention("f.0").k[3] = 1.5
    written = lent.checksums()
    assert [block for block in range(BLOCKS) if written[block] != empty[block]] == [3]
    lent.transfer(kind="TRANSFER_KIND_COPY", group=0, blocks=[3], dst_blocks=[5])
    assert (attached.buffers.attention("f.0").k[5] == 1.5).all()
    lent.transfer(kind="TRANSFER_KIND_ZERO", group=0, blocks=[3])
    assert attached.buffers.attention("f.0").k[3].count_nonzero() == 0
    attached.stamps.write([5], [77])
    assert read_stamps(lent.address).read(5) == 77


def test_attach_supports_block_outermost_layout(here: World):
    here.register("blocks", block_outermost=True)
    _, address = here.worker(replica="blocks")
    with attach(address) as attached:
        attached.buffers.attention("f.1").v[3] = 2.0
        page = attached.buffers.memory[3 * 512 : 4 * 512]  # all layers of block 3
        assert page[: 256 + 128].count_nonzero() == 0
        assert page[256 + 128 :].count_nonzero() == 64
        with WorkerClient(run_dir_of(address)) as client:
            request = pb.ChecksumRequest(token=read_token(run_dir_of(address)), blocks=[2, 3])
            sums = client.call("Checksum", request, pb.ChecksumResponse).checksums
    assert sums[0] != sums[1]


def test_attached_pages_have_plan_stamps_and_staging(lent: Lent, attached: Holdings):
    described = lent.describe()
    assert attached.plan.digest() == described.worker.plan_digest
    assert attached.stamps.incarnation == attached.buffers.read_incarnation() == described.worker.incarnation
    assert attached.stamps.num_blocks == attached.buffers.num_blocks == BLOCKS
    assert described.attached_pid == os.getpid()


def test_repeated_attach_leaks_no_descriptors(lent: Lent):
    attach(lent.address).close()
    before = open_files()
    for where in (lent.address, run_dir_of(lent.address), str(run_dir_of(lent.address))):
        attach(where).close()
    assert open_files() == before


def test_pages_are_lent_until_the_process_exits(lent: Lent):
    first, second = lent.world.engine(), lent.world.engine()
    incarnation, _ = first.do("attach", lent.address)
    first.do("fill", 0, 0, 4, 9)
    before = lent.state()
    error = second.do("attach", lent.address)
    assert (type(error), error.metadata) == (OtherWriter, {"pid": str(first.pid)})
    assert lent.state() == before
    first.kill()
    assert second.do("attach", lent.address) == (incarnation, 1)
    assert second.do("look", 0, 0, 4) == {9}
    assert lent.describe().attached_pid == second.pid


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
def test_attach_of_another_user_is_refused(lent: Lent):
    before = lent.state()
    other_user = lent.world.engine(NOBODY)
    error = other_user.do("attach", lent.address)
    assert (type(error), error.field) == (PermissionDenied, "run_dir")
    assert str(NOBODY) in str(error)
    assert lent.state() == before


def test_invalid_attach_changes_nothing(lent: Lent):
    before = lent.state()
    for fields, kind, field in (
        ({"token": "guessed"}, PermissionDenied, "token"),
        ({"token": ""}, PermissionDenied, "token"),
        ({"plan_digest": "another"}, WrongPlan, "plan_digest"),
    ):
        error = refusal(lambda fields=fields: lent.ask(**fields))
        assert (type(error), error.field) == (kind, field)
    assert lent.state() == before
    assert lent.describe().attached_pid == 0


def test_attach_without_a_worker_is_not_found(tmp_path: Path):
    assert isinstance(refusal(attach, tmp_path), NotFound)
    assert isinstance(refusal(attach, f"unix:{tmp_path}/none/worker.sock"), NotFound)


def test_attach_refuses_memory_of_another_incarnation(lent: Lent, attached: Holdings):
    attached.buffers.write_incarnation(5)
    error = refusal(attach, lent.address)
    assert (type(error), error.field) == (FailedPrecondition, "incarnation")


def test_owner_epoch_never_decreases(lent: Lent):
    assert len(lent.claim(7).stamps) == 8 * BLOCKS
    assert lent.describe().worker.owner_epoch == 7
    before = lent.state()
    for epoch in (6, 7):  # two services may choose the same number for two engine lives
        error = refusal(lent.claim, epoch)
        assert (type(error), error.metadata) == (StaleEpoch, {"epoch": "7"})
    assert isinstance(refusal(lent.claim, 0), InvalidArgument)
    assert isinstance(refusal(lent.claim, 8, "guessed"), PermissionDenied)
    assert lent.state() == before
    assert isinstance(refusal(lambda: lent.transfer(kind="TRANSFER_KIND_ZERO", blocks=[1], epoch=6)), StaleEpoch)


# ---- writer and run_dir


def test_writer_is_free_once_its_process_exited(here: World):
    writer, first, second = Writer(), here.engine(), here.engine()
    writer.lend(ProcessName.of(first.pid))
    writer.lend(ProcessName.of(first.pid))
    assert writer.pid == first.pid
    assert refusal(writer.lend, ProcessName.of(second.pid)).metadata == {"pid": str(first.pid)}
    first.kill()
    assert writer.pid == 0
    writer.lend(ProcessName.of(second.pid))
    before = open_files()
    writer.close()
    assert (writer.pid, open_files()) == (0, before - 1)


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/run"])
def test_run_dir_that_cannot_be_made_is_refused(tmp_path: Path, place: str):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="cannot be made: ") as refused:
        RunDir(tmp_path / place)
    assert refused.value.field == "run_dir"


def test_run_dir_in_use_is_not_cleaned(tmp_path: Path):
    mine = RunDir(tmp_path / "r")
    mine.write_state(5)
    left = mine.shared_path("pages")
    left.touch()
    assert refusal(RunDir, tmp_path / "r").metadata["pid"] == str(os.getpid())
    assert left.exists()
    assert (tmp_path / "r" / "token").read_text() == mine.token
    mine.leave()
    assert not left.exists()
    RunDir(tmp_path / "r").leave()


def test_run_dir_of_a_killed_worker_is_cleaned_and_its_pid_is_known(tmp_path: Path, here: World):
    child: Child
    child, address = here.worker()
    child.kill()
    path = run_dir_of(address)
    again = RunDir(path)
    assert again.last is not None
    assert again.last.pid == child.pid
    assert not (path / "worker.sock").exists()
    again.leave()


def test_run_dir_too_long_for_a_socket_is_refused(tmp_path: Path):
    error = refusal(RunDir, tmp_path / ("x" * 100))
    assert (type(error), error.field) == (InvalidArgument, "run_dir")
