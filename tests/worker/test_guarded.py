"""Workers of a service with authentication, and what other users of their host cannot read."""

from __future__ import annotations

import stat

import pytest

from kvplane import NotFound, connect
from kvplane.base.sources import LayerSource
from kvplane.rpc.access import Access
from kvplane_worker.attach import describe
from kvplane_worker.lending.rundir import shared_prefix
from kvplane_worker.memory.shared import SHM_FOLDER
from tests.service.guarded import Guard
from tests.service.rig import running
from tests.worker import children
from tests.worker.rig import BLOCKS, LAYERS, World


@pytest.fixture
def here(tmp_path):
    guard = Guard(tmp_path, {"acme": {"replicas": ["r"]}, "rival": {}})
    with running(guard.config(worker_lease_ms=60_000)) as service:
        world = World(service, tmp_path)
        with connect(service.address, token="token-acme") as client:
            client.register_replica("r", LayerSource(layers=LAYERS, num_blocks=BLOCKS, max_model_len=256))
        yield world
        world.end()


def start(here: World, token: str) -> object:
    """Start a worker with this token. Returns its address or its error."""
    options = here.options()
    access = Access(None, token)
    given = type(options)(options.service, "r", 0, "cpu", options.run_dir, 1 << 16, access=access)
    return here.start(children.worker, given).receive()


def test_worker_with_auth_sends_its_token_and_keeps_pages_private(here):
    address = start(here, "token-acme")
    assert isinstance(address, str)
    assert describe(address).replica == "r"
    run_dir = here.options().run_dir
    assert run_dir is not None
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert {stat.S_IMODE((run_dir / name).stat().st_mode) for name in ("token", "lock", "worker.json")} == {0o600}
    shared = list(SHM_FOLDER.glob(f"{shared_prefix(run_dir)}*"))
    assert shared
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared} == {0o600}


def test_worker_of_another_owner_gets_not_found(here):
    refused = start(here, "token-rival")
    assert not isinstance(refused, str)
    assert NotFound.__name__ in repr(refused) or isinstance(refused, NotFound)
