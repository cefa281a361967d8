"""The wheel: its content, its requirements, and that the base install is the client only."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.environments import QUIET_PIP, ROOT, base_requirements

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

PACKAGES = {
    "kvplane",
    "kvplane_core",
    "kvplane_fleet",
    "kvplane_kernels",
    "kvplane_plan",
    "kvplane_service",
    "kvplane_sglang",
    "kvplane_tools",
    "kvplane_vllm",
    "kvplane_worker",
}

# Imports every module of the client, and prints loaded modules that an engine must not load.
LOADED_BY_THE_CLIENT = """
import importlib, pkgutil, sys
import kvplane
heavy = "torch cupy typer rich redis uvloop pydantic yaml opentelemetry kvplane_service".split()
names = [m.name for m in pkgutil.walk_packages(kvplane.__path__, "kvplane.")]
for name in names:
    importlib.import_module(name)
print(len(names), *(name for name in heavy if name in sys.modules))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [*QUIET_PIP, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True)
    return next(folder.glob("kvplane-*.whl"))


@pytest.fixture(scope="module")
def empty_environment(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that holds the wheel with its base dependencies."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    subprocess.run([*QUIET_PIP, "--python", str(python), "install", str(wheel)], check=True)
    return python


def test_wheel_has_the_typed_packages_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "kvplane/v1/step_pb2.py" in names
    assert "kvplane/v1/step_pb2.pyi" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_requires_the_client_dependencies_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(path).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {requirement_name(line) for line in required} == {"googleapis-common-protos", "grpcio", "protobuf"}
    assert len(required) == len(base_requirements())
    assert {"service", "worker", "cli", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "Apache-2.0"


def requirement_name(line: str) -> str:
    return line.partition(">")[0].partition("<")[0].partition("!")[0].strip()


def test_base_install_is_consistent(empty_environment):
    done = subprocess.run([*QUIET_PIP, "--python", str(empty_environment), "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("everything_is_installed", [False, True], ids=["base", "all-extras"])
def test_client_imports_nothing_heavy(everything_is_installed, empty_environment):
    python = sys.executable if everything_is_installed else str(empty_environment)
    done = subprocess.run([python, "-c", LOADED_BY_THE_CLIENT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert int(count) > 10
    assert heavy == []
