"""Description of the machine: the line at the head of each table in results/."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from kvplane.base.hashing import native


def machine() -> dict[str, str | int | float]:
    """Date, processor, cores, Python version, how blocks are hashed, and current load."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "hashes": native.describe(),
        "load": round(os.getloadavg()[0], 1),
    }


def machine_line() -> str:
    """The description as one line."""
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def cpu_model() -> str:
    """The model name in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
