"""Every twin patches existing names of the product, and restores them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvplane.base.errors import StaleEpoch
from kvplane.base.stamp_table import StampTable, table_bytes
from tests.twins import TWINS, Patch, weakened

ISSUED = """
    no stamp check, no restamp on key moves, sealed check removed, fencing removed, incarnation ignored,
    one rank unchecked, publication before execution, orders run twice, lease expiry frees pages,
    launches without an answer keep their stamps, new life during a load, resume forgets held pages,
    a removal of a held key is swallowed, withdrawn keys stay shown,
    shared executor, releases before notices, lapse by own delay,
    checkpoint of rejected drafts,
    state of rejected drafts, load before launches, load behind writers only, load into a block of the hit,
    load before stamps, zero after load, image skips shared blocks, image skips blocks before a key,
    an eviction leaves tiers,
    keys under a state, stamps under a state, stamp of a divided state, stamps of an ended life,
    load over a superblock in use, held states are blocks of attention,
    copy of an evicted state, image loses blocks behind the computed tokens,
    skipped blocks released during a load, open step without load_after, limit of a hit counts what is left out,
    classes as stated, chunk of the longest hit, end aligned twice, retained blocks needed, limit searched once,
    withdrawn keys stay away,
    a load outlives its row, orders end when they are given, load concurrent with launches of the previous life,
    lives known by their number,
    owner epoch ignored, failed orders forgotten, two owners write, a drain loses what waits,
    a process that continues trims the log, a cancel that leaks, no deadline of a step, no deadline of the store,
    release fails on the log of another process, loads known by name,
    the lease is renewed after the records are read,
    no compare-and-set, a grant comes back as it was, grants without an end, leases by wall clocks,
    epochs count from the table,
    preempted requests are forgotten, keys outlive their memory, what is cleared stays claimed,
    a lost table is complete, owners are dropped early, grants held for a lease, a deleted Lease comes back,
    epoch raised by a forged row, unsealed record accepted, record of another place accepted,
    redirect followed blindly, limit checked after building,
    idle check over a change,
    saved before execution, saves of pages that changed, tier load before launches, loads done on one rank,
    a reset leaves tiers, stored incarnation forgotten, keys are not compared with the prompt,
    what has no name is a key, rows of callers join an image, states below a hit,
    states below known tokens, states below an outcome,
    runs before its load is done, content not in the seal, jobs of an earlier engine not awaited,
    host slots of another memory prove keys, slots of another disk prove keys,
    held keys are read, changes of blocks that are not read yet count,
    a service that comes back is the owner, specs as stated,
    a refused call begins a life, callers wait for the next engine, a repeat is asked again,
    what diverged stays shown, lag limit ignored, repeats applied again, answers not compared, image of several steps
"""


def test_twins_are_the_required_ones():
    assert sorted(TWINS) == sorted(" ".join(name.split()) for name in ISSUED.split(","))


# The cheapest test that catches each twin that hangs, or that needs a forged store.
CAUGHT_BY = {
    **dict.fromkeys(
        [
            *(
                "no compare-and-set",
                "a grant comes back as it was",
                "grants without an end",
                "leases by wall clocks",
                "epochs count from the table",
            ),
            *("preempted requests are forgotten", "keys outlive their memory", "what is cleared stays claimed"),
        ],
        "fleet/planted.py",
    ),
    "shared executor": "cli/test_hung.py",
    "releases before notices": "cli/test_hung.py",
    "lapse by own delay": "service/test_lifecycle.py",
    "no deadline of a step": "client/test_deadlines.py",
    "no deadline of the store": "sim/test_hanging.py",
    "a process that continues trims the log": "store/test_ownership.py",
    "release fails on the log of another process": "sim/test_hanging.py",
    "loads known by name": "store/test_changing_owners.py",
    "lives known by their number": "store/test_equal_epochs.py",
    "the lease is renewed after the records are read": "store/test_ownership.py",
    "epoch raised by a forged row": "store/test_seals.py",
    "unsealed record accepted": "store/test_seals.py",
    "record of another place accepted": "store/test_seals.py",
    "redirect followed blindly": "cli/test_moved.py",
    "limit checked after building": "service/auth/test_quotas.py",
    "a cancel that leaks": "client/test_cancelling.py",
    "a service that comes back is the owner": "store/test_released_elsewhere.py",
    "specs as stated": "service/test_mirror_random.py",
    "a refused call begins a life": "service/test_calls_between_sessions.py",
    "callers wait for the next engine": "service/test_calls_between_sessions.py",
    "a repeat is asked again": "service/test_calls_between_sessions.py",
}


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_twin_without_a_campaign_has_a_test(name):
    assert name in TWINS
    assert f'"{name}"' in (Path(__file__).parent / CAUGHT_BY[name]).read_text()


@pytest.mark.parametrize("name", TWINS)
def test_twin_patches_and_restores_the_product(name):
    found = [patch.find() for patch in TWINS[name].patches]
    with weakened(name) as twin:
        assert twin.rule
        assert all(vars(owner)[attribute] is not real for owner, attribute, real in found)
    assert all(vars(owner)[attribute] is real for owner, attribute, real in found)


def test_patch_of_a_missing_name_is_an_error():
    for path in ("kvplane.rank:Rank.no_such_name", "kvplane.rank:NoSuchClass.carry_out"):
        with pytest.raises(LookupError, match="has gone"):
            Patch(path, lambda real: real).find()


def test_stamp_table_without_fencing_accepts_any_epoch():
    table = StampTable.create(bytearray(table_bytes(4)), 4, incarnation=1)
    table.claim(7)
    with pytest.raises(StaleEpoch):
        table.check_owner(6)
    with weakened("fencing removed"):
        table.check_owner(6)


def test_program_runs_with_a_twin():
    wrong = subprocess.run([sys.executable, "-m", "tests.twins", "no such twin", "kvplane"], capture_output=True)
    assert wrong.returncode == 1
    assert b"orders run twice" in wrong.stderr
    for program, says in (["kvplane", "version"], b"kvplane"), (["json.tool", "--help"], b"json"):
        command = [sys.executable, "-m", "tests.twins", "orders run twice", *program]
        right = subprocess.run(command, capture_output=True, check=True)
        assert says in right.stdout
