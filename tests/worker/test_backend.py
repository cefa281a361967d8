"""The backend of a worker: chosen at start, returned by Describe, refused where it does not exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.interface import PAGE_OPERATIONS, WarmUp
from kvplane_kernels.select import choose
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.attach import describe
from kvplane_worker.lending.rundir import RunDir
from kvplane_worker.process import WorkerProcess
from tests.worker.rig import World


def test_describe_returns_the_backend_and_its_reasons(here: World):
    _, address = here.worker()
    described = describe(address)
    choice = choose("cpu", operations=PAGE_OPERATIONS)
    assert described.backend == choice.ops.name
    assert tuple(described.backend_reasons) == choice.reasons


def test_unknown_backend_is_refused_and_leaves_the_rank_unlocked(here: World):
    options = replace(here.options(), backend="none")
    with pytest.raises(InvalidArgument, match="there is no backend 'none'"):
        WorkerProcess(options)
    assert options.run_dir is not None
    assert {path.name for path in options.run_dir.iterdir()} == {"lock"}
    RunDir(options.run_dir).leave()


def test_worker_compiles_the_kernels_of_its_pages_before_it_is_ready(here: World, monkeypatch):
    asked = []

    def warm_up(self: TorchOps, groups: Any, operations: Any, layers: Any = ()) -> WarmUp:
        asked.append(([group.bytes_per_block for group in groups], tuple(operations), here.shown()))
        return WarmUp(("move_pages",), 0.5)

    monkeypatch.setattr(TorchOps, "warm_up", warm_up)
    process = WorkerProcess(here.options())
    try:
        process.start()
        (shown,) = here.shown()
    finally:
        process.close()
    ((widths, operations, registered),) = asked
    assert widths == [512, 512]
    assert operations == PAGE_OPERATIONS
    assert [worker.state for worker in registered] != [shown.state], "it was not ready yet"
