"""Which service a call goes to: one of the client's list, or the owner of a replica that a service named."""

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
    """Return the addresses of a list such as "a:7070,b:7070". Raises InvalidArgument if an address is empty."""
    addresses = [text] if text.startswith(_GRPC_LISTS) else [address.strip() for address in text.split(",")]
    if not all(addresses):
        raise InvalidArgument(
            f"the list {text!r} has an empty address", field="address", remedy="write HOST:PORT,HOST:PORT"
        )
    return addresses


class Owners(Generic[C]):
    """The channels to all services, one per address. They stay open until the client closes them. Thread-safe."""

    def __init__(self, first: C, reach: Callable[[str], C] | None = None, others: Sequence[str] = ()) -> None:
        """Start with the channel of the first service.

        Args:
            first: channel of the first service of the list.
            reach: opens a channel to an address; None: redirections to owners are not followed.
            others: addresses of the other services, for use when the first one is unreachable.
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
        """Open a channel to the first service of a list of addresses, and return the Owners of the list; see
        `split_addresses`.
        """
        first, *others = split_addresses(addresses)
        return cls(reach(first), reach, others)

    @property
    def present(self) -> C:
        """The channel that calls use first: that of the current service in the client's list."""
        with self._lock:
            return self._present()

    def after(self, moved: Moved, hops: int) -> C:
        """Return the channel of the owner that a Moved error names. `hops` is the number of redirections of the call,
        including this one.

        Raises:
            Moved: `moved` itself, if redirections are not followed or the address is missing.
            Unavailable: there were more than MAX_HOPS redirections, as when two services name each other as the owner.
        """
        address = moved.metadata.get("address", "")
        if self._reach is None or not address:
            raise moved
        if hops > MAX_HOPS:
            raise Unavailable(
                f"the call was redirected {hops} times, last to {address}, more than {MAX_HOPS}",
                remedy="retry in a few seconds",
            )
        with self._lock:
            if self._closed:
                raise moved
            return self._channel(address)

    def instead_of(self, channel: C) -> C:
        """Return the channel to use after a failure of `channel`. If `channel` belongs to the current service of the
        list, the next service becomes the current one.
        """
        with self._lock:
            if not self._closed and channel is self._present():
                self._at = (self._at + 1) % (1 + len(self._others))
            return self._present()

    def has_other_than(self, channel: C) -> bool:
        """Return whether there is a service whose channel is not `channel`."""
        with self._lock:
            return bool(self._others) or channel is not self._present()

    def close(self) -> list[C]:
        """Stop following redirections and return every channel, for the caller to close."""
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
    """The services that one call tries: first the current service of the list, then the owners to which it is
    redirected.

    Attributes:
        channel: the channel to use next.
        hops: number of redirections since the last answer.
    """

    def __init__(self, owners: Owners[C]) -> None:
        self._owners = owners
        self.hops = 0
        self.channel = owners.present

    def after(self, failed: KvplaneError) -> None:
        """Follow a Moved error to the named owner; raise any other error.

        After Unavailable or DeadlineExceeded, later calls start at the next service of the list.
        """
        if isinstance(failed, Moved):
            self.hops += 1
            self.channel = self._owners.after(failed, self.hops)
            return
        if isinstance(failed, (Unavailable, DeadlineExceeded)):
            self._owners.instead_of(self.channel)
        raise failed


@contextmanager
def moving_is_breaking() -> Iterator[None]:
    """Raise Unavailable instead of Moved: for a session a Moved error means that the open stream is broken, and
    reopening the stream finds the new owner.
    """
    try:
        yield
    except Moved as moved:
        raise Unavailable(moved.message, remedy="open the session again; it is redirected to the owner") from moved
