"""Libraries that are compiled from C++ files: loads one, or says why it cannot be used."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType


@cache
def load(package: str, what: str) -> tuple[ModuleType | None, str]:
    """Return the library `_native` of a package, and "", or None and why it cannot be used. The text names it `what`.

    In a checkout the library is next to its C++ files; one of older files can lack what the Python files call.
    """
    name = f"{package}._native"
    if name not in sys.modules:
        folder = Path(import_module(package).__path__[0])
        library = next(folder.glob("_native.*so"), None)
        digest, sources = hashlib.sha256(), [path for path in folder.rglob("*") if path.suffix in (".cpp", ".h")]
        for path in sorted(sources):
            digest.update(path.read_bytes())
        if library is not None and sources and digest.hexdigest().encode() not in library.read_bytes():
            return None, f"the compiled {what} was compiled from other sources: run make"
    try:
        return import_module(name), ""
    except ImportError:
        return None, f"the compiled {what} is not installed"
