"""The rules of a history find what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from tests.fleet.history import Granted, Notes, Wrote, failovers, read, violations

A, B = "127.0.0.1:1", "127.0.0.1:2"


def grant(epoch: int, holder: str = "7", service: str = A, replica: str = "r") -> Granted:
    return Granted(replica, epoch, holder, service, 10 * epoch, 10 * epoch + 1)


def write(epoch: int, began_ns: int, ended_ns: int, memory: int = 1) -> Wrote:
    return Wrote("r", epoch, memory, began_ns, ended_ns)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([grant(1), grant(2, service=B), grant(1, replica="q")], 0),
        ([grant(1), grant(1)], 0),  # a session that was reopened
        ([grant(1), grant(1, service=B)], 1),
        ([grant(1), grant(1, holder="8")], 1),
        ([grant(1), grant(1, "8"), grant(2), grant(2, "rival 1", B)], 2),
        ([Granted("r", 5, "7", A, 0, 2), Granted("r", 4, "8", B, 1, 3)], 0),  # asked for at the same time
        ([Granted("r", 5, "7", A, 0, 2), Granted("r", 4, "8", B, 3, 4)], 1),
        ([write(1, 0, 1), write(2, 2, 3), write(2, 4, 5), write(3, 6, 7)], 0),
        ([write(1, 0, 1), write(2, 2, 4), write(1, 3, 5)], 0),  # it began before the newer one had ended
        ([write(1, 0, 1), write(2, 2, 4), write(1, 5, 6)], 1),
        ([write(2, 2, 4), write(1, 5, 6, memory=2)], 0),
        ([write(3, 0, 1), write(2, 2, 3), write(2, 4, 5)], 2),
        ([write(2, 0, 9), write(1, 9, 10)], 1),
        ([Wrote("r", 2, 1, 0, 1, owner=1), Wrote("r", 2, 1, 2, 3, owner=2)], 0),
        ([Wrote("r", 2, 1, 0, 1, owner=3)], 1),
    ],
)
def test_rules_of_a_history(events, found):
    assert len(violations(events)) == found
    assert len(violations(reversed(events))) == found, "whatever the order of the files"


def test_failovers_are_counted_by_replica():
    events = [grant(1), grant(2), grant(4, service=B), grant(3), grant(5, replica="q"), grant(6, service=B)]
    assert failovers(events) == 1
    assert failovers([*events, grant(7, replica="q", service=B), grant(8)]) == 3


def test_what_a_killed_process_noted_is_read(tmp_path):
    notes = Notes(tmp_path)
    events: list[Granted | Wrote] = [grant(1), write(1, 2, 3)]
    for event in events:
        notes.add(event)
    assert read(tmp_path) == events
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b'{"kind": "wro')
    assert read(tmp_path) == events
