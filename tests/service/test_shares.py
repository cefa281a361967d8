"""Every executor, lock, queue and buffer that owners share has a share for each, or states here what bounds it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplane_service.runtime.executors import Executor, InOrder
from kvplane_service.runtime.slices import Turns

ROOT = Path(__file__).parents[2] / "service"
BY_OWNER = {"Executor", "Turns", "LongReads"}  # of which each owner has all places, and its turn
KINDS = {"InOrder", "ThreadPoolExecutor", "Queue", "SimpleQueue", "Semaphore", "Lock", "deque", "Room"}
BOUNDED = {
    "kvplane_service/auth/audit.py": "lines of the audit log; at its limit lines are dropped and counted",
    "kvplane_service/auth/quotas.py": "by owner",
    "kvplane_service/decisions/log.py": "what was not packed yet, at most MAX_WAITING",
    "kvplane_service/decisions/packed_log.py": "one replica's, in the budget of all logs with equal shares",
    "kvplane_service/process/app.py": "signals; the end of the audit log and of traces",
    "kvplane_service/replicas/events.py": "one replica's steps in flight, which are limited",
    "kvplane_service/replicas/step_order.py": "one replica's answers, at most those in flight",
    "kvplane_service/rpc/admin.py": "one recording's decisions, at most MAX_UNRECORDED",
    "kvplane_service/rpc/session.py": "one stream's writers",
    "kvplane_service/rpc/ttrpc.py": "by owner",
    "kvplane_service/runtime/rota.py": "by owner",
    "kvplane_service/store/grants.py": "changes of the table of owners, each within its deadline",
    "kvplane_service/store/journal.py": "one replica's changes; the store's backlog is limited",
    "kvplane_service/store/loading.py": "reads of logs by the service itself",
    "kvplane_service/store/opening.py": "the store's calls, in their order",
    "kvplane_service/store/owning.py": "the table's calls, in their order",
    "kvplane_service/store/ownership.py": "one replica that is adopted",
    "kvplane_service/store/redis_store.py": "the store's calls",
    "kvplane_service/store/sqlite.py": "the store's calls",
    "kvplane_service/store/writer.py": "the store's calls",
    "kvplane_fleet/decisions.py": "one place's last doubts",
    "kvplane_fleet/follow/inbox.py": "one place's messages, at most those that its order keeps",
    "kvplane_fleet/follow/zmq_source.py": "one place's messages",
    "kvplane_fleet/follow/order.py": "one place's messages, of a limited size",
    "kvplane_fleet/router/asking.py": "one endpoint's calls under way, at most MOST_OPEN",
    "kvplane_fleet/router/prober.py": "one place's last prompts",
    "kvplane_fleet/router/picker.py": "the room for bodies, of which each owner has a share",
    "kvplane_fleet/work.py": "one place's booked prompts, of which each owner has a share",
    "kvplane_fleet/router/watching.py": "one call's messages, at most MAX_BYTES; the calls have a share by owner",
}


def made() -> Iterator[tuple[str, str]]:
    """Each file of service and router with the kinds that it makes."""
    for path in sorted((*ROOT.glob("kvplane_service/**/*.py"), *ROOT.glob("kvplane_fleet/**/*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
                name = getattr(function, "attr", getattr(function, "id", ""))
                if name in KINDS | BY_OWNER:
                    yield str(path.relative_to(ROOT)), name


def test_what_owners_share_has_shares_or_a_stated_bound():
    found = set(made())
    files = {file for file, name in found if name in KINDS}
    assert files == set(BOUNDED), f"not stated: {files - set(BOUNDED)}; gone: {set(BOUNDED) - files}"
    assert len({file for file, name in found if name in BY_OWNER}) > 5, "the walk finds what is there"


@pytest.mark.parametrize("kind", [Executor, Turns])
def test_their_places_are_counted_by_owner(kind):
    places = kind("a resource", max_waiting=1)
    places = places._threads._places if kind is Executor else places._places
    for owner in ("bob", "alice", "carol"):
        places.take(owner)


def test_only_resources_of_the_service_itself_are_in_order():
    assert {file for file, name in made() if name == InOrder.__name__} == {
        "kvplane_service/process/app.py",
        "kvplane_service/store/opening.py",
        "kvplane_service/store/owning.py",
    }
