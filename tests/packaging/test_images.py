"""The Dockerfiles: their install steps in an empty environment, their entry points as an unprivileged user.

No image is built: the base image is not here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

import kvplane
from kvplane.base.sources import LayerSource
from tests.packaging.environments import ROOT
from tests.packaging.images import WRITTEN, Image, built, instructions, unprivileged
from tests.plan.layers import full, named

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(400)]

NAMES = ("service", "worker")
# CMD listens on all addresses, at fixed ports; here, on one that no other process of tests uses (its id has 22 bits).
HERE = f"127.{64 + (os.getpid() >> 16)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
# What an engine asks of a worker, without numpy, which the image has not.
MOVES = """
import importlib.util, pathlib, sys
from kvplane.v1 import worker_pb2 as pb
from kvplane_worker.lending.rundir import read_token
from kvplane_worker.attach import WorkerClient

assert importlib.util.find_spec("numpy") is None
place = pathlib.Path(sys.argv[1])
with WorkerClient(place) as client:
    token, blocks = read_token(place), range(1, 9)
    client.call("Claim", pb.ClaimRequest(token=token, epoch=1), pb.ClaimResponse)
    kept = dict(token=token, epoch=1, kind="TRANSFER_KIND_GATHER", blocks=blocks, expected_stamps=[0] * 7 + [5])
    moved = client.call("Transfer", pb.TransferRequest(**kept), pb.TransferResponse)
    sums = client.call("Checksum", pb.ChecksumRequest(token=token, blocks=blocks), pb.ChecksumResponse)
print(list(moved.stamps), list(moved.discarded), len(set(sums.checksums)))
"""
LAYERS = LayerSource(layers=named(f=(2, full())), num_blocks=64, max_model_len=256, max_batched_tokens=256)


@pytest.fixture(scope="module")
def service():
    with built("service") as image:
        yield image


@pytest.fixture(scope="module")
def served(service):
    """The service as its CMD starts it."""
    process = service.start([word.replace("0.0.0.0", HERE) for word in service.command()])
    assert process.stdout is not None
    line = process.stdout.readline()
    assert f"serving on {HERE}:7070" in line, line + process.stdout.read()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("name", NAMES)
def test_image_is_pinned_and_runs_without_root(name):
    lines = instructions(name)
    arguments = dict(rest.partition("=")[::2] for word, rest in lines if word == "ARG")
    assert arguments["PYTHON_DIGEST"] == ""  # set at build time
    assert re.fullmatch(r"3\.\d+-slim-\w+", arguments["PYTHON_TAG"])
    stages = [rest for word, rest in lines if word == "FROM"]
    assert len(stages) == 2
    assert all("python:${PYTHON_TAG}${PYTHON_DIGEST}" in stage for stage in stages)
    last = lines[lines.index(("FROM", stages[1])) :]
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/kvplane /opt/kvplane"]
    assert not any(word == "RUN" for word, _ in last)
    values = yaml.safe_load((ROOT / "helm" / "kvplane" / "values.yaml").read_text())["podSecurityContext"]
    assert Image(name, Path()).said("USER") == f"{values['runAsUser']}:{values['runAsGroup']}"


@pytest.mark.parametrize("name", NAMES)
def test_copied_paths_are_not_ignored(name):
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [rest.split()[:-1] for word, rest in instructions(name) if word == "COPY" and "--from" not in rest]
    assert {source for sources in copied for source in sources} <= allowed


def test_service_image_runs_unprivileged_and_drains(service, served):
    assert service.run("kvplane", "health", f"{HERE}:7071", "--name", "readiness") == "serving\n"
    status = Path(f"/proc/{served.pid}/status").read_text()
    user = unprivileged().get("user", os.getuid())
    assert re.findall(r"^Uid:\s+(\d+)", status, re.MULTILINE) == [str(user)]
    assert user != 0
    written = service.place("/opt/kvplane")
    touched = subprocess.run(["touch", str(written / "x")], check=False, capture_output=True, **unprivileged())
    assert touched.returncode != 0 or not unprivileged()


def test_service_image_has_the_programs_of_the_chart(service, served):
    script = (ROOT / "helm" / "kvplane" / "files" / "try.py").read_text()
    variables = "import os; os.environ.update(REFLECTION='on', REPLICA_PREFIX='')\n"
    said = service.run("python", "-c", variables + script, f"{HERE}:7070", f"{HERE}:7071")
    assert "32 of 33 tokens hit again" in said
    assert service.run("python", "-c", "import redis, uvloop, opentelemetry.sdk, opentelemetry.exporter.otlp") == ""
    assert "lease_ms" in service.run("kvplane", "config")


def test_worker_image_serves_pages_unprivileged(served):
    known = ("torch",)
    with built("worker", known, EXTRA="worker") as image, kvplane.connect(f"{HERE}:7070") as client:
        client.register_replica("r", LAYERS)
        run_dir = f"{WRITTEN}/rank-0"
        where = ("--service", f"{HERE}:7070", "--replica", "r", "--run-dir", image.placed(run_dir))
        process = image.start(image.command("worker", *where, "--device", "cpu"))
        try:
            assert process.stdout is not None
            output = ""
            while "pages at" not in output and (line := process.stdout.readline()):
                output += line
            assert output.endswith(f"kvplane: pages at unix:{image.place(run_dir)}/worker.sock\n"), output
            assert image.run("kvplane", "health", f"unix:{image.place(run_dir)}/worker.sock") == "serving\n"
            assert [one.device for one in client.describe_replica("r").workers] == ["cpu"]
            assert image.run("python", "-W", "ignore", "-c", MOVES, image.placed(run_dir)) == f"{[0] * 8} [7] 1\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()


def test_service_image_exits_cleanly(served):
    served.send_signal(signal.SIGTERM)
    said, _ = served.communicate(timeout=60)
    assert served.returncode == 0
    assert said.rstrip().endswith("drained")
