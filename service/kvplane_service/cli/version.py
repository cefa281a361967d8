"""`kvplane version`."""

from __future__ import annotations

import sys
from importlib.metadata import version


def command() -> None:
    """Print the version."""
    sys.stdout.write(f"kvplane {version('kvplane')}\n")
