"""All places: follows them, and claims what each would hit of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import zmq.asyncio

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane_fleet.domains import Domain
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.follow.zmq_source import ZmqSource
from kvplane_fleet.hits import Claim
from kvplane_fleet.index import Found, Index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings


@asynccontextmanager
async def following(fleet: Fleet, places: Iterable[PlaceSettings]) -> AsyncIterator[None]:
    """Follow the places while the context is entered. A bug in following a place is raised at the end."""
    context = zmq.asyncio.Context()
    for place in places:
        fleet.add(place)
    tasks = [asyncio.create_task(fleet.follow(name, context)) for name in fleet.followed]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
    for end in ends:
        if isinstance(end, Exception):
            raise end


@dataclass(frozen=True, slots=True)
class Followed:
    """A place and its source."""

    place: Place
    order: SourceOrder
    source: ZmqSource


@dataclass(frozen=True, slots=True)
class PlaceClaim:
    """What one place would hit.

    Attributes:
        place: name of the place.
        tokens: length of the hit; 0 if it cannot be computed.
        claim: the claim in detail; None if it cannot be computed.
        inexact: why the hit of the engine may be another; "" if it is this one.
    """

    place: str
    tokens: int
    claim: Claim | None
    inexact: str


class Fleet:
    """The places that are followed; see `following`."""

    def __init__(self) -> None:
        self.index = Index()
        self.followed: dict[str, Followed] = {}

    def add(self, settings: PlaceSettings) -> Followed:
        """Add a place, which `follow` then follows."""
        place = Place(settings, self.index)
        order = SourceOrder(place, place.faults, can_replay=settings.replay is not None)
        source = ZmqSource((settings.events, settings.replay), settings.topic, order, place.faults)
        self.followed[settings.name] = one = Followed(place, order, source)
        return one

    async def follow(self, name: str, context: zmq.asyncio.Context) -> None:
        """Follow a place that was added, until the task is cancelled; its entries are removed then."""
        one = self.followed[name]
        try:
            await one.source.run(context)
        finally:
            del self.followed[name]
            one.place.release()

    async def wait_until_current(self) -> None:
        """Wait until every place is connected and its replay has ended."""
        await asyncio.gather(*(one.source.wait_until_current() for one in self.followed.values()))

    def claims(self, model: str, tokens: Sequence[int], extra: ExtraKeys = NO_EXTRA_KEYS) -> list[PlaceClaim]:
        """Return what each place of a model would hit of a prompt, the longest hit first. Raises InvalidArgument if a
        token is out of range.
        """
        found: dict[Domain, Found] = {}
        claims = []
        for name, one in self.followed.items():
            if one.place.settings.model == model:
                claims.append(self._claim(name, one, tokens, extra, found))
        return sorted(claims, key=lambda one: -one.tokens)

    def _claim(
        self, name: str, one: Followed, tokens: Sequence[int], extra: ExtraKeys, found: dict[Domain, Found]
    ) -> PlaceClaim:
        try:
            layout = one.place.layout()
        except InvalidArgument as error:
            return PlaceClaim(name, 0, None, str(error))
        domain = one.place.domain
        assert domain is not None, "a layout has a domain"
        if domain not in found:
            found[domain] = self.index.find(domain.keys(tokens, extra))
        claim = one.place.claim(found[domain], len(tokens))
        gone = "" if one.source.is_connected else "the engine is not connected"
        return PlaceClaim(name, claim.tokens, claim, layout.inexact or gone)
