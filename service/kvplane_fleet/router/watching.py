"""The stream of the index: for each place its entries, then its changes, in order.

A watcher gets the changes of a place from the moment on at which the place's entries were read for it; no other call
runs in between. So entries and changes together are the place's content, and a watcher that is too slow is ended rather
than left out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import chain

from kvplane.base.errors import LimitExceeded, Unavailable
from kvplane.v1 import routing_pb2 as pb
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.places import Place
from kvplane_fleet.router import messages
from kvplane_fleet.wire.events import KEY_BYTES, Cleared, Event, GroupFormat, Removed, Stored, Tier

MAX_WATCHERS = 64
MAX_OF_OWNER = 16
MAX_BYTES = 16 << 20  # of changes that wait for a watcher
KEYS_AT_ONCE = 1 << 15


class _Watcher:
    """What waits to be sent to one caller."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.waiting: deque[pb.WatchIndexResponse] = deque()
        self.bytes = 0
        self.woken = asyncio.Event()
        self.is_behind = self.has_ended = False

    def take(self, place: str, event: Event) -> None:
        """A place has changed."""
        if self.is_behind:
            return
        message = _change(place, event)
        self.bytes += message.ByteSize()
        self.is_behind = self.bytes > MAX_BYTES
        self.waiting.append(message)
        self.woken.set()

    def sent(self) -> pb.WatchIndexResponse:
        """Return the next message, which no longer waits."""
        message = self.waiting.popleft()
        self.bytes -= message.ByteSize()
        return message


class Watching:
    """The watchers of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._watchers: list[_Watcher] = []

    def end(self) -> None:
        """End all streams."""
        for one in self._watchers:
            one.has_ended = True
            one.woken.set()

    async def watch(self, names: Sequence[str], owner: str = "") -> AsyncGenerator[pb.WatchIndexResponse]:
        """Yield the entries of the places, then their changes. Raises LimitExceeded if there are MAX_WATCHERS,
        MAX_OF_OWNER of this owner, or if MAX_BYTES wait; Unavailable once the router ends.
        """
        if sum(one.owner == owner for one in self._watchers) >= MAX_OF_OWNER:
            what = f"{MAX_OF_OWNER} calls of {owner or 'one owner'} watch the index, the most of one owner"
            raise LimitExceeded(what, remedy="end one of them")
        if len(self._watchers) >= MAX_WATCHERS:
            raise LimitExceeded(f"{MAX_WATCHERS} calls watch the index, the maximum", remedy="end one of them")
        watcher, places = _Watcher(owner), list[Place]()
        self._watchers.append(watcher)
        try:
            for name in names:
                if name not in self._fleet.followed:
                    continue
                place = self._fleet.followed[name].place
                entries = _entries(name, place)
                first = next(entries, None)  # reads all of them, at this moment
                place.watchers.append(watcher.take)
                places.append(place)
                for message in () if first is None else chain((first,), entries):
                    yield message
            yield pb.WatchIndexResponse(snapshot_end=True)
            while True:
                while watcher.waiting and not watcher.is_behind:
                    yield watcher.sent()
                if watcher.is_behind:
                    raise LimitExceeded(f"{MAX_BYTES} bytes of changes wait", remedy="read faster, and call again")
                if watcher.has_ended:
                    raise Unavailable("the router is draining", remedy="watch another router")
                watcher.woken.clear()
                await watcher.woken.wait()
        finally:
            self._watchers.remove(watcher)
            for place in places:
                place.watchers.remove(watcher.take)


def _entries(name: str, place: Place) -> Iterator[pb.WatchIndexResponse]:
    key_bytes, size = place.key_bytes, KEYS_AT_ONCE * (place.key_bytes or KEY_BYTES)
    forms = dict(place.formats)
    for (tier, group), packed in place.packed_content().items():
        form = forms.get(group)
        for first in range(0, max(len(packed), 1), size):
            keys = _keys(group, tier, packed[first : first + size], key_bytes, form)
            yield pb.WatchIndexResponse(place=name, stored=keys)


def _change(place: str, event: Event) -> pb.WatchIndexResponse:
    if isinstance(event, Cleared):
        return pb.WatchIndexResponse(place=place, cleared=True)
    form = event.form if isinstance(event, Stored) else None
    packed = messages.pack_keys(event.keys, event.key_bytes)
    keys = _keys(event.group, event.tier, packed, event.key_bytes, form)
    if isinstance(event, Removed):
        return pb.WatchIndexResponse(place=place, removed=keys)
    return pb.WatchIndexResponse(place=place, stored=keys)


def _keys(group: int, tier: Tier, packed: bytes, key_bytes: int, form: GroupFormat | None) -> pb.IndexKeys:
    known = None if form is None else messages.encode_group(group, form)
    return pb.IndexKeys(group=group, tier=tier.value, keys=packed, form=known, key_bytes=key_bytes)
