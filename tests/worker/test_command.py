"""The command `kvplane worker`."""

from __future__ import annotations

import os
import signal

from typer.testing import CliRunner

from kvplane.base.errors import InvalidArgument
from kvplane_tools.cli import app, exit_code
from kvplane_tools.cli.options import WRONG_USE
from kvplane_worker.attach import attach
from tests.cli.processes import LIMIT_S, run_kvplane, running
from tests.worker.rig import World


def test_worker_command_serves_until_signals(here: World):
    run_dir = here.folder / "by hand"
    where = ("--service", here.service.address, "--replica", "r", "--run-dir", run_dir)
    with running("worker", *where) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"kvplane: pages at unix:{run_dir}/worker.sock\n"
        attach(run_dir).close()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while f"waiting for engine {os.getpid()}" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert here.shared_files() == set()


def test_worker_command_refuses_a_missing_device(here: World):
    arguments = ["worker", "--service", here.service.address, "--replica", "r", "--device", "tpu"]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, InvalidArgument)
    assert str(error).startswith("device: pages cannot be on the device 'tpu': not a device name")
    assert exit_code(error) == WRONG_USE


def test_worker_command_takes_the_service_from_the_environment(here: World):
    arguments, variable = ["worker", "--replica", "r", "--device", "tpu"], {"KVPLANE_SERVICE": here.service.address}
    without = CliRunner().invoke(app, arguments).exception
    assert str(without).startswith("--service: a worker gets its memory layout from a service or from its engine")
    assert isinstance(CliRunner().invoke(app, arguments, env=variable).exception, InvalidArgument)


def test_describe_command_lists_workers(here: World):
    child, address = here.worker()
    here.register("idle", num_ranks=2)
    assert "workers: none for 2 ranks" in run_kvplane("describe", "idle", "--service", here.service.address).stdout
    lines = run_kvplane("describe", "r", "--service", here.service.address).stdout.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.startswith("RANK  WORKER"))
    shown = here.shown()[0]
    expected = ["0", "ready", "cpu", str(child.pid), f"{shown.incarnation:016x}", str(shown.owner_epoch), address]
    assert lines[heading + 1].split() == expected


def test_worker_with_wait_starts_once_the_replica_is_registered(here: World):
    run_dir = here.folder / "early"
    where = ("--service", here.service.address, "--replica", "late", "--run-dir", run_dir)
    assert run_kvplane("worker", *where).returncode == WRONG_USE
    with running("worker", *where, "--wait") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "waiting" not in process.stderr.readline():
            assert process.poll() is None
        here.register("late")
        assert process.stdout.readline() == f"kvplane: pages at unix:{run_dir}/worker.sock\n"
        assert run_kvplane("health", f"unix:{run_dir}/worker.sock").stdout == "serving\n"


def test_worker_with_wait_exits_on_a_signal(here: World):
    where = ("--service", here.service.address, "--replica", "never", "--run-dir", here.folder / "early")
    with running("worker", *where, "--wait") as process:
        assert process.stderr is not None
        while "waiting" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == WRONG_USE
