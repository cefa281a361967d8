"""Watchers of the index: entries that are read part by part, and changes between the parts, are the place's content."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvplane.base.errors import LimitExceeded
from kvplane.v1 import routing_pb2 as pb
from kvplane_fleet.domains import keys_of
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.index import Index
from kvplane_fleet.native import make_index
from kvplane_fleet.router import watching as watching_module
from kvplane_fleet.router.watching import Watching
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import Batch, Cleared, Event, GroupFormat, Removed, Stored, Tier
from tests.router.fleets import NO_EVENTS, content, finished

FORMS = [GroupFormat("full_attention", 16, 0), GroupFormat("sliding_window", 16, 32)]


class Watched:
    """Two places whose entries change, and what a watcher of them knows."""

    def __init__(self, rng, index):
        self.rng, self.fleet = rng, Fleet()
        self.fleet.index = index
        for name in ("a", "b"):
            self.fleet.add(PlaceSettings(name, events=NO_EVENTS, model="m"))
        self.watching = Watching(self.fleet)
        self.known: dict[str, Counter[tuple[str, int, int]]] = {"a": Counter(), "b": Counter()}

    def place(self, name):
        return self.fleet.followed[name].place

    def change(self, count=20):
        """Store and remove keys, in groups and tiers; seldom all."""
        for _ in range(count):
            group, tier = self.rng.randrange(2), self.rng.choice([Tier.DEVICE, Tier.HOST])
            place, keys = self.place(self.rng.choice("ab")), [self.rng.randrange(1, 2000) << 40 for _ in range(9)]
            held = list(content(place).get((tier, group), {}))
            event: Event = Stored(group, tier, keys, FORMS[group])
            if held and self.rng.random() < 0.5:
                event = Removed(group, tier, self.rng.sample(held, min(9, len(held))))
            finished(place.applying_batch(Batch(1.0, [Cleared() if self.rng.random() < 0.003 else event])))

    def take(self, message):
        counts, kind = self.known[message.place], message.WhichOneof("change")
        if kind == "cleared":
            counts.clear()
            return
        part = getattr(message, kind)
        found = [(part.tier, part.group, key) for key in keys_of(part.keys, part.key_bytes or 8, part.key_bytes or 8)]
        (counts.update if kind == "stored" else counts.subtract)(found)

    def content(self, name):
        held = content(self.place(name)).items()
        return Counter({(tier.value, group, key): n for (tier, group), each in held for key, n in each.items()})


async def _to_the_end(stream):
    async for message in stream:
        assert isinstance(message, pb.WatchIndexResponse)


@pytest.mark.parametrize("index", [make_index, Index], ids=["selected", "python"])
@pytest.mark.parametrize("seed", range(8))
async def test_entries_and_changes_are_the_content_however_a_watcher_reads(index, seed, monkeypatch):
    monkeypatch.setattr(watching_module, "KEYS_AT_ONCE", 64)
    scene, messages, rounds = Watched(Random(seed), index()), 0, 40
    scene.change(400)
    stream = scene.watching.watch(["a", "b"])
    async for message in stream:
        if message.snapshot_end:
            break
        messages += 1
        scene.take(message)
        if (messages == 1 or scene.rng.random() < 0.1) and rounds:
            rounds -= 1
            scene.change()
    scene.change()
    (watcher,) = scene.watching._watchers
    while watcher.waiting:
        scene.take(await anext(stream))
    for name in ("a", "b"):
        assert +scene.known[name] == scene.content(name)
        assert not -scene.known[name]
    assert messages > 8
    await stream.aclose()
    assert not scene.place("a").watchers


async def test_what_is_stored_after_a_clear_between_two_parts_is_not_cleared_again(monkeypatch):
    monkeypatch.setattr(watching_module, "KEYS_AT_ONCE", 64)
    scene = Watched(Random(1), make_index())
    scene.change(400)
    stream = scene.watching.watch(["a", "b"])
    scene.take(await anext(stream))
    stored = Stored(0, Tier.DEVICE, list(range(1, 500)), FORMS[0])
    finished(scene.place("a").applying_batch(Batch(1.0, [Cleared(), stored])))
    while not (message := await anext(stream)).snapshot_end:
        scene.take(message)
    assert all(+scene.known[name] == scene.content(name) for name in ("a", "b"))
    await stream.aclose()


async def test_a_watcher_that_does_not_read_keeps_little_and_is_ended(monkeypatch):
    monkeypatch.setattr(watching_module, "KEYS_AT_ONCE", 64)
    monkeypatch.setattr(watching_module, "MAX_BYTES", 20_000)
    scene = Watched(Random(1), make_index())
    scene.change(400)
    stream = scene.watching.watch(["a", "b"])
    first = await anext(stream)
    assert len(first.stored.keys) < 8 * 400
    (watcher,) = scene.watching._watchers
    while not watcher.is_behind:
        scene.change()
    assert not watcher.waiting
    with pytest.raises(LimitExceeded, match="read faster"):
        await _to_the_end(stream)
    assert not scene.watching._watchers
