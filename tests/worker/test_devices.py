"""Devices other than cuda:0, on a fake driver that records calls: every call runs with the right device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops import launch as launches
from kvplane_kernels.triton_ops.launch import Launch
from kvplane_worker.memory import cuda, use_device
from kvplane_worker.pages import PageMover


class Driver:
    """The part of the CUDA runtime that memory uses; `calls` has each call with the current device."""

    def __init__(self) -> None:
        self.current = 0
        self.calls: list[tuple[str, int]] = []

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def __getattr__(self, name: str):
        def call(*_: object) -> int | bytes:
            self.calls.append((name, self.current))
            return b"handle" if name == "ipcGetMemHandle" else 4096

        return call


@pytest.fixture
def driver(monkeypatch) -> Driver:
    made = Driver()
    runtime = SimpleNamespace(
        malloc=made.malloc,
        memset=made.memset,
        free=made.free,
        ipcGetMemHandle=made.ipcGetMemHandle,
        ipcOpenMemHandle=made.ipcOpenMemHandle,
        ipcCloseMemHandle=made.ipcCloseMemHandle,
        CUDARuntimeError=RuntimeError,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=made.device, runtime=runtime))
    monkeypatch.setattr(cuda, "_cupy", lambda: cupy)
    monkeypatch.setattr(cuda, "_allocation_base", made.cuMemGetAddressRange)
    monkeypatch.setattr(cuda, "_uuid", lambda index: f"gpu-{index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return made


@pytest.mark.parametrize("index", [0, 1, 3])
def test_cuda_memory_calls_run_on_its_device(driver, index):
    owned = cuda.CudaMemory.create(f"cuda:{index}", 100)
    mapped = cuda.CudaMemory.open(owned.handle)
    mapped.close()
    owned.close()
    calls = "malloc memset ipcGetMemHandle cuMemGetAddressRange ipcOpenMemHandle ipcCloseMemHandle free".split()
    assert driver.calls == [(name, index) for name in calls]


def test_lent_memory_is_not_freed(driver):
    owned = cuda.CudaMemory.create("cuda:2", 100)
    owned.close(lent=True)
    assert "free" not in dict(driver.calls)
    owned.close()
    assert driver.calls[-1] == ("free", 2)


def test_server_threads_use_the_worker_device(monkeypatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with ThreadPoolExecutor(1, "worker", use_device, ("cuda:3",)) as threads:
        threads.submit(lambda: None).result()
    use_device("cpu")
    assert chosen == [torch.device("cuda:3")]


class Event:
    """The part of a CUDA event that a page mover uses."""

    def __init__(self) -> None:
        self.stream, self.reached, self.waited = "", False, False

    def record(self, stream: str) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited = True


def test_page_mover_moves_follow_the_stream_of_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    pages: Any = SimpleNamespace(memory=SimpleNamespace(is_cuda=True, device=torch.device("cuda:2")))
    moves: Any = PageMover(pages, TorchOps()).moves()
    assert (moves.event.stream, moves.have_ended()) == ("current of cuda:2", False)
    moves.event.reached = True
    assert moves.have_ended()
    moves.wait()
    assert moves.event.waited


def test_page_mover_on_the_host_is_synchronous():
    pages: Any = SimpleNamespace(memory=torch.zeros(8, dtype=torch.uint8))
    assert PageMover(pages, TorchOps()).moves() is None


class OnDevice(torch.Tensor):
    """A tensor whose device is cuda:2."""

    device = torch.device("cuda:2")


class Pages(NamedTuple):
    """A tuple of kernel arguments."""

    rows: int
    memory: torch.Tensor


@pytest.mark.parametrize("now", [0, 2])
def test_launch_runs_on_the_device_of_its_tensors(monkeypatch, now):
    driver = Driver()
    driver.current = now
    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: driver.device(device.index))
    started: list[int] = []
    kernel = {(1,): lambda *_, num_warps: started.append(driver.current)}
    pinned, there = torch.zeros(1), torch.zeros(1).as_subclass(OnDevice)
    Launch(kernel, (1,), (3, pinned, Pages(1, there))).run()
    assert (started, driver.current) == ([2], now)


def test_launch_on_the_host_selects_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("there is no device"))
    started: list[int] = []
    Launch(
        {(1,): lambda *_, num_warps: started.append(num_warps)}, (1,), (torch.zeros(1), Pages(1, torch.ones(1)))
    ).run()
    assert started == [4]
    assert launches.device_of(()) == torch.device("cpu")
