"""Fleets without sockets: places whose events tests apply directly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from kvplane.base.groups import HashAlgorithm
from kvplane_fleet.decisions import Ask, Decision, Decisions
from kvplane_fleet.domains import Domain, keys_of
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings, RouterSettings
from kvplane_fleet.slices import Sliced
from kvplane_fleet.wire.events import KEY_BYTES, WHOLE_KEY_BYTES, Batch, Evidence, GroupFormat, Removed, Stored, Tier

BLOCK = 16
DOMAIN = Domain(HashAlgorithm.SHA256, "", BLOCK)
FULL = GroupFormat("full_attention", BLOCK, 0)
WINDOW = GroupFormat("sliding_window", BLOCK, 2 * BLOCK)
GROUPS = (FULL, WINDOW)
NO_EVENTS = "inproc://none"
T = TypeVar("T")


def finished(work: Sliced[T]) -> T:
    """Do all slices at once, and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def keys_in(index: Index | NativeIndex, cell: int, width: int = WHOLE_KEY_BYTES) -> Counter[int]:
    """The keys of a cell, with their numbers of copies."""
    return Counter(keys_of(index.packed_keys(cell, width), width, width))


def content(place: Place) -> dict[tuple[Tier, int], Counter[int]]:
    """The keys by tier and group, with their numbers of copies."""
    width = place.key_bytes or KEY_BYTES
    return {named: keys_in(place._index, cell, width) for named, cell in place.cells.items()}


def tokens(seed: int, blocks: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1000) for _ in range(blocks * BLOCK)]


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Scene:
    """Connected places of one model, with a router's decisions about them."""

    def __init__(self, *names: str, groups: Sequence[GroupFormat] = (FULL,), **settings: object) -> None:
        self.clock, self.fleet, self.groups = Clock(), Fleet(), groups
        self.decisions = Decisions(self.fleet, RouterSettings(**settings), self.clock)  # type: ignore[arg-type]
        for name in names:
            self.fleet.add(PlaceSettings(name, events=NO_EVENTS, model="m")).source.is_connected = True
            self.stores(name, tokens(999, 3))  # proves the domain
            self.removes(name, tokens(999, 3))

    def place(self, name: str) -> Place:
        return self.fleet.followed[name].place

    def stores(self, name: str, prompt: Sequence[int], only: int | None = None) -> None:
        """The place caches a prompt, in all groups or one."""
        keys = DOMAIN.keys(prompt)
        events = [
            Stored(group, Tier.DEVICE, keys, form, Evidence(prompt, None, True))
            for group, form in enumerate(self.groups)
            if only in (None, group)
        ]
        finished(self.place(name).applying_batch(Batch(0.0, events)))

    def removes(self, name: str, prompt: Sequence[int], only: int | None = None) -> None:
        keys = DOMAIN.keys(prompt)
        groups = [group for group in range(len(self.groups)) if only in (None, group)]
        finished(self.place(name).applying_batch(Batch(0.0, [Removed(group, Tier.DEVICE, keys) for group in groups])))

    def score(self, prompt: Sequence[int], book: bool = False, **asked: object) -> Decision:
        ask = Ask("m", Prompt(prompt), book=book, **asked)  # type: ignore[arg-type]
        return self.decisions.score(ask, {DOMAIN: ask.prompt.keys_of(DOMAIN)})

    def book(self, prompt: Sequence[int], **asked: object) -> tuple[str, str]:
        """Return the chosen place and the decision's id."""
        decision = self.score(prompt, book=True, **asked)
        return decision.places[0].claim.place, decision.name


def chosen(decision: Decision) -> str:
    return decision.places[0].claim.place
