"""The stream of the index: for each place its entries, then its changes, in order.

A place is read part by part of the index, so that no call holds the event loop for long or keeps a place's entries in
memory. A watcher gets the changes of a part from the moment on at which the part was read for it; no other call runs in
between. So entries and changes together are the place's content, and a watcher that is too slow is ended rather than
left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace

from kvplane.base.errors import LimitExceeded, Unavailable
from kvplane.v1 import routing_pb2 as pb
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.places import Place
from kvplane_fleet.router import messages
from kvplane_fleet.wire.events import KEY_BYTES, Cleared, Event, GroupFormat, Removed, Stored, Tier

MAX_WATCHERS = 64
MAX_OF_OWNER = 16
MAX_BYTES = 8 << 20  # of changes that wait for a watcher
KEYS_AT_ONCE = 1 << 15  # of a message, and of a place that are read at once, about
SCANNED_AT_ONCE = 1 << 20  # keys of all places among which they are sought: some milliseconds


class _Watcher:
    """What waits to be sent to one caller.

    Attributes:
        read: the parts of the index that were read, of a place that is being read.
    """

    def __init__(self, owner: str, fleet: Fleet) -> None:
        self.owner, self._index = owner, fleet.index
        self.read: dict[str, int] = {}
        self.waiting: deque[pb.WatchIndexResponse] = deque()
        self.bytes = 0
        self.woken = asyncio.Event()
        self.is_behind = self.has_ended = False

    def take(self, place: str, event: Event) -> None:
        """A place has changed."""
        if self.is_behind:
            return
        if place in self.read and not isinstance(event, Cleared):
            event = replace(event, keys=self._index.within(event.keys, self.read[place]))
            if not event.keys:
                return  # what is read later has it
        message = _change(place, event)
        self.bytes += message.ByteSize()
        self.waiting.append(message)
        if self.bytes > MAX_BYTES:
            self.is_behind = True
            self.waiting.clear()
        self.woken.set()

    def check(self) -> None:
        """Raise the reason for which the stream ends."""
        if self.is_behind:
            raise LimitExceeded(f"{MAX_BYTES} bytes of changes wait", remedy="read faster, and call again")
        if self.has_ended:
            raise Unavailable("the router is draining", remedy="watch another router")

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
        self._reading = asyncio.Lock()

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
        watcher, places = _Watcher(owner, self._fleet), list[Place]()
        self._watchers.append(watcher)
        try:
            for name in names:
                if name not in self._fleet.followed:
                    continue
                places.append(place := self._fleet.followed[name].place)
                watcher.read[name] = 0
                place.watchers.append(watcher.take)
                while watcher.read[name] < self._fleet.index.parts:
                    for message in await self._read(watcher, name, place):
                        yield message
                    watcher.check()
                del watcher.read[name]
            yield pb.WatchIndexResponse(snapshot_end=True)
            while True:
                while watcher.waiting:
                    yield watcher.sent()
                watcher.check()
                watcher.woken.clear()
                await watcher.woken.wait()
        finally:
            self._watchers.remove(watcher)
            for place in places:
                place.watchers.remove(watcher.take)

    async def _read(self, watcher: _Watcher, name: str, place: Place) -> list[pb.WatchIndexResponse]:
        """Return the changes that wait, and then the entries in the next parts of the index. The calls of all watchers
        get half of the event loop at most.
        """
        parts, first = self._fleet.index.parts, watcher.read[name]
        keys = max(place.entries / KEYS_AT_ONCE, self._fleet.index.num_keys / SCANNED_AT_ONCE, 1)
        async with self._reading:
            began_s = time.thread_time()
            watcher.read[name] = min(first + max(int(parts / keys), 1), parts)
            messages = [watcher.sent() for _ in range(len(watcher.waiting))]
            messages += _entries(name, place, first, watcher.read[name])
            await asyncio.sleep(time.thread_time() - began_s)
        return messages


def _entries(name: str, place: Place, first: int, end: int) -> Iterator[pb.WatchIndexResponse]:
    """Yield the entries in parts of the index; of the first part one message for each cell at least."""
    key_bytes, size = place.key_bytes, KEYS_AT_ONCE * (place.key_bytes or KEY_BYTES)
    for (tier, group), packed in place.packed_content(first, end).items():
        for at in range(0, len(packed) if first else max(len(packed), 1), size):
            keys = _keys(group, tier, packed[at : at + size], key_bytes, place.formats.get(group))
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
