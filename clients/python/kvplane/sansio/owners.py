"""Which service a call goes to: the client's list of services, and the owners of replicas that services name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvplane.base.errors import DeadlineExceeded, InvalidArgument, KvplaneError, Moved, Unavailable

MAX_HOPS = 3
_GRPC_LISTS = ("ipv4:", "ipv6:")  # gRPC itself parses several addresses after these

C = TypeVar("C")


def split_addresses(text: str) -> list[str]:
    """The addresses of a list such as "a:7070,b:7070". Raises InvalidArgument when one is empty."""
    addresses = [text] if text.startswith(_GRPC_LISTS) else [address.strip() for address in text.split(",")]
    if not all(addresses):
        raise InvalidArgument(f"{text!r} has an empty address", field="address", remedy="write HOST:PORT,HOST:PORT")
    return addresses


class Owners(Generic[C]):
    """One channel per address, open until the client closes. Thread-safe."""

    def __init__(self, first: C, reach: Callable[[str], C] | None = None, others: Sequence[str] = ()) -> None:
        """`others`: addresses to use when the first service is unreachable. `reach` opens a channel to an address;
        None: owners are not followed.
        """
        self._reach = reach
        self._first = first
        self._others = tuple(others)
        self._at = 0  # position in the list: 0 = the first, n = the n-th of the others
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
        """The channel of the list that calls use now."""
        with self._lock:
            return self._present()

    def after(self, moved: Moved, hops: int) -> C:
        """The channel of the owner that `moved` names; `hops` includes this one.

        Raises:
            Moved: `moved`, when owners are not followed or the address is missing.
            Unavailable: over MAX_HOPS hops, so that services that name each other as owner cannot loop.
        """
        address = moved.metadata.get("address", "")
        if self._reach is None or not address:
            raise moved
        if hops > MAX_HOPS:
            raise Unavailable(f"redirected {hops} times, last to {address}", remedy="retry in a few seconds")
        with self._lock:
            if self._closed:
                raise moved
            return self._channel(address)

    def instead_of(self, channel: C) -> C:
        """The channel to use when this channel is unreachable: the next of the list, if this one is current."""
        with self._lock:
            if not self._closed and channel is self._present():
                self._at = (self._at + 1) % (1 + len(self._others))
            return self._present()

    def has_other_than(self, channel: C) -> bool:
        """Whether another service is available."""
        with self._lock:
            return bool(self._others) or channel is not self._present()

    def close(self) -> list[C]:
        """Stop following owners. Returns every channel, for the caller to close."""
        with self._lock:
            self._closed = True
            return [self._first, *self._channels.values()]

    def _present(self) -> C:
        return self._channel(self._others[self._at - 1]) if self._at and not self._closed else self._first

    def _channel(self, address: str) -> C:
        if address not in self._channels:
            assert self._reach is not None, "a list of addresses needs a `reach`"
            self._channels[address] = self._reach(address)
        return self._channels[address]


class Route(Generic[C]):
    """The route of one call: first the current service of the list, then the owners that services name.

    Attributes:
        channel: the channel to use next.
        hops: redirections since the last answer.
    """

    def __init__(self, owners: Owners[C]) -> None:
        self._owners = owners
        self.hops = 0
        self.channel = owners.present

    def after(self, failed: KvplaneError) -> None:
        """Follow a redirection, or raise `failed`. After Unavailable, later routes start at the next service."""
        if isinstance(failed, Moved):
            self.hops += 1
            self.channel = self._owners.after(failed, self.hops)
            return
        if isinstance(failed, (Unavailable, DeadlineExceeded)):
            self._owners.instead_of(self.channel)
        raise failed


@contextmanager
def moving_is_breaking() -> Iterator[None]:
    """Turn Moved on an open stream into Unavailable: the stream is broken, and reopening it finds the owner."""
    try:
        yield
    except Moved as moved:
        raise Unavailable(moved.message) from moved
