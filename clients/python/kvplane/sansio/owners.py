"""Which service a call goes to: one of the client's list, or the owner of a replica that a service named."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvplane.base.errors import DeadlineExceeded, InvalidArgument, KvplaneError, Moved, Unavailable

MAX_HOPS = 3
_GRPC_LISTS = ("ipv4:", "ipv6:")  # gRPC itself parses several addresses after these

_HOST_AND_PORT = re.compile(r"(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+", re.ASCII)

_PATTERN = re.compile(r"\*(\.[\w.-]*\w)?", re.ASCII)

C = TypeVar("C")


class Addresses:
    """A list such as "a:7070,b:7070,*.c": services to call, and the hosts to which they may redirect calls.

    Redirections are followed to the hosts of the services in the list, with any port, to hosts below the suffix of a
    pattern ("*.c" permits x.c and y.x.c), and with "*" to every host. A call contains prompts and perhaps a token, and
    its answer says which pages an engine reads: forged records in a store must not direct calls elsewhere.

    Attributes:
        services: the addresses to call, in order.
    """

    def __init__(self, text: str) -> None:
        """Parse a list. Raises InvalidArgument if an entry is empty, a pattern is malformed, or no service is given."""
        entries = [text] if text.startswith(_GRPC_LISTS) else [entry.strip() for entry in text.split(",")]
        self.services = [entry for entry in entries if not entry.startswith("*")]
        self._patterns = [entry for entry in entries if entry.startswith("*")]
        if not all(entries) or not self.services or not all(map(_PATTERN.fullmatch, self._patterns)):
            raise InvalidArgument(
                f"{text!r} is not a list of addresses",
                field="address",
                remedy="write HOST:PORT,HOST:PORT, then *.SUFFIX for the hosts to which they may redirect calls",
            )
        self._hosts = {_host(part) for entry in self.services for part in _parts(entry)}

    def permit(self, address: str) -> bool:
        """Return whether a redirection to this address is followed."""
        if address in self.services:
            return True
        host = _host(address) if _HOST_AND_PORT.fullmatch(address) else ""
        is_below = any(one == "*" or host.endswith(one[1:].lower()) for one in self._patterns)
        return bool(host) and (host in self._hosts or is_below)


def _parts(entry: str) -> list[str]:
    """Return the addresses of one entry, without the scheme of gRPC: "dns:///a:1" gives a:1."""
    for scheme in _GRPC_LISTS:
        if entry.startswith(scheme):
            return entry.removeprefix(scheme).split(",")
    return [entry.removeprefix("dns:").rpartition("/")[2]]


def _host(address: str) -> str:
    """Return the host of HOST:PORT, as names are compared; "" if it is something else."""
    parsed = _HOST_AND_PORT.fullmatch(address)
    return parsed["host"].lower().rstrip(".") if parsed else ""


class Owners(Generic[C]):
    """The channels to all services, one per address. They stay open until the client closes them. Thread-safe.

    Attributes:
        first: channel of the first service of the list.
    """

    def __init__(
        self,
        first: C,
        reach: Callable[[str], C] | None = None,
        others: Sequence[str] = (),
        permit: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Start with the channel of the first service.

        Args:
            first: channel of the first service of the list.
            reach: opens a channel to an address; None: redirections to owners are not followed.
            others: addresses of the other services, for use when the first one is unreachable.
            permit: whether a redirection to an address is followed.
        """
        self._reach, self._permit = reach, permit
        self.first = first
        self._others = tuple(others)
        self._at = 0  # position in the list: 0 = the first, n = the n-th of the others
        self._channels: dict[str, C] = {}
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def at(cls, addresses: str, reach: Callable[[str], C]) -> Owners[C]:
        """Open a channel to the first service of a list of addresses, and return the Owners of the list; see
        `Addresses`.
        """
        given = Addresses(addresses)
        first, *others = given.services
        return cls(reach(first), reach, others, given.permit)

    @property
    def present(self) -> C:
        """The channel that calls use first: that of the current service in the client's list."""
        with self._lock:
            return self._present()

    def after(self, moved: Moved, hops: int) -> C:
        """Return the channel of the owner that a Moved error names. `hops` is the number of redirections of the call,
        including this one.

        Raises:
            Moved: `moved` itself, if redirections are not followed or the address is missing; another Moved, if
                redirections to the address are not permitted.
            Unavailable: there were more than MAX_HOPS redirections, as when two services name each other as the owner.
        """
        address = moved.metadata.get("address", "")
        if self._reach is None or not address:
            raise moved
        if not self._permit(address):
            raise Moved(
                f"{moved.message}; the client's list of addresses does not permit redirections to {address}",
                field="address",
                remedy="if that is a service of yours, add its address, or *.SUFFIX of its host, to the list",
                metadata=moved.metadata,
            )
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
            return [self.first, *self._channels.values()]

    def _present(self) -> C:
        return self._channel(self._others[self._at - 1]) if self._at and not self._closed else self.first

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
