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
from kvplane.sansio.owners import MAX_HOPS, Addresses, Owners
from tests.cli.test_serve import serving
from tests.client.lasting import ONE_GROUP
from tests.store import servers
from tests.twins import weakened

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
    owners = Owners.at("one, two,three,*", {**CHANNELS, "owner:1": "OWNER"}.__getitem__)
    assert owners.present == "ONE"
    assert owners.instead_of("ONE") == "TWO"
    assert owners.instead_of("ONE") == "TWO", "another thread has moved on already"
    owner = owners.after(Moved("", metadata={"address": "owner:1"}), 1)
    assert owners.has_other_than(owner)
    assert owners.instead_of(owner) == "TWO", "who named the owner is asked again"
    assert [owners.instead_of(owners.present) for _ in range(3)] == ["THREE", "ONE", "TWO"]
    assert not Owners.at("one", CHANNELS.__getitem__).has_other_than("ONE")


def test_address_lists_are_parsed():
    assert Addresses("a:1, b:2,*.c").services == ["a:1", "b:2"]
    assert Addresses("ipv4:1.2.3.4:5,6.7.8.9:5").services == ["ipv4:1.2.3.4:5,6.7.8.9:5"]
    for wrong in ("a:1,", "", "*", "*.b", "a:1,*b", "a:1,*.", "a:1,*.b:7070", "a:1,*.b*", "a:1,**"):
        with pytest.raises(InvalidArgument, match="list of addresses") as caught:
            Addresses(wrong)
        assert caught.value.field == "address"


@pytest.mark.parametrize(
    ("given", "permitted", "refused"),
    [
        ("a:1", "a:1 a:2 A:2 a.:2", "b:1 x.a:1 a a:x unix:/a dns:///a:1 dns://b/a:1 xds:///a:1 a/a:1 a:1,b:1 [::1]:1"),
        ("a.b:1,*.c.d", "a.b:7 x.c.d:1 y.x.C.D:1", "c.d:1 xc.d:1 x.c.d x.c.d.e:1 unix:/x.c.d:1 dns://e/x.c.d:1"),
        ("a:1,*", "b:1 [::1]:1 127.0.0.1:1", "b unix:/a:1 dns://b/c:1 x/y:1"),
        ("dns:///a.b:1", "a.b:2", "b:1"),
        ("dns://c/a.b:1,unix:/run/a", "a.b:2 unix:/run/a", "c:1 unix:/run/b"),
        ("ipv4:1.2.3.4:5,6.7.8.9:5", "1.2.3.4:1 6.7.8.9:1", "1.2.3.5:5 4:1"),
        ("ipv6:[::1]:5,[::2]:5", "[::1]:1 [::2]:1", "[::3]:5"),
        ("localhost:1", "localhost:2", "127.0.0.1:1"),
    ],
)
def test_redirections_are_followed_to_the_hosts_of_the_list_and_its_patterns(given, permitted, refused):
    addresses = Addresses(given)
    assert [one for one in permitted.split() if not addresses.permit(one)] == []
    assert [one for one in refused.split() if addresses.permit(one)] == []


def test_a_redirection_to_another_host_is_refused_with_a_remedy_and_opens_no_channel():
    owners = Owners.at("one", CHANNELS.__getitem__)
    moved = Moved("the service at owner:1 owns r", metadata={"address": "owner:1"})
    with pytest.raises(Moved, match="does not permit redirections to owner:1") as caught:
        owners.after(moved, 1)
    assert caught.value.metadata == {"address": "owner:1"}
    assert "*.SUFFIX" in caught.value.remedy
    assert owners.close() == ["ONE"]
    with weakened("redirect followed blindly"):
        assert Owners.at("one", CHANNELS.__getitem__).after(Moved("m", metadata={"address": "owner"}), 1) == "OWNER"
