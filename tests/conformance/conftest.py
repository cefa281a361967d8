"""The client over which the recordings are replayed."""

from __future__ import annotations

import pytest

from kvplane.blocking.client import connect
from kvplane_tools.cli.child import ServiceChild


@pytest.fixture(scope="module")
def client():
    """A client of a service in a separate process."""
    with ServiceChild() as service, connect(service.address) as client:
        yield client
