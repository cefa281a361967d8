"""A store that hangs delays no call that does not need it.

Bounds separate the product, which answers in milliseconds, from the faults, with which calls took minutes.
"""

from __future__ import annotations

import time

import pytest

from kvplane import Part
from kvplane.base.errors import Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane_tools.cli.query.checks import examine
from tests.cli.hung import MODEL, REPLICAS, STORES, TooLate, serving, stopped_redis
from tests.store.servers import wait_until


def check_hanging_store(folder, store: str, twin: str = "") -> None:
    """The store hangs under clients that need it: all other calls are answered, and the service drains in time."""
    with STORES[store](folder / "store") as hangable, serving(folder, hangable.setting, twin) as service:
        service.register_all()
        service.check_answers()
        hangable.hang()
        with service.store_clients() as refusals:
            time.sleep(3.0)
            service.check_answers()
            if not isinstance(refusals[-1], Unavailable) and store != "file locked":
                raise TooLate(f"a client that needs the store got {refusals[-1]!r}")
            service.check_drain()


@pytest.mark.parametrize("store", STORES)
def test_calls_without_the_store_are_answered_while_it_hangs(tmp_path, store):
    check_hanging_store(tmp_path, store)


@pytest.mark.parametrize("twin", ["shared executor", "releases before notices"])
def test_hung_store_twins_are_caught(tmp_path, twin):
    with pytest.raises(TooLate):
        check_hanging_store(tmp_path, "redis stopped", twin)


def test_a_service_starts_while_its_store_hangs_and_reads_it_later(tmp_path):
    with stopped_redis(tmp_path / "store") as redis:
        with serving(tmp_path, redis.setting) as service:
            service.register_all()
        redis.hang()
        with serving(tmp_path, redis.setting) as service, service.client as client:
            assert list(client.list_replicas()) == []
            store = next(one for one in examine(service.address) if one.check == "store")
            assert (store.is_well, store.seen) == (False, "the service cannot use its store")
            for name in ("r3", "r4", "new"):  # the first two are in the store
                client.register_replica(name, MODEL)
            session = client.session("r4")
            service.sessions.append(session)
            session.apply(Part())
            service.check_answers("unary call", "new session")
            redis.resume()
            stored = {f"r{number}" for number in range(REPLICAS)}
            wait_until(lambda: stored <= {one.replica for one in client.list_replicas()}, "the store was read")
            states = {one.replica: client.describe_replica(one.replica).state for one in client.list_replicas()}
            recovering, live, idle = pb.REPLICA_STATE_RECOVERING, pb.REPLICA_STATE_LIVE, pb.REPLICA_STATE_IDLE
            assert (states["r3"], states["r4"], states["new"], states["r9"]) == (recovering, live, idle, recovering)
            assert session.apply(Part()).seq == 3, "a session opened meanwhile continues"
            wait_until(lambda: all(one.is_well for one in examine(service.address)), "the service is well")
        assert "serving without stored keys until it answers" in service.log.read_text()
