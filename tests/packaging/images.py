"""Images without a builder: the steps of a Dockerfile, executed below a folder that represents the root.

The base image's file system is missing: Python is one of this machine that any user may run, and so are other
programs. Absolute paths in the Dockerfile are below the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environments import ROOT

BASE_PATH = "/usr/local/bin:/usr/bin:/bin"
WRITTEN = "/var/tmp"  # a volume in the chart, where the root file system is read-only
LIMIT_S = 240


def instructions(name: str) -> list[tuple[str, str]]:
    """Instructions of docker/NAME.Dockerfile, such as RUN, with their arguments, in order."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    parts = (line.partition(" ") for line in lines if line.strip())
    return [(word, rest.strip()) for word, _, rest in parts]


def unprivileged() -> dict[str, Any]:
    """Arguments of subprocess for an unprivileged user; empty if this process is not privileged."""
    return {} if os.getuid() else {"user": 10001, "group": 10001, "extra_groups": []}


def open_python() -> str:
    """An interpreter that any user may run; skips the test with a reason if there is none."""
    code = "import sys, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            if subprocess.run([python, "-c", code], check=False, capture_output=True, **unprivileged()).returncode == 0:
                return python
        except (PermissionError, FileNotFoundError):
            continue
    pytest.skip("no Python with ensurepip here that a user without rights may run: the images are not tried")


class Image:
    """The image of a Dockerfile. Call `build` first."""

    def __init__(self, name: str, folder: Path, **arguments: str) -> None:
        self.name = name
        self.folder = folder
        self.instructions = instructions(name)
        self._arguments = arguments
        self._paths = ["/src", "/opt/kvplane", WRITTEN]

    def build(self, known: Sequence[str] = ()) -> None:
        """Execute COPY and RUN.

        Args:
            known: large packages of the test environment, which the image gets before it installs, so that pip finds
                them.
        """
        self._make_base()
        for word, rest in self.instructions:
            if word == "ARG":
                key, _, value = rest.partition("=")
                self._arguments.setdefault(key, value)
            elif word == "COPY" and not rest.startswith("--from"):
                self._copy(*rest.split())
            elif word == "RUN" and not rest.startswith("apt-get"):  # programs are those of this machine
                self._run(self._filled(rest))
                if "-m venv" in rest:
                    self._put_in(known)
        shutil.rmtree(self.place("/src"))  # only in the build stage

    def place(self, path: str) -> Path:
        """Path of a file of the image on this machine."""
        return self.folder / path.lstrip("/")

    def placed(self, text: str) -> str:
        """Text with the paths of the image below the folder."""
        pattern = "|".join(map(re.escape, self._paths))
        return re.sub(rf"(?<![\w.-])(?:{pattern})(?![\w-])", lambda match: str(self.place(match[0])), text)

    def said(self, word: str) -> str:
        """Arguments of the last instruction with this name."""
        return [rest for name, rest in self.instructions if name == word][-1]

    def environment(self) -> dict[str, str]:
        """Environment variables of the image, and no others."""
        variables = {"PATH": BASE_PATH}
        for setting in self.said("ENV").split():
            key, _, value = setting.partition("=")
            variables[key] = self.placed(value.replace("$PATH", BASE_PATH))
        return variables

    def command(self, *words: str) -> list[str]:
        """The entry point with arguments; without any, those of CMD."""
        return [*json.loads(self.said("ENTRYPOINT")), *(words or json.loads(self.said("CMD")))]

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """A process in the image, as its user."""
        variables = self.environment()
        program = shutil.which(command[0], path=variables["PATH"])
        assert program, command
        return subprocess.Popen(
            [program, *command[1:]],
            env=variables,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **unprivileged(),
        )

    def run(self, *command: str) -> str:
        """Run a process in the image; return its output. Raises if it fails."""
        process = self.start(command)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
        return said

    def _make_base(self) -> None:
        base = self.place("/base")
        base.mkdir(parents=True)
        (base / "python").symlink_to(open_python())
        self.place(WRITTEN).mkdir(parents=True)
        self.place(WRITTEN).chmod(0o777)

    def _copy(self, *words: str) -> None:
        *sources, target = words
        folder = self.place("/src") / target
        for source in sources:
            here = ROOT / source
            if here.is_dir():
                shutil.copytree(here, folder, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, folder)

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda match: self._arguments[match[1]], text)

    def _run(self, line: str) -> None:
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVPLANE_"))}
        variables["PATH"] = f"{self.place('/base')}:{BASE_PATH}"
        # This machine's Python may come without its headers, which the base image has.
        command = ["sh", "-c", self.placed(line).replace("KVPLANE_BUILD=native", "KVPLANE_BUILD=auto")]
        done = subprocess.run(
            command, cwd=self.place("/src"), env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _put_in(self, known: Sequence[str]) -> None:
        (target,) = self.place("/opt/kvplane/lib").glob("python*/site-packages")
        for name in known:
            (metadata,) = (path for place in sys.path for path in Path(place).glob(f"{name}-*.dist-info"))
            if target.parent.name != metadata.parent.parent.name:
                continue  # for another Python version: pip installs its own
            tops = {line.partition("/")[0] for line in (metadata / "RECORD").read_text().splitlines()} - {".."}
            for top in tops:
                if (metadata.parent / top).is_dir():
                    _show(metadata.parent / top, target / top)


def _show(source: Path, target: Path) -> None:
    """Make a package available to the image: by a link, or by a copy if other users may not read it."""
    if subprocess.run(["test", "-r", source], check=False, **unprivileged()).returncode == 0:
        target.symlink_to(source)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "include"))


@contextmanager
def built(name: str, known: Sequence[str] = (), **arguments: str) -> Iterator[Image]:
    """A built image that any user can enter."""
    with tempfile.TemporaryDirectory(prefix="kv", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        image = Image(name, Path(folder), **arguments)
        image.build(known)
        yield image
