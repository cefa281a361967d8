"""Channels to the services that own replicas: the one that was asked first says where to go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvplane.base.errors import Moved

MAX_HOPS = 3

C = TypeVar("C")


class Owners(Generic[C]):
    """One channel per address, kept until the client is closed. Threads may share it."""

    def __init__(self, first: C, reach: Callable[[str], C] | None = None) -> None:
        """`reach` opens a channel to an address, as the first one was opened; None: nobody is followed."""
        self.first = first
        self._reach = reach
        self._channels: dict[str, C] = {}
        self._closed = False
        self._lock = threading.Lock()

    def after(self, moved: Moved, hops: int) -> C:
        """Where to ask after this many hops; raises `moved` when that is nowhere, or too far."""
        address = moved.metadata.get("address", "")
        if self._reach is None or not address or hops > MAX_HOPS:
            raise moved
        with self._lock:
            if self._closed:
                raise moved
            if address not in self._channels:
                self._channels[address] = self._reach(address)
            return self._channels[address]

    def close(self) -> list[C]:
        """Follow nobody any more; every channel, for the caller to close."""
        with self._lock:
            self._closed = True
            return [self.first, *self._channels.values()]
