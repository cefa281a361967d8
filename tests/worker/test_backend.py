"""The backend of a worker's operations: chosen at its start, shown by Describe, refused where it cannot work."""

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


def test_describe_says_which_and_why(here: World):
    _, address = here.worker()
    with WorkerClient(run_dir_of(address)) as client:
        told = client.call("Describe", pb.DescribeRequest(), pb.DescribeResponse)
    choice = choose("cpu")
    assert told.backend == choice.ops.name
    assert tuple(told.backend_reasons) == choice.reasons


def test_an_unknown_backend_is_refused_before_anything_is_taken(here: World):
    options = replace(here.options(), backend="none")
    with pytest.raises(InvalidArgument, match="no backend is named 'none'"):
        WorkerProcess(options)
    assert options.run_dir is not None
    assert not options.run_dir.exists()
