"""Build hook of hatchling: compile the hashing of blocks, the core and the fleet's index with g++, or leave them out
where that is not possible.

No flag makes an error of a warning, so that a newer compiler that warns of more still compiles; tests use WARNINGS.
With the libraries, the wheel fits one platform and every Python from 3.11; without them, all platforms. KVPLANE_BUILD
selects: `auto` (default) compiles where it can, `native` fails where it cannot, `python` does not compile.
An editable install puts the libraries next to their sources; `python clients/python/native_build.py` compiles those
whose sources have changed since.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
LINKED = ["-static-libgcc", "-static-libstdc++"]  # so that the library needs libc alone
VARIABLE = "KVPLANE_BUILD"
REMEDY = "Install g++ (C++20) and the headers of Python, then install kvplane again"
ROOT = Path(__file__).resolve().parents[2]


class Library(NamedTuple):
    """A library that is compiled from one C++ file.

    Attributes:
        path: where the wheel has it.
        root: folder of the repository that has `path` in an editable install.
        source: the C++ file, in `root`.
        flags: further flags of the compiler.
    """

    path: str
    root: str
    source: str
    flags: tuple[str, ...] = ()


HASHES = Library(
    "kvplane/base/hashing/_native.abi3.so",
    "clients/python",
    "kvplane/base/hashing/_native.cpp",
    ("-fno-exceptions", "-fno-rtti"),
)
CORE = Library("kvplane_core/cpp/_native.abi3.so", "service", "kvplane_core/cpp/module.cpp", ("-fno-rtti",))
INDEX = Library("kvplane_fleet/native/_native.abi3.so", "service", "kvplane_fleet/native/module.cpp", ("-fno-rtti",))
LIBRARIES = (HASHES, CORE, INDEX)


class CannotCompile(Exception):
    """The libraries cannot be compiled here; the message says why."""


def digest_of_sources(library: Library) -> str:
    """Return the SHA-256 of the library's C++ files, so that a test notices a library of older ones."""
    hashed = hashlib.sha256()
    for path in sorted((ROOT / library.root / library.source).parent.rglob("*")):
        if path.suffix in (".cpp", ".h"):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _compiler() -> list[str]:
    """Return the command of the compiler: CXX may have options, as for make."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def warn_of_python(reason: CannotCompile) -> str:
    """Return the line for an install that runs without the libraries, and print it on the terminal, if there is one:
    pip shows what a build prints only if the build fails.
    """
    line = f"kvplane: hashing, core and index are not compiled ({reason}): the slower Python ones run. {REMEDY}"
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\n{line}\n")
    return line


def compile_library(
    library: Library, target: Path, *, flags: list[str] | None = None, linked: list[str] = LINKED
) -> None:
    """Compile a library to a path.

    Raises:
        CannotCompile: there is no g++, or it fails.
    """
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise CannotCompile(f"there is no {compiler[0]}")
    headers = sysconfig.get_paths()["include"]
    fresh = target.with_suffix(f".{os.getpid()}")
    source = ROOT / library.root / library.source
    named = f'-DKVPLANE_SOURCES="{digest_of_sources(library)}"'
    flags = [*FLAGS, *library.flags, *(flags or []), *linked, named]
    command = [*compiler, *flags, f"-I{headers}", str(source), "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        wrong = next((line for line in lines if "error" in line), lines[-1])
        raise CannotCompile(f"{compiler[0]} failed: {wrong}")
    fresh.replace(target)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Add the libraries to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written. Raises CannotCompile if that fails and KVPLANE_BUILD is native."""
        choice = os.environ.get(VARIABLE) or "auto"
        if choice not in ("auto", "native", "python"):
            raise ValueError(f"{VARIABLE} is {choice!r}: set auto, native or python")
        self._folder: str | None = None
        if version == "editable":
            for library in LIBRARIES:  # older ones could differ from their sources
                self._next_to_source(library).unlink(missing_ok=True)
        if choice == "python":
            return
        try:
            self._add(version, build_data)
        except CannotCompile as reason:
            if choice == "native":
                raise
            self.app.display_warning(warn_of_python(reason))

    def _next_to_source(self, library: Library) -> Path:
        return Path(self.root) / library.root / library.path

    def _add(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            for library in LIBRARIES:
                compile_library(library, self._next_to_source(library))
            return
        self._folder = tempfile.mkdtemp()
        for number, library in enumerate(LIBRARIES):
            made = Path(self._folder) / f"{number}.so"
            compile_library(library, made)
            build_data["force_include"][str(made)] = library.path
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder)


def compile_changed() -> None:
    """Compile the libraries of an editable install whose sources changed; remove them where that is not possible.

    Raises:
        CannotCompile: g++ fails, or there is none and KVPLANE_BUILD is native.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    for library in LIBRARIES:
        made = ROOT / library.root / library.path
        if made.exists() and digest_of_sources(library).encode() in made.read_bytes():
            continue
        made.unlink(missing_ok=True)
        if choice == "native" or (choice == "auto" and shutil.which(_compiler()[0])):
            sys.stdout.write(f"== compiling {library.root}/{library.source}\n")
            compile_library(library, made)
        elif choice == "auto":
            sys.stderr.write(f"{library.source} is not compiled, there is no {_compiler()[0]}. {REMEDY}\n")


if __name__ == "__main__":
    try:
        compile_changed()
    except CannotCompile as reason:
        sys.exit(f"kvplane: {reason}")
