"""Builds of the compiled core other than that of the package, and programs that use them.

    python -m tests.core.native_builds sanitized -m pytest tests/core/test_native.py     with ASan and UBSan
    python -m tests.core.native_builds sanitized -m tests.fuzz 600 --steps
    python -m tests.core.native_builds LIBRARY -m MODULE ...                             with a library

The sanitized build ends the process at the first access outside of an object or to a freed one, signed overflow, wrong
index of a standard container, or invalid shift or cast. Its tables begin small, so that they grow. Python allocates
with malloc, so that its objects count too.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import native_build

NAME = "kvplane_core.cpp._native"
FOLDER = native_build.ROOT / "build" / "native"
SMALL_TABLES = "-DKVPLANE_SMALL_TABLES"
SANITIZED = [
    *("-O1", "-g", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", SMALL_TABLES),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
]
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")  # must be in the process before Python is


def sanitized() -> Path:
    """Compile the core with sanitizers, unless that was done for these sources; returns the library."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"sanitized-{native_build.digest_of_sources(native_build.CORE)[:16]}.so"
    if not path.exists():
        native_build.compile_library(native_build.CORE, path, flags=SANITIZED, linked=[])
    return path


def environment() -> dict[str, str]:
    """The variables with which a process can load the sanitized library."""
    compiler = os.environ.get("CXX") or "g++"
    ask = [[compiler, f"-print-file-name={name}"] for name in RUNTIMES]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in ask]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",  # Python leaks at its end
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",
    }


def load(path: Path) -> None:
    """Make a library the compiled core of this process, which must not have imported another one."""
    assert NAME not in sys.modules, "the process has a compiled core"
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module


def main(library: str, module: str, *arguments: str) -> None:
    """See the module."""
    if library == "sanitized":
        command = [sys.executable, "-m", "tests.core.native_builds", str(sanitized()), "-m", module, *arguments]
        os.execve(sys.executable, command, environment())
    load(Path(library))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    assert sys.argv[2:3] == ["-m"], __doc__
    main(sys.argv[1], *sys.argv[3:])
