"""The core decides as its CORE_VERSION says."""

from __future__ import annotations

import pytest

from kvplane import wire
from kvplane_core.face.state import digest_as_stated, export_state, spec_digest
from kvplane_core.spec.loading import load_state
from kvplane_service.decisions.recording import Frames
from kvplane_tools.replay.from_log import replay_log
from tests.core.compared import in_services
from tests.core.core_version import STEPS, files
from tests.twins import weakened

CHANGED = "the core decides otherwise: raise CORE_VERSION, then run python -m tests.core.core_version"


def test_the_version_has_recordings():
    assert len(files()) > 10, "run python -m tests.core.core_version"


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_equal_steps_have_the_recorded_results(path):
    with in_services():
        outcome = replay_log(path)
    assert outcome.decisions == STEPS
    assert outcome.identical == STEPS, CHANGED


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_the_exported_state_has_the_recorded_bytes(path):
    """But for the digest of the spec, which was that of the spec as stated."""
    header, life, *_ = Frames(path)
    spec = wire.decode_spec(header.header.spec)
    recorded = life.life.state.replace(digest_as_stated(spec), spec_digest(spec))
    assert export_state(load_state(spec, life.life.state)) == recorded, CHANGED


@pytest.mark.parametrize("twin", ["no restamp on key moves", "zero after load", "load before launches"])
def test_a_changed_rule_shows(twin):
    with weakened(twin):
        outcomes = [replay_log(path) for path in files()]
    assert any(one.identical < one.decisions for one in outcomes)
