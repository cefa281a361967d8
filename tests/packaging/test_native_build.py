"""The build hook: a wheel with the compiled hashes, one without, and installs on machines without a compiler."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

import native_build
from tests.packaging.environments import QUIET_PIP, ROOT
from tests.packaging.images import instructions

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

LIBRARIES = native_build.LIBRARIES
HASH = """
from kvplane.base.hashing import HashScheme, RequestHasher, native, pack_tokens
print(native.describe(), RequestHasher(HashScheme.named(4)).append(pack_tokens(range(40))).hex())
"""


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def unpacked(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


def described(content: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(content), "KVPLANE_NATIVE": "auto"}
    done = subprocess.run([sys.executable, "-c", HASH], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rsplit(maxsplit=1)


def test_both_wheels_are_built_and_hash_equally(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++: the wheel with compiled hashes is not built")
    found = {}
    for kind in ("native", "python"):
        done = build(tmp_path / kind, KVPLANE_BUILD=kind)
        assert done.returncode == 0, done.stderr
        found[kind] = unpacked(tmp_path / kind)
    assert all((found["native"] / library.path).is_file() for library in LIBRARIES)
    assert [path.name.split("-", 2)[2] for path in (tmp_path / "python").glob("*.whl")] == ["py3-none-any.whl"]
    assert next((tmp_path / "native").glob("*.whl")).name.split("-", 2)[2].startswith("cp311-abi3-linux_")
    assert not list(found["python"].rglob("*.so"))
    assert not [path for kind in found.values() for path in kind.rglob("*") if path.suffix in (".cpp", ".h")]
    (how, hashes), (how_in_python, hashes_in_python) = described(found["native"]), described(found["python"])
    assert hashes == hashes_in_python
    assert "not installed" not in how
    assert how_in_python.startswith("Python (the compiled hashing is not installed")


@pytest.mark.parametrize("failure", ["missing", "failing"])
def test_without_a_compiler_the_wheel_fits_every_platform_and_says_so(tmp_path, failure):
    compiler = {"missing": "no-such-compiler", "failing": "false"}[failure]
    done = build(tmp_path, CXX=compiler, KVPLANE_BUILD="auto")
    assert done.returncode == 0, done.stderr
    assert "hashing, core and index are not compiled" in done.stdout + done.stderr
    assert [path.name.split("-", 2)[2] for path in tmp_path.glob("*.whl")] == ["py3-none-any.whl"]
    assert not list(unpacked(tmp_path).rglob("*.so"))


def test_an_install_without_a_compiler_says_so_on_the_terminal(tmp_path):
    """Pip itself hides what a build prints."""
    command = [*QUIET_PIP, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {**os.environ, "CXX": "no-such-compiler", "KVPLANE_BUILD": "auto"})
    said = b""
    with suppress(OSError):  # how a pty says that its other end is closed
        while chunk := os.read(terminal, 4096):
            said += chunk
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = " ".join(said.decode().split())
    assert "are not compiled (there is no no-such-compiler): the slower Python ones run. Install g++ (C++20)" in text


def test_a_compiler_that_warns_of_everything_still_compiles(tmp_path):
    """As a newer one does, of what this one does not know: a warning is printed for each library."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++: nothing is compiled")
    warning = 'g++ -Weffc++ -Wconversion -Wuseless-cast "$@" && echo "x.cpp:1: warning: a newer one" >&2'
    compiler = tmp_path / "newer"
    compiler.write_text(f"#!/bin/sh\n{warning}\n")
    compiler.chmod(0o755)
    done = build(tmp_path, CXX=f"{compiler} -O0", KVPLANE_BUILD="auto")
    assert done.returncode == 0, done.stderr
    content = unpacked(tmp_path)
    assert all((content / library.path).is_file() for library in LIBRARIES), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("choice", "fault"), [("native", "there is no no-such-compiler"), ("yes", "set auto, native or python")]
)
def test_a_choice_that_cannot_be_met_fails(tmp_path, choice, fault):
    done = build(tmp_path, CXX="no-such-compiler", KVPLANE_BUILD=choice)
    assert done.returncode != 0
    assert fault in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def editable_tree(folder: Path) -> Path:
    """A copy of what an install reads."""
    for name in ("clients", "service", "gpu_worker"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build_editable(tree: Path, folder: Path, **variables: str) -> None:
    code = "from hatchling.build import build_editable; import sys; build_editable(sys.argv[1])"
    command, environment = [sys.executable, "-c", code, str(folder)], {**os.environ, **variables}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)


def test_editable_install_puts_the_library_next_to_its_source(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++: the editable install does not compile")
    tree = editable_tree(tmp_path / "tree")
    build_editable(tree, tmp_path)
    assert all((tree / library.root / library.path).is_file() for library in LIBRARIES)
    assert [path.suffix for path in unpacked(tmp_path).iterdir() if path.is_file()] == [".pth"]


@pytest.mark.parametrize("variables", [{"KVPLANE_BUILD": "python"}, {"CXX": "no-such-compiler"}])
def test_editable_install_without_compiling_removes_an_older_library(tmp_path, variables):
    tree = editable_tree(tmp_path / "tree")
    older = [tree / library.root / library.path for library in LIBRARIES]
    for path in older:
        path.write_bytes(b"of an older source")
    build_editable(tree, tmp_path, **variables)
    assert not any(path.exists() for path in older)


def compile_changed(tree: Path, **variables: str) -> str:
    command = [sys.executable, str(tree / "clients" / "python" / "native_build.py")]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_changed_source_compiles_its_library_alone(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++: nothing is compiled")
    tree = editable_tree(tmp_path / "tree")
    for library in LIBRARIES:
        shutil.copy(ROOT / library.root / library.path, tree / library.root / library.path)
    assert compile_changed(tree) == ""
    hashes = native_build.HASHES
    with (tree / hashes.root / hashes.source).open("a") as source:
        source.write("// changed\n")
    assert compile_changed(tree) == f"== compiling {hashes.root}/{hashes.source}\n"
    assert compile_changed(tree) == ""
    (tree / hashes.root / hashes.source).write_bytes((ROOT / hashes.root / hashes.source).read_bytes())
    assert compile_changed(tree, CXX="no-such-compiler") == ""
    assert not (tree / hashes.root / hashes.path).exists()  # it was of other sources
    assert (tree / native_build.CORE.root / native_build.CORE.path).exists()


@pytest.mark.parametrize("name", ["service", "worker"])
def test_images_are_built_with_a_compiler_and_run_without(name):
    steps = [f"{word} {rest}" for word, rest in instructions(name)]
    stages = [at for at, step in enumerate(steps) if step.startswith("FROM ")]
    compiler = next(at for at, step in enumerate(steps) if step.startswith("RUN apt-get") and " g++" in step)
    build = next(at for at, step in enumerate(steps) if "KVPLANE_BUILD=native " in step)
    assert stages[0] < compiler < build < stages[1]
