"""Real processes of a fleet under a few faults. `make fleet` does more."""

from __future__ import annotations

from tests.faults.campaign import one_thread
from tests.fleet.campaign import run
from tests.fleet.kinds import kill_service, stop_service
from tests.fleet.processes import Shape
from tests.store.servers import redis_command


def test_a_service_stops_and_a_service_ends():
    redis_command()
    with one_thread():
        report = run(Shape("grants", services=2, replicas=2), [stop_service, kill_service], seed=1, say=print)
    assert not report.findings, report.line
    assert report.requests >= 2 * 2 * 2
