"""The backend of a worker: chosen at start, returned by Describe, refused where it does not exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.lending.rundir import run_dir_of
from kvplane_worker.ops.select import choose
from kvplane_worker.process import WorkerProcess
from kvplane_worker.rpc.client import WorkerClient
from tests.worker.rig import World


def test_describe_returns_the_backend_and_its_reasons(here: World):
    _, address = here.worker()
    with WorkerClient(run_dir_of(address)) as client:
        described = client.call("Describe", pb.DescribeRequest(), pb.DescribeResponse)
    choice = choose("cpu")
    assert described.backend == choice.ops.name
    assert tuple(described.backend_reasons) == choice.reasons


def test_unknown_backend_is_refused_before_the_run_dir_is_created(here: World):
    options = replace(here.options(), backend="none")
    with pytest.raises(InvalidArgument, match="there is no backend 'none'"):
        WorkerProcess(options)
    assert options.run_dir is not None
    assert not options.run_dir.exists()
