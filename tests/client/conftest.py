"""A service over gRPC that the tests of a module share; each test begins with a new replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.client.worlds import GrpcWorld


@pytest.fixture(scope="module")
def served() -> Iterator[GrpcWorld]:
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


@pytest.fixture
def world(served: GrpcWorld) -> GrpcWorld:
    served.reset()
    return served


@pytest.fixture
def name(world: GrpcWorld) -> str:
    return world.replica
