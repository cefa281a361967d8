"""Which tests run when: `make test`, targets that run when their sources change, and `make test-nightly`.

A test that is named on the command line runs in any case. So does every test with `--all` (`make test-all`).

A *guarded* target, such as the kernels, costs minutes and reads few sources. `passed.json` has the digest of these
sources at which `make test-TARGET` passed last; while it is that of the sources here, `make test` leaves the target
out and says so. An unknown digest is another one: whoever changes a source runs the target, or leaves that to CI.

    python -m tests.targets record TARGET     after the target has passed
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = Path(__file__).with_name("passed.json")


@dataclass(frozen=True)
class Guarded:
    """Tests that are left out of `make test` while their sources are what they were when the tests passed.

    Attributes:
        tests, sources: files and folders, relative to the root of the repository; tests are sources too.
    """

    tests: tuple[str, ...]
    sources: tuple[str, ...]

    def digest(self) -> str:
        """The digest of all sources: of their names and contents."""
        whole = hashlib.sha256()
        for path in sorted({path for name in (*self.tests, *self.sources) for path in _files(ROOT / name)}):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
        return whole.hexdigest()


GUARDED = {
    "kernels": Guarded(
        tests=("tests/ops",),
        sources=(
            "gpu_worker/kvplane_worker/ops",
            "clients/python/kvplane/base/errors.py",
            "tests/conftest.py",
            "locks",
        ),
    ),
    "chart": Guarded(
        tests=("tests/helm",),
        sources=("helm", "scripts/chart.py", "scripts/tools.sh", "locks"),
    ),
}

NIGHTLY: dict[str, str] = {}


def is_in(path: str, names: Iterable[str]) -> bool:
    """Whether a test's file, relative to the root, is one of these files or in one of these folders."""
    return any(path == name or path.startswith(f"{name}/") for name in names)


def recorded() -> dict[str, str]:
    """Digest of each target's sources when it passed last."""
    return dict(json.loads(PASSED.read_text())) if PASSED.exists() else {}


def unchanged() -> list[str]:
    """The guarded targets whose sources are what they were when their tests passed."""
    return [name for name, target in GUARDED.items() if recorded().get(name) == target.digest()]


def record(name: str) -> None:
    """Note that the tests of a target have passed on the sources that are here."""
    PASSED.write_text(json.dumps({**recorded(), name: GUARDED[name].digest()}, indent=1, sort_keys=True) + "\n")


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for one in path.rglob("*") if path.is_dir() else ():
        if one.is_file() and "__pycache__" not in one.parts:
            yield one


if __name__ == "__main__":
    assert sys.argv[1:2] == ["record"], __doc__
    for each in sys.argv[2:]:
        record(each)
