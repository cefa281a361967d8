"""Libraries that are compiled from C++ files: whether one can be used."""

from __future__ import annotations

import hashlib
from pathlib import Path

NOT_INSTALLED = "the compiled core is not installed"


def problem_of(folder: Path) -> str:
    """Return why the compiled core in this folder cannot be used; "" if it can, as far as its files say.

    In a checkout the library is next to its C++ files; one of older files can lack what the Python files call.
    """
    library = next(folder.glob("_native.*so"), None)
    if library is None:
        return NOT_INSTALLED
    digest, sources = hashlib.sha256(), [path for path in folder.rglob("*") if path.suffix in (".cpp", ".h")]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    if sources and digest.hexdigest().encode() not in library.read_bytes():
        return "the compiled core was compiled from other sources: run make"
    return ""
