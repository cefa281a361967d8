"""An engine that decides itself, and `kvplane serve` as a process that is killed and started again."""

from __future__ import annotations

import kvplane
from kvplane.rpc.channel import open_channel
from kvplane.v1 import admin_pb2
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_core.face.state import digest
from kvplane_tools.replay.from_log import replay_log
from tests.cli.test_restart import wait_until_stored
from tests.cli.test_serve import serving
from tests.client.test_mirror import MirroredEngine, diverge, engine_on
from tests.service.rig import WAIT_S, running, until
from tests.store import servers


def test_a_divergence_is_described_and_recorded(kvplane, tmp_path):
    """The recording ends with the step that differed, and replays the service's answer to it."""
    with running() as service, engine_on(service) as engine:
        at = ("r", "--service", service.address)
        engine.advance(5)
        engine.check(service)
        code, _, error = kvplane("record", "r", str(tmp_path / "none"), "--divergence", *at[1:])
        assert code
        assert "has not diverged" in error
        diverge(service, engine)
        engine.advance(3)
        engine.check(service)
        _, out, _ = kvplane("describe", *at)
        assert "2 images, 1 divergence" in out
        assert "last divergence: the answer to step" in out
        code, out, error = kvplane("record", "r", str(tmp_path / "log"), "--divergence", *at[1:])
        assert not code, error
        step = service.describe().mirror.diverged_seq
    outcome = replay_log(tmp_path / "log")
    assert outcome.decisions == step  # the image is that of step 0
    assert outcome.identical == step - 1  # the state of the service was changed before the last one


def test_a_killed_service_continues_from_an_image(tmp_path):
    """The store of the killed process has entries of an earlier state; the engine's image replaces them."""
    address = f"127.0.0.1:{servers.free_port()}"
    settings = ("--set", f"store=sqlite:{tmp_path / 'entries.db'}", "--set", "store_flush_ms=5")
    engine = MirroredEngine(address)
    for life in range(3):
        with serving(*settings, listen=address) as (process, _), kvplane.connect(address) as client:
            until(lambda: engine.advance(1) or engine.sender.state.problem is None)
            engine.advance(20)
            assert engine.sender.wait_applied(WAIT_S), engine.sender.state
            with open_channel(address) as channel:
                snapshot = AdminStub(channel).Snapshot(admin_pb2.SnapshotRequest(replica="r", summary=True))
            assert snapshot.digest == digest(engine.replica)
            assert engine.sender.state.divergences == 0
            wait_until_stored(client)
            process.kill()
            process.wait()
        until(lambda: engine.sender.state.problem is not None)
        engine.advance(5)
        assert engine.sender.state.images >= life + 1
    engine.sender.close()
