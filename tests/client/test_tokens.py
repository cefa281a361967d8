"""Clients with a token: sessions, calls and subscriptions of the blocking and the asyncio client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplane import AdmitRow, FactRow, ModelSource, NewsRow, PermissionDenied, RunRow, Tls, aio, connect, part_of
from tests.service.certificates import Authority
from tests.service.guarded import guarded

MODEL = ModelSource(model="llama-3.1-8b", num_blocks=100, max_model_len=512)
PROMPT = part_of(NewsRow(0, tokens=list(range(40))), AdmitRow(0))
MORE = part_of(FactRow(0, tokens=[7]), RunRow(0))
STRANGE = part_of(NewsRow(1, tokens=[1], domain="platinum"), AdmitRow(1))


@pytest.fixture(params=["plain", "tls"])
def place(request, tmp_path):
    """A guarded service; its address, TLS, and a file with the token."""
    token = tmp_path / "token"
    token.write_text("token-acme")
    authority = Authority(tmp_path)
    server = authority.issue("server")
    files: dict[str, Any] = {"tls_cert": server.cert, "tls_key": server.key} if request.param == "tls" else {}
    with guarded(tmp_path, **files) as world:
        yield world.service.address, Tls(authority.cert) if files else None, token


def test_the_blocking_client_sends_its_token(place):
    address, tls, token = place
    with connect(address, tls=tls, token=token) as client:
        client.register_replica("acme/r", MODEL)
        with client.session("acme/r") as session:
            assert session.apply(PROMPT).parts[0].admit_granted == [40]
            with pytest.raises(PermissionDenied, match="platinum"):
                session.apply(STRANGE)
            assert session.apply(MORE).parts[0].granted == [1]
        batches = client.subscribe("acme/r", after_seq=0)
        assert next(batches).events
        assert [one.replica for one in client.list_replicas()] == ["acme/r"]
    with connect(address, tls=tls, token="token-rival") as client, pytest.raises(PermissionDenied):
        client.register_replica("acme/s", MODEL)


async def test_the_asyncio_client_sends_its_token(place):
    address, tls, token = place
    async with aio.connect(address, tls=tls, token=token) as client:
        await client.register_replica("acme/r", MODEL)
        async with await client.session("acme/r") as session:
            assert (await session.apply(PROMPT)).parts[0].admit_granted == [40]
            with pytest.raises(PermissionDenied, match="platinum"):
                await session.apply(STRANGE)
            assert (await session.apply(MORE)).parts[0].granted == [1]
        async for batch in client.subscribe("acme/r", after_seq=0):
            assert batch.events
            break


def test_a_renewed_token_file_is_used_by_an_open_client(place):
    address, tls, token = place
    with connect(address, tls=tls, token=Path(token)) as client:
        client.register_replica("acme/r", MODEL)
        token.write_text("token-rival")
        with pytest.raises(PermissionDenied):
            client.register_replica("acme/r", MODEL)
        token.write_text("token-acme")
        client.register_replica("acme/r", MODEL)
