from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.rig import World, world


@pytest.fixture
def here(tmp_path: Path) -> Iterator[World]:
    """A service with replica "r", one rank."""
    with world(tmp_path) as it:
        it.register()
        yield it
