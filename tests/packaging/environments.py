"""Folders of installed packages, for tests that need other versions than the test environment."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".tools" / "environments"
QUIET_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def base_requirements() -> list[str]:
    """Requirements of the base install, the client."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def installed(*requirements: str) -> Path:
    """Return a folder with these packages, for PYTHONPATH; made on first use, kept for later runs.

    Raises:
        subprocess.CalledProcessError: when pip finds no set of versions that fits.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:16]
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            fresh = folder.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            subprocess.run([*QUIET_PIP, "install", "--target", str(fresh), *requirements], check=True)
            fresh.rename(folder)
    return folder


def run_isolated(arguments: list[str], *paths: Path) -> str:
    """Run Python with the standard library and `paths` only; return its output.

    Args:
        arguments: those of the interpreter, such as ["-c", code] or the path of a script.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
