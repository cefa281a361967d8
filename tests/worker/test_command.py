"""`kvplane worker` as a person starts it."""

from __future__ import annotations

import signal

from kvplane_worker.attach import attach
from tests.cli.processes import LIMIT_S, run_kvplane, running
from tests.worker.rig import World


def test_a_worker_by_command(here: World):
    run_dir = here.folder / "by hand"
    where = ("--service", here.service.address, "--replica", "r", "--run-dir", run_dir)
    with running("worker", *where, "--grace-s", "0") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"kvplane: pages at unix:{run_dir}/worker.sock\n"
        attach(run_dir).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert here.shared_files() == set()


def test_a_refusal_is_one_line(here: World):
    done = run_kvplane("worker", "--service", here.service.address, "--replica", "r", "--device", "tpu")
    assert done.returncode == 2
    assert done.stderr.startswith("kvplane: device: 'tpu': no device is called so")
    assert "Traceback" not in done.stderr


def test_replicas_are_listed_with_their_workers(here: World):
    child, address = here.worker()
    here.register("idle", num_ranks=2)
    done = run_kvplane("replicas", "--service", here.service.address)
    idle, used, worker = done.stdout.splitlines()
    assert idle == "idle  idle  epoch 1  63 of 64 blocks free  0 of 2 ranks have a worker"
    assert used == "r  idle  epoch 1  63 of 64 blocks free  1 of 1 ranks have a worker"
    incarnation = f"{here.shown()[0].incarnation:016x}"
    assert worker == f"  rank 0  ready  cpu  process {child.pid}  incarnation {incarnation}  {address}"
