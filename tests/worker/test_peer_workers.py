"""Worker processes of two replicas: each learns of the other by its renewals, maps its memory, and reports it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker.nixl.messages import PACKAGES
from kvplane_worker.nixl.transport import PeerTransport
from tests.service.rig import until
from tests.worker.rig import World, world

TIERS = (TierSpec(TierKind.HOST, 8), TierSpec(TierKind.PEERS, 24))
LEASE_MS = 600


needs_nixl = pytest.mark.skipif(
    not any(find_spec(name) for name in PACKAGES), reason="NIXL is not installed: pip install '.[nixl]'"
)


def incarnation_of(here: World, name: str) -> bytes:
    return here.shown(name)[0].host_incarnation


def mapped_by(here: World, name: str) -> set[bytes]:
    return {one for worker in here.shown(name) for one in worker.mapped}


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have noticed."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@needs_nixl
def test_workers_read_the_host_tiers_of_their_namespace_over_nixl(tmp_path: Path):
    with world(tmp_path, worker_lease_ms=LEASE_MS) as here:
        for name in ("a", "b"):
            here.register(name, namespace=b"weights", tiers=TIERS)
        first, _ = here.worker(replica="a", folder="a", peer_transport=PeerTransport.NIXL_ONLY)
        here.worker(replica="b", folder="b", peer_transport=PeerTransport.NIXL_ONLY)
        until(lambda: mapped_by(here, "a") == {incarnation_of(here, "b")} and len(mapped_by(here, "b")) == 1)
        assert [here.shown(name)[0].nixl_peers for name in ("a", "b")] == [1, 1]
        assert here.shown("b")[0].nixl_arena == b"", "metadata is for workers that may read the memory"
        (agent,) = map(int, Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split())
        first.kill()
        until(lambda: has_ended(agent))
        until(lambda: mapped_by(here, "b") == set())
        assert here.shown("b")[0].nixl_peers == 0
        here.worker(replica="a", folder="a")
        until(lambda: mapped_by(here, "a") == {incarnation_of(here, "b")})
        assert here.shown("a")[0].nixl_peers == 0, "mapped: on this host, and it has no NIXL"
        assert mapped_by(here, "b") == set(), "it may read over NIXL alone, and this one is not lent so"


def test_workers_map_the_host_tiers_of_their_namespace_and_no_others(tmp_path: Path):
    with world(tmp_path, worker_lease_ms=LEASE_MS) as here:
        for name in ("a", "b"):
            here.register(name, namespace=b"weights", tiers=TIERS)
        here.register("c", namespace=b"other weights", tiers=TIERS)
        workers = {name: here.worker(replica=name, folder=name)[0] for name in "abc"}
        names = {name: incarnation_of(here, name) for name in "abc"}
        assert len(set(names.values())) == 3
        until(lambda: mapped_by(here, "a") == {names["b"]} and mapped_by(here, "b") == {names["a"]})
        assert mapped_by(here, "c") == set()
        workers["a"].kill()
        until(lambda: mapped_by(here, "b") == set())
        here.worker(replica="a", folder="a")
        again = incarnation_of(here, "a")
        assert again not in names.values()
        until(lambda: mapped_by(here, "b") == {again})
