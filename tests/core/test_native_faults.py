"""The faults that `native_faults` plants in the compiled core have their places there, and compile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig

import pytest

import native_build
from tests.core import native_faults


def test_faults_have_different_names():
    names = [fault.name for fault in native_faults.FAULTS]
    assert len(set(names)) == len(names)


def test_recorded_finds_are_of_faults_that_are_there():
    assert json.loads(native_faults.FINDS.read_text()).keys() <= {fault.name for fault in native_faults.FAULTS}


def test_the_core_with_all_faults_compiles(tmp_path):
    """Only the syntax and types are checked: that takes a fifth of the time."""
    compiler = native_build._compiler()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]}")
    core = native_build.CORE
    source = tmp_path / "native" / "module.cpp"
    shutil.copytree((native_build.ROOT / core.root / core.source).parent, source.parent)
    native_faults.plant(source.parent)
    flags = [*native_build.FLAGS, *core.flags, "-fsyntax-only", '-DKVPLANE_SOURCES=""']
    command = [*compiler, *flags, f"-I{sysconfig.get_paths()['include']}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
