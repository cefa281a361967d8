"""The campaign finds each planted fault, and nothing in the product under the same faults."""

from __future__ import annotations

import pytest

from tests.fleet.planted import PLANTED, find
from tests.store.servers import redis_command
from tests.twins import TWINS


def test_planted_faults_are_twins():
    assert set(PLANTED) <= set(TWINS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    redis_command()
    report = find(name)
    assert any(PLANTED[name].says in finding for finding in report.findings), report.findings
