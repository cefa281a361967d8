"""A worker whose service stops registers at the next service of its list, with its pages."""

from __future__ import annotations

from dataclasses import replace

import grpc

from kvplane.base.sources import LayerSource
from kvplane.blocking.client import connect
from kvplane_service.config import Config
from tests.service.rig import Service, running, until
from tests.store import servers
from tests.worker import children
from tests.worker.rig import BLOCKS, LAYERS, World

LEASE_MS = 300


def test_worker_is_bound_to_its_replica(tmp_path):
    with servers.serving(tmp_path / "redis") as redis, running(config_of(redis)) as second:
        with running(config_of(redis)) as first:
            here = World(first, tmp_path)
            with connect(first.address) as client:
                client.register_replica("r", LayerSource(layers=LAYERS, num_blocks=BLOCKS, max_model_len=256))
            options = replace(here.options(), service=f"{first.address},{second.address}")
            child = here.start(children.worker, options)
            child.receive()
            (before,) = first.describe().workers
        try:
            until(lambda: knows_a_worker(second))
            (after,) = second.describe().workers
            assert (after.worker_id, after.incarnation) == (before.worker_id, before.incarnation)
        finally:
            here.end()


def config_of(redis: servers.Server) -> Config:
    """A service on a fixed port: its address is its name in the store."""
    return Config(
        listen=f"127.0.0.1:{servers.free_port()}",
        store=f"redis://{redis.address}",
        owner_lease_ms=LEASE_MS,
        worker_lease_ms=LEASE_MS,
    )


def knows_a_worker(service: Service) -> bool:
    try:
        return bool(service.describe().workers)
    except grpc.RpcError:
        return False
