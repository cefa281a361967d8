"""What the router claims that an engine may load from its peers is what that engine loads."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.events import EventBatch
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.follow.replica_source import ReplicaSource
from kvplane_fleet.settings import PlaceSettings
from tests.engine.reference.config import BOS
from tests.engine.reference.request import Request
from tests.engine.stress import DENSE, FULL
from tests.peers.campaign import GROUPS, leaks_of
from tests.peers.site import Site, pool_of
from tests.router.fleets import finished

ENGINES, IDLE_STEPS = 3, 8


class Follower:
    """A fleet that has all events of the engines of a site."""

    def __init__(self, site: Site) -> None:
        self.fleet, self._site, self._seq = Fleet(), site, dict.fromkeys((one.name for one in site.worlds), 0)
        for world in site.worlds:
            source = self.fleet.add(PlaceSettings(world.name, service="127.0.0.1:1", model="m")).source
            entry = site.registry.get(world.name)
            assert isinstance(source, ReplicaSource)
            assert entry.namespace is not None
            source._use(entry.host.replica.spec, entry.namespace.name)
            source.is_connected = True

    def catch_up(self) -> None:
        """Let all engines report what they saved, and apply their events."""
        for world in self._site.worlds:
            for _ in range(IDLE_STEPS):
                world.engine.step()
        for name, seq in self._seq.items():
            source = self.fleet.followed[name].source
            assert isinstance(source, ReplicaSource)
            for batch in self._site.registry.get(name).host.events.after(seq):
                finished(source._taking(EventBatch(batch.seq, batch.epoch, tuple(batch.events), batch.gap)))
                self._seq[name] = batch.seq


@pytest.mark.parametrize("groups", ["full", *GROUPS])
def test_a_claim_with_peers_is_what_the_engine_loads(groups: str) -> None:
    rng, layers = Random(7), GROUPS.get(groups, (FULL,))
    sizes = {"num_blocks": 30 * len(layers) ** 2, "max_model_len": 200}
    site = Site(ENGINES, pool_of(ENGINES, layers, 60 * len(layers), **sizes, **(DENSE if len(layers) > 1 else {})))
    site.connect()
    follower = Follower(site)
    prompts = [[BOS, *(rng.randrange(256) for _ in range(rng.randrange(60, 160)))] for _ in range(9)]
    own = lent = 0
    for number in range(60):
        world = rng.choice(site.worlds)
        prompt = [*rng.choice(prompts), *(rng.randrange(256) for _ in range(rng.randrange(1, 9)))]
        follower.catch_up()
        (claim,) = [one for one in follower.fleet.claims("m", Prompt(prompt)) if one.place == world.name]
        request = Request(f"q{number}", prompt, 1)
        world.engine.add(request)
        while world.engine.has_work:
            world.engine.step()
        assert request.hits[-1] == claim.reachable, (number, claim)
        own, lent = own + claim.expected + claim.host, lent + claim.peers
        assert bool(claim.peers) == bool(claim.peer)
        assert claim.peer != world.name
    assert min(own, lent) > 500
    assert not [leak for world in site.worlds for leak in leaks_of(world)]
    site.close()
