"""Workers on a GPU, whose memory is shared by a raw CUDA IPC handle. Needs CUDA and CuPy."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplane.base.errors import OtherWriter
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import Orders
from kvplane.rank import Rank, RankGroup
from kvplane.v1 import worker_pb2 as pb
from kvplane_kernels.interface import GroupPages
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.attach import WorkerClient
from kvplane_worker.lending.rundir import read_token, run_dir_of
from kvplane_worker.memory import MemoryHandle, MemoryKind
from kvplane_worker.pages import PageMover
from kvplane_worker.rpc import wire
from tests.worker.rig import KILLS_ON_GPU, World
from tests.worker.test_ranks import PROMPT

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("cupy") is None, reason="there is no CUDA device, or no CuPy"
)


@pytest.fixture
def on_gpu(here: World) -> World:
    here.device = "cuda:0"
    return here


def free_bytes() -> int:
    return torch.cuda.mem_get_info(0)[0]


def checksums(address: str) -> list[int]:
    with WorkerClient(run_dir_of(address)) as client:
        request = pb.ChecksumRequest(token=read_token(run_dir_of(address)), group=0, blocks=range(8))
        return list(client.call("Checksum", request, pb.ChecksumResponse).checksums)


def test_cuda_handle_round_trips():
    handle = MemoryHandle(MemoryKind.CUDA_IPC, 5, "cuda:1", ipc=b"i" * 64, offset_bytes=512, device_uuid="u")
    assert wire.decode_handle(wire.encode_handle(handle)) == handle


@needs_gpu
def test_load_waits_for_zeroes_on_the_device():
    """The stream is kept busy, so that orders are queued and not yet done."""
    memory = torch.ones(8, 64, dtype=torch.uint8, device="cuda:0")
    pages: Any = SimpleNamespace(memory=memory, num_groups=1, group=lambda _: GroupPages((memory,)))
    table = StampTable.create(bytearray(table_bytes(8)), 8, incarnation=7)
    rank, group = Rank(table, PageMover(pages, TorchOps())), RankGroup([table])
    rank.claim(1)
    torch.cuda._sleep(1 << 30)  # cycles: longer than the next lines take on any machine
    rank.carry_out(1, 1, 0, Orders(zero_block=[3], zero_group=[0]))
    assert not group.may_load(1, 1, 0, 0)
    rank.synchronize()
    assert group.may_load(1, 1, 0, 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert memory[3].sum().item() == 0


@needs_gpu
def test_engine_and_worker_share_cuda_memory(on_gpu: World):
    _, address = on_gpu.worker()
    engine = on_gpu.engine()
    engine.do("attach", address)
    before = checksums(address)
    engine.do("fill", 0, 0, 3, 9)
    after = checksums(address)
    assert [block for block in range(8) if before[block] != after[block]] == [3]
    second = on_gpu.engine()
    assert isinstance(second.do("attach", address), OtherWriter)
    engine.kill()
    second.do("attach", address)
    assert second.do("look", 0, 0, 3) == {9}


@needs_gpu
def test_restarted_engine_keeps_its_cuda_cache(on_gpu: World):
    _, address = on_gpu.worker()
    first = on_gpu.engine()
    first.do("attach", address)
    first.do("open", on_gpu.service.address, "r")
    first.do("serve", 0, PROMPT)
    first.do("serve", 1, [7] * 20)
    first.kill()
    second = on_gpu.engine()
    second.do("attach", address)
    second.do("open", on_gpu.service.address, "r")
    assert second.do("serve", 0, PROMPT)[0] == 96


@needs_gpu
def test_killed_processes_release_cuda_memory(on_gpu: World):
    torch.cuda.init()

    def life() -> None:
        worker, address = on_gpu.worker()
        engine = on_gpu.engine()
        engine.do("attach", address)
        engine.kill()
        worker.kill()

    life()
    before = free_bytes()
    for _ in range(KILLS_ON_GPU):
        life()
    assert free_bytes() >= before - (2 << 20)
