"""An engine that decides itself, and `kvplane serve` as a process that is killed and started again."""

from __future__ import annotations

import kvplane
from kvplane.rpc.channel import open_channel
from kvplane.v1 import admin_pb2
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_service.core.inspect import digest
from tests.cli.test_restart import wait_until_stored
from tests.cli.test_serve import serving
from tests.client.test_mirror import MirroredEngine
from tests.service.rig import WAIT_S, until
from tests.store import servers


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
