"""A full garbage collection visits as many objects of a replica with many keys as of one with few."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import NamedTuple

import pytest

from kvplane_core.spec.pool import BlockPool
from tests.core.builders import GRANTED, Engine, full, new_replica, state, window


class Named(NamedTuple):
    """A key as a named tuple."""

    domain: str
    group: int
    digest: bytes


class Counts(NamedTuple):
    """The objects of a replica that a full collection visits, and the blocks of the replica that have a key."""

    visited: int
    keys: int


FEW, MANY = "aaaabbbbc", "".join(4 * letter for letter in "abcdefghijklmnopqrst") + "u"


def visited(root):
    """Number of objects reachable from `root` that a full collection visits, without classes, modules and functions."""
    gc.collect(0)  # a plain tuple of atomic values is tracked until the first collection
    found, queue = {}, [root]
    while queue:
        one = queue.pop()
        if id(one) not in found and not isinstance(one, type | FunctionType | ModuleType):
            found[id(one)] = one
            queue.extend(gc.get_referents(one))
    return sum(map(gc.is_tracked, found.values()))


def in_flight(engine, prompt):
    """The keys are tentative."""
    engine.executed = 0
    assert engine.admit(0, prompt).status is GRANTED


def executed(engine, prompt):
    engine.admit(0, prompt)
    engine.idle()


def free(engine, prompt):
    engine.serve(0, prompt)
    engine.idle()


def recovered(engine, prompt):
    """The keys were packed in a table until their blocks were touched."""
    free(engine, prompt)
    stored, stamps = engine.replica.entries(), list(engine.pool.stamp)
    engine.replica, engine.seq = new_replica(engine.spec), 0
    engine.replica.recover(1, [stamps], [stored])
    assert engine.pool.count_lazy_keys() == len(engine.keyed()) > 0
    engine.pool.touch(engine.keyed())
    engine.pool.release(engine.keyed())
    assert engine.pool.lazy_keys is None


def counts(groups, condition):
    """Of a replica with few keys, and of one with many."""
    for prompt in (FEW, MANY):
        engine = Engine(*groups, num_blocks=100)
        condition(engine, prompt)
        yield Counts(visited(engine.replica), len(engine.keyed()))


@pytest.mark.parametrize("groups", [(full(),), (full(), window(8)), (full(), state())], ids=["full", "window", "state"])
@pytest.mark.parametrize("condition", [in_flight, executed, free, recovered], ids=lambda condition: condition.__name__)
def test_a_full_collection_visits_no_keys(groups, condition):
    few, many = counts(groups, condition)
    assert many.keys >= few.keys + 17
    assert many.visited == few.visited


def test_a_full_collection_visits_named_tuples(monkeypatch):
    """The count of this file sees them: a collection never stops tracking an instance of a subclass of tuple."""
    real = BlockPool.register
    monkeypatch.setattr(BlockPool, "register", lambda pool, block, key, length: real(pool, block, Named(*key), length))
    few, many = counts((full(),), free)
    assert many.visited - few.visited == many.keys - few.keys == 18
