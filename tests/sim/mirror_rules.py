"""The rules of mirrored replicas, each checked over the records of one run, as in `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.history import (
    Began,
    CaughtUp,
    Claimed,
    Decided,
    History,
    Imaged,
    Mirrored,
    Planted,
    Viewed,
)

MAX_LAG_MS = 400


def a_mirror_publishes_what_its_engine_decided(history: History) -> Iterator[str]:
    """A service publishes each step of its engine at most once, in order, and with the engine's answer. The step behind
    the last one, which frees all requests when the engine leaves, is the service's own.
    """
    decided: dict[tuple[str, int, int], str] = {}
    left: dict[str, int] = {}
    last: dict[tuple[int, str, int], int] = {}
    for _, record in history.records:
        match record:
            case Decided(replica, life, seq, answer):
                decided[replica, life, seq] = answer
            case Imaged(service, replica, life, _, seq):
                last[service, replica, life] = seq
            case Mirrored(service, replica, life, seq, answer):
                before = last.get((service, replica, life), -1)
                if seq != before + 1:
                    yield f"{replica}: service {service} publishes step {seq} after {before}"
                elif answer != decided.get((replica, life, seq)) and seq != left.get(replica, seq) + 1:
                    yield f"{replica}: service {service} publishes another answer to step {seq}"
                last[service, replica, life] = seq
            case CaughtUp(replica, newest):
                left[replica] = newest


def a_mirror_has_the_state_of_its_engine(history: History) -> Iterator[str]:
    """While a service follows an engine, it has the engine's state after the same step, unless it was changed."""
    states: dict[tuple[str, int, int], str] = {}
    changed = set[tuple[int, str]]()
    for _, record in history.records:
        match record:
            case Decided(replica, life, seq, _, state):
                states[replica, life, seq] = state
            case Planted(service, replica):
                changed.add((service, replica))
            case Imaged(service, replica):
                changed.discard((service, replica))
            case Viewed(service, replica, life, seq, True, "live" | "lapsed", _, _, state):
                if (service, replica) not in changed and state != states.get((replica, life, seq)):
                    yield f"{replica}: service {service} has another state after step {seq}"


def what_is_not_followed_is_hidden(history: History) -> Iterator[str]:
    """A service shows entries of a mirrored replica only while it follows the engine and the lease is valid."""
    for record in history.of(Viewed):
        if record.shows and record.status != "live":
            yield f"{record.replica}: service {record.service} shows entries and is {record.status}"


def a_mirror_that_lags_is_hidden(history: History) -> Iterator[str]:
    """Above the highest lag, a service shows no entries."""
    for record in history.of(Viewed):
        if record.is_message and record.shows and record.age_ms > MAX_LAG_MS:
            yield f"{record.replica}: service {record.service} shows entries that are {record.age_ms} ms old"


def only_a_difference_ends_a_mirror(history: History) -> Iterator[str]:
    """A service that follows an engine diverges only if its state was changed: not by repeats, losses or restarts.

    A service that gave the replica up and adopts it again begins at step 0.
    """
    changed = set[tuple[int, str]]()
    followed: dict[tuple[int, str], tuple[int, int]] = {}
    for _, record in history.records:
        match record:
            case Planted(service, replica):
                changed.add((service, replica))
            case Imaged(service, replica):
                changed.discard((service, replica))
            case Viewed(service, replica, life, seq, True, "diverged"):
                before, through = followed.pop((service, replica), (0, 0))
                if before == life and seq >= through > 0 and (service, replica) not in changed:
                    yield f"{replica}: service {service} diverged after step {seq}"
            case Viewed(service, replica, life, seq, True):
                followed[service, replica] = life, seq


def a_mirror_claims_nothing(history: History) -> Iterator[str]:
    """Only the engine that decides claims the ranks of a mirrored replica."""
    mirrored = {record.replica for record in history.of(Decided)}
    engines = {record.service for record in history.of(Began) if record.replica in mirrored}
    for record in history.of(Claimed):
        if record.place[0] in mirrored and record.service not in engines:
            yield f"{record.place}: epoch {record.epoch} is claimed by process {record.service}"


def a_mirror_never_goes_back(history: History) -> Iterator[str]:
    """A service that has followed an engine life follows none with a lower epoch on the same memory."""
    memory: dict[tuple[str, int], object] = {}  # by life
    newest: dict[tuple[int, str], tuple[int, object]] = {}
    for _, record in history.records:
        match record:
            case Decided(replica, life, 0, answer):
                memory[replica, life] = answer
            case Imaged(service, replica, life, epoch):
                before, where = newest.get((service, replica), (0, None))
                here = memory.get((replica, life))
                if where == here and epoch < before:
                    yield f"{replica}: service {service} follows epoch {epoch} after {before}"
                newest[service, replica] = epoch, here


def a_mirror_catches_up(history: History) -> Iterator[str]:
    """When nothing fails any more, the service has applied every step of its engine."""
    for record in history.of(CaughtUp):
        if record.applied != record.newest:
            yield f"{record.replica}: step {record.applied} of {record.newest} is applied"


MIRROR_RULES = (
    a_mirror_publishes_what_its_engine_decided,
    a_mirror_has_the_state_of_its_engine,
    what_is_not_followed_is_hidden,
    a_mirror_that_lags_is_hidden,
    only_a_difference_ends_a_mirror,
    a_mirror_claims_nothing,
    a_mirror_never_goes_back,
    a_mirror_catches_up,
)
