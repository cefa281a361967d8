"""Nothing hung takes its neighbours along: a store that answers nothing any more, and all that does not need it.

Bounds are those of the faults, not of the product: what is measured in milliseconds was measured in minutes.
"""

from __future__ import annotations

import time

import pytest

from kvplane import Part
from kvplane.base.errors import Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.cli.query.checks import examine
from tests.cli.hung import MODEL, REPLICAS, STORES, TooLate, serving, stopped_redis
from tests.store.servers import wait_until


def play(folder, store: str, twin: str = "") -> None:
    """The store hangs under callers who need it: everything else is answered, and the service goes in time."""
    with STORES[store](folder / "store") as hangable, serving(folder, hangable.setting, twin) as service:
        service.register_all()
        service.check_answers()
        hangable.hang()
        with service.strangers() as refusals:
            time.sleep(3.0)
            service.check_answers()
            if not isinstance(refusals[-1], Unavailable) and store != "file locked":
                raise TooLate(f"who needs the store was told {refusals[-1]!r}")
            service.check_drain()


@pytest.mark.parametrize("store", STORES)
def test_what_needs_no_store_is_answered_while_it_hangs(tmp_path, store):
    play(tmp_path, store)


@pytest.mark.parametrize("twin", ["shared executor", "releases before notices"])
def test_twins_are_caught(tmp_path, twin):
    with pytest.raises(TooLate):
        play(tmp_path, "redis stopped", twin)


def test_a_service_starts_while_its_store_hangs_and_reads_it_when_it_is_back(tmp_path):
    with stopped_redis(tmp_path / "store") as redis:
        with serving(tmp_path, redis.setting) as service:
            service.register_all()
        redis.hang()
        with serving(tmp_path, redis.setting) as service, service.client as client:
            assert list(client.list_replicas()) == []
            store = next(one for one in examine(service.address) if one.check == "store")
            assert (store.is_well, store.seen) == (False, "the service cannot use its store")
            for name in ("r3", "r4", "new"):  # two of which are in the store
                client.register_replica(name, MODEL)
            session = client.session("r4")
            service.sessions.append(session)
            session.apply(Part())
            service.check_answers("unary call", "new session")
            redis.go_on()
            wait_until(lambda: len(list(client.list_replicas())) > REPLICAS, "what is stored was read")
            states = {one.replica: client.describe_replica(one.replica).state for one in client.list_replicas()}
            recovering, live, idle = pb.REPLICA_STATE_RECOVERING, pb.REPLICA_STATE_LIVE, pb.REPLICA_STATE_IDLE
            assert (states["r3"], states["r4"], states["new"], states["r9"]) == (recovering, live, idle, recovering)
            assert session.apply(Part()).seq == 3, "who used its replica meanwhile goes on"
            wait_until(lambda: all(one.is_well for one in examine(service.address)), "the service is well")
        assert "without what is stored until the store is back" in service.log.read_text()
