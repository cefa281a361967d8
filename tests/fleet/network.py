"""The network of a fleet: a network namespace per host, or proxies where the machine permits none.

Namespaces   every service, store, table, router and replica is a host of its own with an address of its own, on one
             bridge. A partition drops frames: the neighbour that an address belongs to gets a link address that no
             host has, at the sender, so that each direction is cut alone. A slow host sends and receives through a
             token bucket. Sockets notice as they would on a network: by retransmissions that are not answered.
Proxies      all on 127.0.0.1. A cut link takes bytes and carries none; services share the link to the index.
"""

from __future__ import annotations

import ctypes
import enum
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from tests.client.proxy import CuttingProxy

Peer = Literal["index", "table", "clients"]
INDEX: Peer = "index"
TABLE: Peer = "table"
CLIENTS: Peer = "clients"
SLOW_S = 0.03
NOBODY = "02:00:00:00:00:fe"  # a link address that no host has
RATE = ("rate", "400kbit", "burst", "4kb", "latency", "400ms")
FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x4000_0000
_PREFIX = "kvf"


class Lost(enum.Enum):
    """What a cut link loses: all, what the client sends, or what it is answered."""

    ALL = "all"
    REQUESTS = "requests"
    ANSWERS = "answers"


class Proxies:
    """All hosts are this machine, and links are proxies."""

    name = "proxies"
    has_hosts = False  # whether a replica or a router can be cut off alone

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], CuttingProxy] = {}

    def host(self, name: str) -> str:
        """The address of a host."""
        del name
        return "127.0.0.1"

    def inside(self, name: str) -> AbstractContextManager[None]:
        """What this thread starts or opens inside the block is on the host."""
        del name
        return nullcontext()

    def path(self, name: str) -> str:
        """The file of the host's namespace (see `start_inside`)."""
        del name
        return ""

    def link(self, service: str, peer: Peer, address: str) -> str:
        """The address at which a service reaches what is at `address`; at which clients reach the service there."""
        key = ("" if peer == INDEX else service, peer)
        if key not in self._links:
            self._links[key] = CuttingProxy(address)
        return self._links[key].address

    def cut(self, service: str, peer: Peer, lost: Lost) -> None:
        """Cut the link of a service to a peer."""
        one = self._link(service, peer)
        if lost is Lost.ANSWERS:
            one.mute(True)
        else:
            one.hold(True)

    def slow(self, service: str) -> None:
        """Make all links of a service slow."""
        for peer in (INDEX, TABLE, CLIENTS):
            self._link(service, peer).delay(SLOW_S)

    def _link(self, service: str, peer: str) -> CuttingProxy:
        shared = self._links["", INDEX]
        return shared if peer == INDEX else self._links.get((service, peer), shared)  # the table may be in the index

    def restore(self) -> None:
        """Carry everything as at first."""
        for one in self._links.values():
            one.hold(False)
            one.mute(False)
            one.delay(0.0)

    def close(self) -> None:
        for one in self._links.values():
            one.close()


class Namespaces:
    """A namespace per host, and a bridge. The process itself is a host too: it has the rivals."""

    name = "namespaces"
    has_hosts = True

    def __init__(self, hosts: Sequence[str], clients: Sequence[str], peers: dict[Peer, str]) -> None:
        """`clients` are the hosts of clients of services, `peers` those of index and table. Raises OSError if the
        machine does not permit namespaces.
        """
        remove_left()
        self._bridge, self._net = f"{_PREFIX}{os.getpid()}", f"198.18.{_free_net()}"
        self._names = {name: f"{self._bridge}-{at}" for at, name in enumerate(hosts, 1)}
        self._clients, self._peers = [*clients, ""], peers
        self._cuts = set[tuple[str, str]]()
        self._slowed = set[str]()
        try:
            self._build()
        except OSError:
            self.close()
            raise

    def _build(self) -> None:
        bridge = self._bridge
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{self.host('')}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name, space in self._names.items():
            _ip("netns", "add", space)
            _ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", space, "master", bridge, "up")
            _ip("-n", space, "address", "add", f"{self.host(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")

    def host(self, name: str) -> str:
        """The address of a host; "" is this process."""
        return f"{self._net}.{[*self._names].index(name) + 1 if name else 254}"

    def inside(self, name: str) -> AbstractContextManager[None]:
        """What this thread starts or opens inside the block is on the host."""
        return _entered(self.path(name))

    def path(self, name: str) -> str:
        """The file of the host's namespace (see `start_inside`)."""
        return str(FOLDER / self._names[name])

    def link(self, service: str, peer: Peer, address: str) -> str:
        """The same address: hosts reach each other as they are."""
        del service, peer
        return address

    def cut(self, service: str, peer: Peer, lost: Lost) -> None:
        """Cut the links of a service to a peer."""
        for other in self._clients if peer == CLIENTS else [self._peers[peer]]:
            client, server = (other, service) if peer == CLIENTS else (service, other)
            if lost is not Lost.ANSWERS:
                self._drop(client, server)
            if lost is not Lost.REQUESTS:
                self._drop(server, client)

    def cut_off(self, host: str, others: Sequence[str]) -> None:
        """Cut all links of a host to others."""
        for other in others:
            self._drop(host, other)
            self._drop(other, host)

    def _drop(self, sender: str, receiver: str) -> None:
        _ip(*self._at(sender, "replace", receiver), "lladdr", NOBODY, "nud", "permanent")
        self._cuts.add((sender, receiver))

    def _at(self, sender: str, verb: str, receiver: str) -> list[str]:
        """The command on what `sender` knows of the link address of `receiver`."""
        where = ["-n", self._names[sender]] if sender else []
        return [*where, "neighbour", verb, self.host(receiver), "dev", "eth0" if sender else self._bridge]

    def slow(self, service: str) -> None:
        """Make all links of a service slow."""
        space = self._names[service]
        _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", *RATE)
        _run("tc", "qdisc", "add", "dev", space, "root", "tbf", *RATE)
        self._slowed.add(service)

    def restore(self) -> None:
        """Carry everything as at first."""
        for sender, receiver in self._cuts:
            _ip(*self._at(sender, "del", receiver))
        for service in self._slowed:
            space = self._names[service]
            _run("tc", "-n", space, "qdisc", "del", "dev", "eth0", "root")
            _run("tc", "qdisc", "del", "dev", space, "root")
        self._cuts.clear()
        self._slowed.clear()

    def close(self) -> None:
        _remove(self._bridge)


Network = Proxies | Namespaces


def make(hosts: Sequence[str], clients: Sequence[str], peers: dict[Peer, str], wanted: str = "") -> tuple[Network, str]:
    """A network, and a line that names it. `wanted`: "namespaces", "proxies"; "" = namespaces where they can be."""
    if wanted == Proxies.name:
        return Proxies(), "network: proxies, as asked for"
    try:
        return Namespaces(hosts, clients, peers), f"network: {len(hosts)} network namespaces"
    except OSError as refused:
        if wanted:
            raise
        return Proxies(), f"network: PROXIES, hosts cannot be cut off alone: there are no namespaces, {refused}"


def start_inside(path: str, target: Callable[..., None], *arguments: Any) -> None:
    """Main function of a child process: call `target` in the namespace of this file; "" = where it is."""
    if path:
        _enter(path)
    target(*arguments)


@contextmanager
def _entered(path: str) -> Iterator[None]:
    """Move this thread into a namespace, and back. Its sockets and child processes stay there."""
    here = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        _enter(path)
        yield
    finally:
        _set(here)
        os.close(here)


def _enter(path: str) -> None:
    there = os.open(path, os.O_RDONLY)
    try:
        _set(there)
    finally:
        os.close(there)


def _set(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    """Raises OSError."""
    if shutil.which(command[0]) is None:
        raise OSError(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip()}")


def _free_net() -> int:
    """A number of a /24 that no other fleet of this machine has."""
    used = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True).stdout
    taken = {int(one) for one in re.findall(r"198\.18\.(\d+)\.", used)}
    return next(one for at in range(255) if (one := (os.getpid() + at) % 255) not in taken)


def remove_left() -> None:
    """Remove what fleets left whose process was killed."""
    for space in FOLDER.glob(f"{_PREFIX}*-*") if FOLDER.exists() else ():
        bridge = space.name.partition("-")[0]
        if not Path(f"/proc/{bridge.removeprefix(_PREFIX)}").exists():
            _remove(bridge)


def _remove(bridge: str) -> None:
    """Remove a bridge and its namespaces. Links first: a socket that still waits keeps a namespace for a while."""
    for space in FOLDER.glob(f"{bridge}-*"):
        subprocess.run(["ip", "link", "del", space.name], capture_output=True)
        subprocess.run(["ip", "netns", "del", space.name], capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True)
