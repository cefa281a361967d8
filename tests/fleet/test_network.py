"""The network of a fleet loses what was cut and nothing else, and states which network it is."""

from __future__ import annotations

import socket
from contextlib import closing, contextmanager

import pytest

from tests.fleet import network
from tests.fleet.network import CLIENTS, INDEX, TABLE, Lost, Namespaces, Proxies

HOSTS, CLIENT, SERVICE = ["service", "r0", "index", "table"], "r0", "service"
PEERS: dict[network.Peer, str] = {INDEX: "index", TABLE: "table"}
WAIT_S = 0.3


@pytest.fixture
def net():
    made, line = network.make(HOSTS, [CLIENT], PEERS)
    with closing(made):
        if isinstance(made, Proxies):
            assert "PROXIES" in line
            pytest.skip(line)
        yield made


@contextmanager
def mailbox(net, host):
    """A socket on a host that takes datagrams."""
    with net.inside(host):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with one:
        one.bind((net.host(host), 0))
        one.settimeout(WAIT_S)
        yield one


def arrives(sender, receiver):
    sender.sendto(b"x", receiver.getsockname())
    try:
        return receiver.recv(10) == b"x"
    except TimeoutError:
        return False


def test_each_direction_is_lost_alone_and_neither_after_a_repair(net):
    with mailbox(net, CLIENT) as client, mailbox(net, SERVICE) as service, mailbox(net, "index") as index:

        def carried():
            return arrives(client, service), arrives(service, client), arrives(index, service)

        assert carried() == (True, True, True)
        net.cut(SERVICE, CLIENTS, Lost.REQUESTS)
        assert carried() == (False, True, True)
        net.restore()
        net.cut(SERVICE, CLIENTS, Lost.ANSWERS)
        assert carried() == (True, False, True)
        net.cut(SERVICE, INDEX, Lost.ALL)
        assert carried() == (True, False, False)
        net.restore()
        assert carried() == (True, True, True)
        net.slow(SERVICE)
        assert carried() == (True, True, True)
        net.restore()


def test_a_machine_without_namespaces_gets_proxies_and_a_line(monkeypatch):
    def refuse(*_):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(network, "_ip", refuse)
    made, line = network.make(HOSTS, [CLIENT], PEERS)
    assert isinstance(made, Proxies)
    assert "PROXIES" in line
    assert "Operation not permitted" in line
    with pytest.raises(OSError, match="not permitted"):
        network.make(HOSTS, [CLIENT], PEERS, Namespaces.name)
