"""The check of the compiled core finds damage of its own structures, by the name of the invariant that is violated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import native_build
from kvplane.base.errors import InvalidArgument
from kvplane_core.face.inspect import check
from kvplane_core.face.interface import BrokenInvariant
from kvplane_core.spec import invariants
from tests.core import native_damage
from tests.core.test_invariants import FAULTS, NAME

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
ONLY_PYTHON = {"packed_keys"}  # recovered keys that are not in the index yet


def test_each_damage_is_found_by_its_name():
    """In a private library, which is compiled without optimization once per version of the sources."""
    if shutil.which(native_build._compiler()[0]) is None:
        pytest.skip("there is no compiler")
    command = [sys.executable, "-m", "tests.core.native_damage"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "WRONG" in line] or done
    assert done.stdout.count("\n") == len(native_damage.DAMAGES) + 2


def test_each_invariant_of_both_cores_has_a_damage_of_the_compiled_one():
    named = {damage.invariant for damage in native_damage.DAMAGES}
    with open(invariants.__file__) as source:
        assert set(NAME.findall(source.read())) - ONLY_PYTHON <= named


def test_damages_have_different_places():
    places = [(damage.name, damage.state) for damage in native_damage.DAMAGES]
    assert len(set(places)) == len(places)


def finding(engine):
    """What the check of a compiled core with the engine's state finds; None for a state that is not loaded."""
    try:
        check(native.NativeReplica.of(engine.replica))
    except BrokenInvariant as found:
        return found
    except (AssertionError, InvalidArgument):
        return None
    return None


@pytest.mark.specification
def test_both_cores_say_the_same_of_a_state_that_both_can_have():
    """What an exported state says of a fault that was planted in the Python core."""
    equal = 0
    for name, prepare, plant, _ in FAULTS:
        engine = prepare()
        plant(engine)
        with pytest.raises(BrokenInvariant) as of_python:
            check(engine.replica)
        found = finding(engine)
        if found is not None and found.invariant == name:
            assert str(found) == str(of_python.value)
            equal += 1
    assert equal >= 20
