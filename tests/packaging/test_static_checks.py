"""The checks of `make check` can fail: a fault planted in a copy of the tree is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT

pytestmark = pytest.mark.packaging

SOURCE_ROOTS = ("clients/python", "service", "gpu_worker")


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for root in SOURCE_ROOTS:
        shutil.copytree(ROOT / root, copy / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run_check(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(copy / root) for root in SOURCE_ROOTS)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def import_contracts(copy: Path) -> subprocess.CompletedProcess[str]:
    return run_check(copy, str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache")


def test_import_contracts_hold_for_the_copy(clean_copy):
    done = import_contracts(clean_copy)
    assert done.returncode == 0, done.stdout
    contracts = (clean_copy / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")
    assert f"Contracts: {contracts} kept, 0 broken." in done.stdout


CLIENT = "clients/python/kvplane"
BASE = "clients/python/kvplane/base"
SHELL = "service/kvplane_service"
CORE = "service/kvplane_core"
WORKER = "gpu_worker/kvplane_worker"
TOOLS = "service/kvplane_tools"
KERNELS = "gpu_worker/kvplane_kernels"
PLAN = "service/kvplane_plan/models"
FLEET = "service/kvplane_fleet/router"


@pytest.mark.parametrize(
    ("folder", "statement", "refused"),
    [
        (BASE, "import kvplane.v1.step_pb2", "kvplane.v1"),
        (BASE, "import socket", "socket"),
        (CLIENT, "import kvplane_service", "kvplane_service"),
        (CLIENT + "/session", "import kvplane.aio", "kvplane.aio"),
        (CLIENT + "/session", "import kvplane.unary", "kvplane.unary"),
        (CLIENT + "/session", "import time", "time"),
        (CLIENT + "/blocking", "import kvplane.aio", "kvplane.aio"),
        (CLIENT + "/wire", "import kvplane.rpc", "kvplane.rpc"),
        (WORKER, "import kvplane_service", "kvplane_service"),
        (SHELL, "import kvplane_worker", "kvplane_worker"),
        (CORE, "import kvplane.v1.step_pb2", "kvplane.v1"),
        (CORE, "import kvplane_service.shell_part", "kvplane_service"),
        (SHELL + "/replicas", "import kvplane_core.spec.replica", "kvplane_core.spec"),
        (SHELL + "/replicas", "import kvplane_service.unary", "kvplane_service.unary"),
        (SHELL + "/store", "import kvplane_service.telemetry", "kvplane_service.telemetry"),
        (TOOLS + "/replay", "import kvplane_tools.cli", "kvplane_tools.cli"),
        (WORKER + "/rpc", "import kvplane_worker.attach", "kvplane_worker.attach"),
        (KERNELS, "import kvplane_worker", "kvplane_worker"),
        (PLAN, "import kvplane_service.replicas", "kvplane_service"),
        (SHELL, "import kvplane_tools", "kvplane_tools"),
        (FLEET, "import kvplane_tools", "kvplane_tools"),
        (WORKER + "/engine", "import kvplane_worker.process", "kvplane_worker.process"),
        (KERNELS + "/torch_ops", "import kvplane_kernels.triton_ops", "kvplane_kernels.triton_ops"),
        (CORE + "/face", "import kvplane_core.spec.pool", "kvplane_core.spec"),
        (KERNELS, "import kvplane_core", "kvplane_core"),
        (CORE, "import random", "random"),
        (CORE, "import grpc", "grpc"),
    ],
)
def test_import_against_the_contracts_is_refused(folder, statement, refused, clean_copy):
    shell_part, planted = clean_copy / SHELL / "shell_part.py", clean_copy / folder / "planted.py"
    try:
        shell_part.write_text("")
        planted.write_text(f"{statement}\n")
        done = import_contracts(clean_copy)
    finally:
        shell_part.unlink()
        planted.unlink()
    assert done.returncode != 0
    assert f"is not allowed to import {refused}:" in " ".join(done.stdout.split())  # long lines are wrapped


def test_a_client_module_outside_the_rooms_is_refused(clean_copy):
    planted = clean_copy / CLIENT / "planted.py"
    try:
        planted.write_text("")
        done = import_contracts(clean_copy)
    finally:
        planted.unlink()
    assert done.returncode != 0
    assert "kvplane.planted" in done.stdout


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("ANN001", "def f(a) -> None:\n    return a\n"),
        ("D103", "def f() -> None:\n    return None\n"),
        ("B006", "def f(a: list[int] = []) -> None:\n    return None\n"),
        ("UP006", "from typing import List\n\nx: List[int] = []\n"),
        ("E501", f"x = '{'y' * 120}'\n"),
    ],
)
def test_ruff_refuses(code, content, clean_copy):
    planted = clean_copy / "clients/python/kvplane/planted.py"
    try:
        planted.write_text(content)
        done = run_check(clean_copy, sys.executable, "-m", "ruff", "check", "--no-cache", str(planted))
    finally:
        planted.unlink()
    assert done.returncode == 1
    assert code in done.stdout


def test_mypy_refuses_missing_types(clean_copy):
    planted = clean_copy / "clients/python/kvplane/planted.py"
    try:
        planted.write_text("def f(a):\n    return a\n\n\nx: int = f('')\n")
        done = run_check(clean_copy, sys.executable, "-m", "mypy", str(planted))
    finally:
        planted.unlink()
    assert done.returncode == 1
    assert "[no-untyped-def]" in done.stdout
    assert "[no-untyped-call]" in done.stdout
