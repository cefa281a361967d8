"""Build hook of hatchling: compile the hashing of blocks with g++, or leave it out where that is not possible.

With the library, the wheel fits one platform and every Python from 3.11; without it, all platforms. KVPLANE_BUILD
selects: `auto` (default) compiles where it can, `native` fails where it cannot, `python` does not compile.
An editable install puts the library next to its source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "kvplane/base/hashing/_native.abi3.so"
SOURCE = Path(__file__).resolve().parent / "kvplane/base/hashing/_native.cpp"
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
LINKED = ["-static-libgcc", "-static-libstdc++"]  # so that the library needs libc alone
VARIABLE = "KVPLANE_BUILD"


class CannotCompile(Exception):
    """The library cannot be compiled here; the message says why."""


def compile_library(target: Path, *, flags: list[str] | None = None) -> None:
    """Compile the library to a path.

    Raises:
        CannotCompile: there is no g++, or it fails.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise CannotCompile(f"there is no {compiler}")
    headers = sysconfig.get_paths()["include"]
    fresh = target.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, *(flags or []), *LINKED, f"-I{headers}", str(SOURCE), "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        wrong = next((line for line in lines if "error" in line), lines[-1])
        raise CannotCompile(f"{compiler} failed: {wrong}")
    fresh.replace(target)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Add the library to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written. Raises CannotCompile if that fails and KVPLANE_BUILD is native."""
        choice = os.environ.get(VARIABLE) or "auto"
        if choice not in ("auto", "native", "python"):
            raise ValueError(f"{VARIABLE} is {choice!r}: set auto, native or python")
        self._folder: str | None = None
        if version == "editable":
            self._next_to_source.unlink(missing_ok=True)  # an older one could differ from its source
        if choice == "python":
            return
        try:
            self._add(version, build_data)
        except CannotCompile as reason:
            if choice == "native":
                raise
            self.app.display_warning(f"kvplane: block hashing is not compiled ({reason}); Python does it")

    @property
    def _next_to_source(self) -> Path:
        return Path(self.root) / "clients" / "python" / LIBRARY

    def _add(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            compile_library(self._next_to_source)
            return
        self._folder = tempfile.mkdtemp()
        library = Path(self._folder) / "library.so"
        compile_library(library)
        build_data["force_include"][str(library)] = LIBRARY
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder)
