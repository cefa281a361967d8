"""What the recordings are replayed over."""

from __future__ import annotations

import pytest

from kvplane.blocking.client import connect
from kvplane_service.cli.child import ServiceChild


@pytest.fixture(scope="module")
def client():
    """A client of a service in a process of its own."""
    with ServiceChild() as service, connect(service.address) as client:
        yield client
