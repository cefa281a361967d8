"""The link between device and host: merged runs, copies, the route table, and the choice of a route."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import FailedPrecondition
from kvplane_kernels.interface import GroupPages
from kvplane_kernels.triton_ops.backend import TritonOps
from kvplane_kernels.triton_ops.link import HostLink, link, routes
from kvplane_kernels.triton_ops.link.buffers import BufferRoute
from kvplane_kernels.triton_ops.link.copies import (
    FIRST_CUDA,
    HostCopies,
    installed_bindings,
    numbers,
    unfit_bindings,
    unfit_driver,
)
from kvplane_kernels.triton_ops.link.lanes import OneLane
from kvplane_kernels.triton_ops.link.runs import Runs, merged_runs
from tests.kernels import interpreter
from tests.kernels.copies_by_driver import copied_by

CPU = torch.device("cpu")


@pytest.fixture
def ops() -> TritonOps:
    interpreter.quicken()
    return TritonOps()


def pages_of(block_outermost: bool, num_blocks: int, widths: list[int]) -> GroupPages:
    """Layers in either layout."""
    room = torch.randint(0, 256, (num_blocks * sum(widths),), dtype=torch.uint8)
    if block_outermost:
        return GroupPages(tuple(room.view(num_blocks, -1).split(widths, dim=1)))
    parts = room.split([num_blocks * width for width in widths])
    return GroupPages(tuple(part.view(num_blocks, width) for part, width in zip(parts, widths, strict=True)))


def rows_of(group: GroupPages, blocks: list[int]) -> torch.Tensor:
    return torch.cat([layer[blocks] for layer in group.layers], dim=1)


# Consecutive blocks, then others.
BLOCKS = st.lists(st.sampled_from([[0], [3], [6, 5], [1, 2], [4, 5, 6], [2, 2]]), max_size=4).map(
    lambda parts: [block for part in parts for block in part]
)


@given(
    st.booleans(), st.lists(st.sampled_from([16, 48, 4, 0]), min_size=1, max_size=4), BLOCKS, st.sampled_from([0, 16])
)
def test_merged_runs_cover_every_byte_once(block_outermost, widths, blocks, padding):
    group = pages_of(block_outermost, 7, widths)
    room = torch.zeros((len(blocks), group.bytes_per_block + padding), dtype=torch.uint8)
    staging, times = room[:, : group.bytes_per_block], torch.zeros_like(room)
    runs = merged_runs(group, blocks, staging)
    for page, row, size in zip(runs.pages, runs.rows, runs.sizes, strict=True):
        HostCopies().copy_runs([page], [row], [size], 0)
        times.view(-1)[row - room.data_ptr() :][:size] += 1
    assert torch.equal(staging, rows_of(group, blocks))
    assert (times[:, : group.bytes_per_block] == 1).all()
    assert not times[:, group.bytes_per_block :].any()
    ends = zip(runs.pages, runs.rows, runs.sizes, strict=True)
    follows = {(page + size, row + size) for page, row, size in ends}
    assert not follows & set(zip(runs.pages, runs.rows, strict=True))
    assert min(runs.sizes, default=1) > 0


def test_adjacent_fragments_form_one_run():
    staging = torch.zeros((4, 48), dtype=torch.uint8)
    together, apart = (pages_of(outermost, 8, [16, 32]) for outermost in (True, False))
    assert merged_runs(together, [2, 3, 4, 6], staging).sizes == [144, 48]
    assert merged_runs(together, [3, 2, 4, 5], staging).sizes == [48, 48, 96]
    assert merged_runs(apart, [2, 3, 4, 6], staging).sizes == [16, 32] * 4


# ---- copies: one contract for HostCopies and DriverCopies


def wanted_copies() -> dict[str, bool]:
    """The cases of `copies_by_driver`, all passed."""
    return dict.fromkeys(["copies of many sizes", "no copies", "more copies than go at once"], True)


def test_host_copies_copy_all_runs():
    assert copied_by(HostCopies(), stream=0) == wanted_copies()


@pytest.mark.skipif(not installed_bindings(), reason="cuda-bindings is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to compile the fake driver")
def test_driver_copies_pass_all_runs_to_the_driver(tmp_path):
    """DriverCopies through the installed cuda-bindings, on a fake driver in C that copies on the host."""
    source, library = Path(__file__).with_name("driver_stub.c"), tmp_path / "libcuda.so.1"
    version = max(FIRST_CUDA, (numbers(installed_bindings())[0], 0))
    define = f"-DCUDA_VERSION={version[0] * 1000 + version[1] * 10}"
    subprocess.run(["gcc", "-shared", "-fPIC", define, "-o", library, source], check=True)
    command = [sys.executable, "-m", "tests.kernels.copies_by_driver"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"why_not": "", **wanted_copies(), "the default stream is refused": True}


def test_unfit_bindings_and_drivers_are_named():
    assert "cuda-bindings is not installed" in unfit_bindings("")
    assert unfit_bindings("12.6.2") == "cuda-bindings 12.6.2 is older than 12.8"
    assert unfit_bindings("12.8.0") == unfit_bindings("13.5.0") == ""
    assert unfit_driver("12.9.1", (12, 8)) == unfit_driver("12.9.1", (13, 0)) == unfit_driver("13.5.0", (13, 0)) == ""
    assert unfit_driver("12.9.1", (12, 4)) == "the driver supports CUDA 12.4, cuda-bindings 12.9.1 needs 12.8"
    assert unfit_driver("13.5.0", (12, 9)) == "the driver supports CUDA 12.9, cuda-bindings 13.5.0 needs 13.0"


# ---- route table and choice


class Track:
    """A clock that both routes advance by the time that they would take on a GPU."""

    def __init__(self, batched_s, buffered_s) -> None:
        self.now_s, self.costs = 0.0, {"batched": batched_s, "buffered": buffered_s}
        self.taken: list[str] = []

    def now(self) -> float:
        return self.now_s

    def route(self, name: str) -> routes.Route:
        return TrackedRoute(self, name)

    def take(self, name: str, runs: Runs) -> None:
        self.taken.append(name)
        self.now_s += self.costs[name](len(runs.sizes), runs.mean_bytes)


class TrackedRoute:
    def __init__(self, track: Track, name: str) -> None:
        self.track, self.name = track, name

    def save(self, group, blocks, staging) -> None:
        self.track.take(self.name, merged_runs(group, blocks, staging))

    load = save


def cliff(count: int, run_bytes: int) -> float:
    """Published measurements: slow below 28 KiB."""
    return count * run_bytes / (5e9 if run_bytes < 28 << 10 else 50e9)


def steady(count: int, run_bytes: int) -> float:
    return 30e-6 + count * run_bytes / 48e9


def tables(batched_s, buffered_s) -> tuple[Track, routes.RouteTable, routes.RouteTable]:
    track = Track(batched_s, buffered_s)
    watch = routes.Stopwatch(track.now, lambda: None)
    return track, *routes.measured(CPU, track.route("batched"), track.route("buffered"), watch)


def test_route_table_finds_where_batched_copies_become_slower():
    track, to_host, to_device = tables(cliff, steady)
    assert [cell.run_bytes for cell in to_host.cells] == [cell.run_bytes for cell in to_device.cells]
    assert [cell.count for cell in to_host.cells if cell.run_bytes == 4096] == [16, 64, 256]
    assert to_host.prefers_batches(64 << 10, 256)
    assert to_host.prefers_batches(1 << 20, 5000)
    assert not to_host.prefers_batches(8 << 10, 256)
    assert not to_host.prefers_batches(4 << 10, 100_000)
    assert to_host.prefers_batches(4 << 10, 1)  # the start of 30 microseconds takes longer than one slow copy
    assert track.now_s < routes.BUDGET_S
    assert f"64 x 64 KiB {64 * 65536 / 1e9 / cliff(64, 65536):.1f}/" in to_host.text


def test_delayed_run_does_not_decide_for_a_route():
    spent = iter([7.0, 1.5, 60.0, 2.0])
    times = [0.0]
    watch = routes.Stopwatch(lambda: times[-1], lambda: times.append(times[-1] + next(spent)))
    assert watch.seconds(lambda: None) == 1.5


def test_measurement_of_a_slow_link_ends_early():
    _, to_host, to_device = tables(lambda *_: 0.1, lambda *_: 0.2)
    assert len(to_host.cells) == len(to_device.cells) == 1
    assert to_host.prefers_batches(1 << 20, 7)


def host_link(ops: TritonOps, track: Track | None = None) -> HostLink:
    """A link with both routes on the host; with a track, it uses the track's clock."""
    made = HostLink(CPU, partial(ops._stage, background=True), track.now if track else lambda: 0.0)
    if track:
        made.batched = Pushed(track, "batched", made.batched)  # type: ignore[assignment]
        made.buffered = Pushed(track, "buffered", made.buffered)
    return made


class Pushed:
    """A real route that also advances a track."""

    def __init__(self, track: Track, name: str, real: Any) -> None:
        self.track, self.name, self.real = track, name, real

    def save(self, group, blocks, staging) -> None:
        self.track.take(self.name, merged_runs(group, blocks, staging))
        self.real.save(group, blocks, staging)

    def load(self, group, blocks, staging) -> None:
        self.track.take(self.name, merged_runs(group, blocks, staging))
        self.real.load(group, blocks, staging)

    def copy(self, direction, runs, staging) -> None:
        self.track.take(self.name, runs)
        self.real.copy(direction, runs, staging)


@pytest.mark.parametrize("block_outermost", [True, False])
def test_link_uses_the_faster_route(ops, monkeypatch, block_outermost):
    monkeypatch.setattr(routes, "COUNTS", (4,))
    monkeypatch.setattr(routes, "RUN_BYTES", (4 << 10, 64 << 10))
    track = Track(cliff, lambda count, run_bytes: count * run_bytes / 20e9)
    moved = host_link(ops, track)
    group = pages_of(block_outermost, 64, [1024] * 40)
    blocks = list(range(1, 63, 2))[::-1]  # no consecutive blocks
    rows = torch.zeros((len(blocks), group.bytes_per_block), dtype=torch.uint8)
    moved.save(group, blocks, rows)
    assert torch.equal(rows, rows_of(group, blocks))
    want = "batched" if block_outermost else "buffered"  # runs of 40 KiB, or of 1
    assert track.taken[-1] == want
    rows = torch.randint(0, 256, rows.shape, dtype=torch.uint8)
    moved.load(group, blocks, rows)
    assert torch.equal(rows, rows_of(group, blocks))
    assert track.taken[-1] == want
    way = f"batched, {len(blocks)} runs of 40960" if block_outermost else f"buffered, {40 * len(blocks)} runs of 1024"
    out, back = moved.explained
    assert out.startswith(f"host link to the host: last {way} bytes; measured, GB/s batched/buffered: 4 x 4 KiB ")
    assert back.startswith(f"host link to the device: last {way} bytes; measured")


def test_link_without_batched_copies_uses_buffers_and_explains_it(ops, monkeypatch):
    monkeypatch.setattr(link, "copies_for", lambda device: (None, "cuda-bindings 12.6 is older than 12.8"))
    moved, group = host_link(ops), pages_of(True, 6, [64, 2048])
    rows = torch.zeros((3, group.bytes_per_block), dtype=torch.uint8)
    moved.save(group, [5, 1, 3], rows)
    assert torch.equal(rows, rows_of(group, [5, 1, 3]))
    assert moved.explained == ("host link, buffered route only: cuda-bindings 12.6 is older than 12.8",)


class Refused:
    def copy_runs(self, sources, targets, sizes, stream) -> None:
        raise FailedPrecondition("cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED")


def test_link_uses_buffers_when_the_driver_refuses_batched_copies(ops, monkeypatch):
    monkeypatch.setattr(link, "copies_for", lambda device: (Refused(), ""))
    moved, group = host_link(ops), pages_of(True, 6, [64, 2048])
    rows = torch.randint(0, 256, (3, group.bytes_per_block), dtype=torch.uint8)
    moved.load(group, [5, 1, 3], rows)
    assert torch.equal(rows, rows_of(group, [5, 1, 3]))
    assert moved.explained == ("host link, buffered route only: cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED",)


@pytest.mark.parametrize("buffer_bytes", [1, 5000, 1 << 20])
def test_buffered_route_splits_blocks_into_pieces(ops, buffer_bytes):
    group = pages_of(False, 6, [64, 2048])
    route = BufferRoute(CPU, partial(ops._stage, background=True), OneLane(), buffer_bytes)
    rows = torch.zeros((4, group.bytes_per_block), dtype=torch.uint8)
    route.save(group, [5, 1, 3, 1], rows)
    assert torch.equal(rows, rows_of(group, [5, 1, 3, 1]))
    route.load(group, [2, 4, 1, 5], rows)
    assert torch.equal(rows, rows_of(group, [2, 4, 1, 5]))
