"""Tests of the core run both cores, see `compared`; those of the mark `specification` run that one alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.core.compared import specification


@pytest.fixture(autouse=True)
def cores_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """See the module."""
    with specification() if request.node.get_closest_marker("specification") else nullcontext():
        yield
