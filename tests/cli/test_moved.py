"""Two services on one store: the one that does not own a replica names the owner, and the client connects there."""

from __future__ import annotations

import asyncio

import pytest

import kvplane
from kvplane import aio
from kvplane.base.errors import InvalidArgument, Moved, NotFound, Unavailable
from kvplane.base.requests import Allocate, Content
from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from kvplane.sansio.owners import MAX_HOPS, Owners, split_addresses
from tests.cli.test_serve import serving
from tests.client.lasting import ONE_GROUP
from tests.store import servers

CHANNELS = {"one": "ONE", "two": "TWO", "three": "THREE", "owner": "OWNER"}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Addresses of a service with a replica and of one without it."""
    owner, other = (f"127.0.0.1:{servers.free_port()}" for _ in range(2))
    with servers.serving(tmp_path_factory.mktemp("redis")) as server:
        settings = ("--set", f"store=redis://{server.address}")
        with serving(*settings, listen=owner), serving(*settings, listen=other):
            with kvplane.connect(owner) as client:
                client.register_replica("r", ONE_GROUP)
            yield owner, other


def test_a_client_follows_a_redirection_to_the_owner(addresses):
    with kvplane.connect(addresses[1]) as client:
        assert client.describe_replica("r").replica == "r"
        answer = client.allocate_slots("r", Allocate("one", Content(token_ids=[1] * 20)))
        assert answer.granted_tokens == 20
        client.free("r", "one")
        with client.session("r") as session:
            assert session.apply(kvplane.Part()).seq == 1


def test_an_asyncio_client_follows_a_redirection_to_the_owner(addresses):
    async def ask():
        async with aio.connect(addresses[1]) as client:
            described = await client.describe_replica("r")
            session = await client.session("r")
            answer = await session.apply(kvplane.Part())
            await session.close()
            return described.replica, answer.seq

    assert asyncio.run(ask()) == ("r", 1)


def test_a_client_without_redirections_gets_the_address_of_the_owner(addresses):
    with Client(open_channel(addresses[1])) as client:
        with pytest.raises(Moved) as moved:
            client.describe_replica("r")
        assert moved.value.metadata["address"] == addresses[0]
        with pytest.raises(Moved):
            client.session("r")


def test_a_replica_without_an_owner_is_not_found(addresses):
    with kvplane.connect(addresses[1]) as client, pytest.raises(NotFound):
        client.describe_replica("unowned")


def test_the_number_of_redirections_is_limited():
    opened = []

    def reach(address):
        opened.append(address)
        return f"channel to {address}"

    owners = Owners("first", reach)
    moved = Moved("", metadata={"address": "there"})
    assert [owners.after(moved, hop) for hop in range(1, MAX_HOPS + 1)] == ["channel to there"] * 3
    assert opened == ["there"], "one channel per address"
    with pytest.raises(Unavailable, match="4 times"):
        owners.after(moved, MAX_HOPS + 1)
    with pytest.raises(Moved):
        owners.after(Moved("no address"), 1)
    assert owners.close() == ["first", "channel to there"]
    with pytest.raises(Moved):
        owners.after(moved, 1)


def test_a_client_connects_to_the_next_address_when_one_is_unreachable():
    owners = Owners.at("one, two,three", CHANNELS.__getitem__)
    assert owners.present == "ONE"
    assert owners.instead_of("ONE") == "TWO"
    assert owners.instead_of("ONE") == "TWO", "another thread has moved on already"
    owner = owners.after(Moved("", metadata={"address": "owner"}), 1)
    assert owners.has_other_than(owner)
    assert owners.instead_of(owner) == "TWO", "who named the owner is asked again"
    assert [owners.instead_of(owners.present) for _ in range(3)] == ["THREE", "ONE", "TWO"]
    assert not Owners.at("one", CHANNELS.__getitem__).has_other_than("ONE")


def test_address_lists_are_parsed():
    assert split_addresses("a:1,b:2") == ["a:1", "b:2"]
    assert split_addresses("ipv4:1.2.3.4:5,6.7.8.9:5") == ["ipv4:1.2.3.4:5,6.7.8.9:5"]
    with pytest.raises(InvalidArgument, match="empty"):
        split_addresses("a:1,")
