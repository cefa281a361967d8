"""Channels to services: the client's own list, asked in turn, and the owners of replicas that these name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvplane.base.errors import DeadlineExceeded, InvalidArgument, KvplaneError, Moved, Unavailable

MAX_HOPS = 3
_GRPC_LISTS = ("ipv4:", "ipv6:")  # in which gRPC itself reads several addresses

C = TypeVar("C")


def split_addresses(text: str) -> list[str]:
    """The addresses of a list such as "a:7070,b:7070"; raises InvalidArgument when one is empty."""
    addresses = [text] if text.startswith(_GRPC_LISTS) else [address.strip() for address in text.split(",")]
    if not all(addresses):
        raise InvalidArgument(f"{text!r} has an empty address", field="address", remedy="write HOST:PORT,HOST:PORT")
    return addresses


class Owners(Generic[C]):
    """One channel per address, kept until the client is closed. Threads may share it."""

    def __init__(self, first: C, reach: Callable[[str], C] | None = None, others: Sequence[str] = ()) -> None:
        """`others` are asked when the first is away. `reach` opens a channel to an address, as the first one was
        opened; None: nobody is followed.
        """
        self._reach = reach
        self._first = first
        self._others = tuple(others)
        self._at = 0  # in the list: 0 = the first, n = the n-th of the others
        self._channels: dict[str, C] = {}
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def at(cls, addresses: str, reach: Callable[[str], C]) -> Owners[C]:
        """Channels to a list of addresses; see `split_addresses`."""
        first, *others = split_addresses(addresses)
        return cls(reach(first), reach, others)

    @property
    def present(self) -> C:
        """Who of the list is asked now."""
        with self._lock:
            return self._present()

    def after(self, moved: Moved, hops: int) -> C:
        """Where to ask after this many hops.

        Raises:
            Moved: `moved`, when nobody is followed there.
            Unavailable: too many hops. Services that pass the owner on to each other come to an end soon.
        """
        address = moved.metadata.get("address", "")
        if self._reach is None or not address:
            raise moved
        if hops > MAX_HOPS:
            raise Unavailable(f"sent on {hops} times, at last to {address}", remedy="try again in a moment")
        with self._lock:
            if self._closed:
                raise moved
            return self._channel(address)

    def instead_of(self, channel: C) -> C:
        """Who is asked when the service behind this channel is away: the next of the list, if it was of the list."""
        with self._lock:
            if not self._closed and channel is self._present():
                self._at = (self._at + 1) % (1 + len(self._others))
            return self._present()

    def has_other_than(self, channel: C) -> bool:
        """Whether there is somebody else to ask."""
        with self._lock:
            return bool(self._others) or channel is not self._present()

    def close(self) -> list[C]:
        """Follow nobody any more; every channel, for the caller to close."""
        with self._lock:
            self._closed = True
            return [self._first, *self._channels.values()]

    def _present(self) -> C:
        return self._channel(self._others[self._at - 1]) if self._at and not self._closed else self._first

    def _channel(self, address: str) -> C:
        if address not in self._channels:
            assert self._reach is not None, "a list of addresses is reached"
            self._channels[address] = self._reach(address)
        return self._channels[address]


class Route(Generic[C]):
    """Where one question is asked: of the service that the list names now, then of the one that it names as owner.

    Attributes:
        channel: to ask next.
        hops: from owner to owner since something was answered.
    """

    def __init__(self, owners: Owners[C]) -> None:
        self._owners = owners
        self.hops = 0
        self.channel = owners.present

    def after(self, failed: KvplaneError) -> None:
        """Follow to the owner, or raise `failed`. A service that is away is not the one to ask next time."""
        if isinstance(failed, Moved):
            self.hops += 1
            self.channel = self._owners.after(failed, self.hops)
            return
        if isinstance(failed, (Unavailable, DeadlineExceeded)):
            self._owners.instead_of(self.channel)
        raise failed


@contextmanager
def moving_is_breaking() -> Iterator[None]:
    """An open stream whose replica another service took is broken; whoever opens it again is told where to go."""
    try:
        yield
    except Moved as moved:
        raise Unavailable(moved.message) from moved
