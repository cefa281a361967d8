"""The compiled core checks what its callers did not, keeps what it lends, and is not used after a failure."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from array import array
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvplane.base.errors import InternalError, InvalidArgument
from kvplane.base.step import Admit, Budget, End, Facts, News, Part, Peek, Step
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.replica import Replica
from tests.core.builders import full, replica_spec

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
_native = native._native


def with_request(spec, tokens=8, num_steps=1):
    """A replica with one running request."""
    replica = Replica(spec)
    news = News([0], [tokens], list(range(tokens)))
    replica.apply(Step(0, 1, [Part(news=news, admit=Admit([0]), budget=Budget(tokens))]))
    for seq in range(2, num_steps + 1):
        replica.apply(Step(0, seq, [Part()], executed_through=seq - 1))
    return replica


# -- columns ---------------------------------------------------------------------------------------------------------


def test_a_column_keeps_the_core_that_it_reads():
    column = native.NativeReplica.of(with_request(replica_spec(full()))).requests.num_tokens
    gc.collect()
    others = [native.NativeReplica(replica_spec(full())) for _ in range(3)]
    assert (len(column), column[0], column[-1]) == (1 << 14, 8, 0)
    assert not any(one.requests.num_tokens[0] for one in others)
    with pytest.raises(IndexError):
        column[1 << 14]


def test_an_entry_of_a_column_is_read_after_the_step_that_runs():
    """The interpreter runs the reader only while the step has given up its lock, or after the step."""
    count = 4 * 4096
    replica = native.NativeReplica.of(with_request(replica_spec(full(), num_blocks=5000, max_model_len=1 << 20), count))
    replica.apply(Step(0, 2, [Part(news=News([1], [count], list(range(count))))], executed_through=1))
    ended: list[int] = []
    column, seen, begun = replica.requests.num_tokens, [], threading.Event()

    def read():
        begun.wait()
        seen.append((column[0], list(ended)))

    interval = sys.getswitchinterval()
    for seq in range(3, 13):
        part = Part(facts=Facts([0], appended=[1], tokens=[1]), peek=Peek([1] * 100))
        reader = threading.Thread(target=read)
        reader.start()
        sys.setswitchinterval(1000)
        try:
            begun.set()
            replica.apply_concurrently(Step(0, seq, [part]))
            ended.append(seq)
        finally:
            sys.setswitchinterval(interval)
        reader.join()
        begun.clear()
        assert seen.pop() == (count + len(ended), ended)


# -- failures in the middle of a change ------------------------------------------------------------------------------


def fails_in_its_middle(replica, seq=2):
    """Frees the request, whose block has no reference."""
    replica.apply(Step(0, seq, [Part(facts=Facts([0], end=[int(End.FREE)]))], executed_through=seq - 1))


def broken():
    given = with_request(replica_spec(full()))
    given.coordinator.pool.references[given.coordinator.tables(0)[0][0]] = 0
    replica = native.NativeReplica.of(given)
    with pytest.raises(AssertionError, match="without references"):
        fails_in_its_middle(replica)
    return replica


def test_a_core_that_failed_in_a_change_answers_nothing_but_counts():
    replica = broken()
    column = replica.requests.computed
    calls = [
        lambda: replica.apply(Step(0, 3, [Part()], executed_through=2)),
        lambda: replica.apply_concurrently(Step(0, 3, [Part()], executed_through=2)),
        lambda: replica.lookup([b"d" * 32], "", 100),
        lambda: replica.peek_slot(0),
        lambda: column[0],
        lambda: replica.requests.slots(),
        lambda: replica.entries(),
        lambda: list(replica.stored_events()),
        lambda: replica.blocks_of("", 0, b"d" * 32),
        lambda: replica.shorten_chunk(0, 0, 1),
        lambda: replica.take_events(),
        lambda: replica.begin_epoch(1),
        lambda: replica.enter_epoch(1),
        lambda: replica.store_empty_ranges(),
        lambda: export_state(replica),
    ]
    for call in calls:
        with pytest.raises(InternalError, match="failed in the middle") as caught:
            call()
        assert caught.value.remedy == "register the replica again, or load its state"
    assert replica.counters.admitted == 1
    assert sum(replica.block_counts) == 100
    assert len(replica.group_counters()) == len(replica.common_prefix_blocks()) == 1


def test_a_core_that_failed_takes_over_a_state():
    replica = broken()
    replica.adopt(with_request(replica.spec))
    fails_in_its_middle(replica)
    assert replica.num_running == 0


def test_a_state_that_cannot_be_loaded_leaves_the_core_as_it_was():
    replica = native.NativeReplica.of(with_request(replica_spec(full())))
    before, damaged = digest(replica), with_request(replica.spec)
    damaged.coordinator.pool.stamp = damaged.coordinator.pool.stamp[:-1]
    with pytest.raises(InvalidArgument, match=r"pool.stamp has another number of blocks"):
        replica.adopt(damaged)
    assert digest(replica) == before


@contextmanager
def little_memory(more):
    """Lets this process allocate this many bytes more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the address sanitizer reserves all memory")
def test_a_core_without_memory_in_a_step_raises_memory_error_and_is_not_used_again():
    spec = replica_spec(full(), num_blocks=20_001, max_model_len=1 << 20)
    replica = native.NativeReplica.of(with_request(spec, 80_000, 2))
    content = list(replica.requests.hashes(0))
    step = Step(
        0, 3, [Part(news=News([1], [80_000], num_hashes=[len(content)], hashes=b"".join(content)),
                    peek=Peek([1] * 5000, with_blocks=True))], executed_through=2,
    )  # fmt: skip
    with little_memory(100 << 20), pytest.raises(MemoryError):
        replica.apply(step)  # the hits have 100 million blocks
    with pytest.raises(InternalError, match="failed in the middle"):
        replica.apply(replace(step, parts=[Part()]))


# -- arguments -------------------------------------------------------------------------------------------------------


def capsule(*groups, **changes):
    return native.NativeReplica.of(with_request(replica_spec(*(groups or (full(),)), **changes))).core


def begin_save(core, shown=(), run=4096):
    return _native.read(core, "image", b"", shown or array("Q"), [], True, False, run)


def saved(core):
    """The image of a core."""
    return b"".join(iter(partial(_native.advance, begin_save(core)), None))


def recovered(core, **changes):
    """The arguments of `prepare` for a pool of 101 blocks with one key."""
    given = {
        "pairs": [("", 0)], "pair": array("I", [0]), "block": array("I", [1]), "digests": b"d" * 32, "size": 32,
        "key_tokens": array("I", [0, 4] + [0] * 99), "stamp": array("Q", [0] * 101),
        "free": array("I", range(1, 101)), "further": [],
    }  # fmt: skip
    return core, "prepare", *{**given, **changes}.values()


HASHING = bytes(32), None
SPEC_OF_50: tuple[list[int], list[list[int]], list[tuple[int, int]], tuple[bytes, None]] = (
    native.settings(replica_spec(full(), num_blocks=50), 32),
    [native.of_group(full())],
    [],
    HASHING,
)
ARGUMENTS = {
    "begin_end with slices of no block": lambda core: _native.read(core, "end_epoch", array("Q"), 0),
    "begin_end with slices of more blocks than there are numbers":
        lambda core: _native.read(core, "end_epoch", array("Q"), (1 << 63) - 1),
    "begin_end with stamps of another size": lambda core: _native.read(core, "end_epoch", array("I", [0] * 101), 10),
    "enter_epoch with a number of 25 bits":
        lambda core: _native.change(core, "enter_epoch", 1 << 24, [], False, array("Q")),
    "enter_epoch with a negative number": lambda core: _native.change(core, "enter_epoch", -1, [], False, array("Q")),
    "enter_epoch with a block behind the last":
        lambda core: _native.change(core, "enter_epoch", 1, [101], False, array("Q")),
    "align_chunk from a negative position": lambda core: _native.read(core, "shorten_chunk", 0, -5, 1),
    "align_chunk from a position of 2^62": lambda core: _native.read(core, "shorten_chunk", 0, 1 << 62, 1),
    "align_chunk of a slot without a request": lambda core: _native.read(core, "shorten_chunk", 5, 0, 1),
    "align_chunk of a negative length": lambda core: _native.read(core, "shorten_chunk", 0, 0, -1),
    "first_blocks of a group that is not there": lambda core: _native.read(core, "first_blocks", "", [1], b"d" * 32, 0),
    "blocks of a negative group": lambda core: _native.read(core, "blocks_of", "", -1, b"d" * 32),
    "prepare with a further key of a block behind the last":
        lambda core: _native.change(*recovered(core, further=[(101, (0, b"d" * 32))])),
    "prepare with a further key of no group":
        lambda core: _native.change(*recovered(core, further=[(1, (1, b"d" * 32))])),
    "prepare with a key of a block behind the last":
        lambda core: _native.change(*recovered(core, block=array("I", [101]))),
    "prepare with a group that is not there": lambda core: _native.change(*recovered(core, pairs=[("", 1)])),
    "prepare with stamps of few blocks": lambda core: _native.change(*recovered(core, stamp=array("Q", [0]))),
    "prepare with stamps of another size": lambda core: _native.change(*recovered(core, stamp=array("I", [0] * 202))),
    "prepare with a free list that has the null block":
        lambda core: _native.change(*recovered(core, free=array("I", range(100)))),
    "prepare with a free list that has a block twice":
        lambda core: _native.change(*recovered(core, free=array("I", [1, 1]))),
    "install of a pool of another size":
        lambda core: _native.change(_native.new(*SPEC_OF_50), "install", _native.change(*recovered(core)), []),
    "begin_save with entries of no block": lambda core: begin_save(core, run=0),
    "begin_save with stamps of another size": lambda core: begin_save(core, shown=array("I", [0])),
    "load into a core that is used": lambda core: _native.change(core, "load", [b""], saved(core)),
    "new with blocks of 0 tokens": lambda _: _native.new(SPEC_OF_50[0], [[0, 0, *SPEC_OF_50[1][0][2:]]], [], HASHING),
    "new with hashes of 0 tokens":
        lambda _: _native.new([50, 4096, 0, *SPEC_OF_50[0][3:]], SPEC_OF_50[1], [], HASHING),
    "new with chunks of 0 tokens":
        lambda _: _native.new(SPEC_OF_50[0], [[4, 4, 0, 0, *SPEC_OF_50[1][0][4:]]], [], HASHING),
    "new with a tier of no slot": lambda _: _native.new(*SPEC_OF_50[:2], [(1, 0)], HASHING),
    "new with tiers of more slots than there are ids": lambda _: _native.new(*SPEC_OF_50[:2], [(1, 1 << 40)], HASHING),
    "new with a first digest of another size": lambda _: _native.new(*SPEC_OF_50[:3], (bytes(16), None)),
    "new with a hash function of another kind": lambda _: _native.new(*SPEC_OF_50[:3], (bytes(32), (capsule(), 0))),
    "a question that is not there": lambda core: _native.read(core, "answer"),
    "a question with too many values": lambda core: _native.read(core, "seq", 1),
    "set_hash_tail of a slot without a request": lambda core: _native.change(core, "set_hash_tail", 5, b""),
    "set_hash_tail of a whole block": lambda core: _native.change(core, "set_hash_tail", 0, bytes(16)),
    "tier_keys of a tier that is not there": lambda core: _native.read(core, "tier_keys", 0, -1, 9),
    "tier_of a negative group": lambda core: _native.read(core, "tier_of", "", -1, b"d" * 32),
    "keys of a slot without tiers": lambda core: _native.read(core, "keys", [101]),
    "install of slots without tiers":
        lambda core: _native.change(core, "install", _native.change(*recovered(core)), [(101, "", 0, b"d" * 32, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_no_caller_checked_is_refused_and_changes_nothing(name):
    core = capsule()
    before = saved(core)
    with pytest.raises((ValueError, AssertionError)):
        ARGUMENTS[name](core)
    assert saved(core) == before


def test_the_arguments_of_these_tests_are_refused_for_the_fault_that_they_name():
    core = capsule()
    _native.change(native.NativeReplica(replica_spec(full())).core, "install", _native.change(*recovered(core)), [])
    _native.new(*SPEC_OF_50)
    assert _native.advance(_native.read(core, "end_epoch", array("Q", [0] * 101), 10)) is True
