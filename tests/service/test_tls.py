"""TLS and mutual TLS of the service, with certificates that change while it runs."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane import (
    AdmitRow,
    Client,
    InvalidArgument,
    ModelSource,
    NewsRow,
    NotFound,
    Tls,
    Unavailable,
    aio,
    connect,
    part_of,
)
from kvplane.sansio.retry import RetryPolicy
from kvplane_service.auth.certificates import read_certificates
from kvplane_service.config import Config
from kvplane_service.rpc.ports import server_credentials
from tests.service.certificates import Authority
from tests.service.rig import running

ONCE = RetryPolicy(attempts=1)
MODEL = ModelSource(model="llama-3.1-8b", num_blocks=100, max_model_len=512)
PROMPT = part_of(NewsRow(0, tokens=list(range(40))), AdmitRow(0))


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def config(authority, **more) -> Config:
    server = authority.issue("server")
    return Config(listen="127.0.0.1:0", tls_cert=server.cert, tls_key=server.key, **more)


def assert_unanswered(client: Client) -> None:
    with pytest.raises(Unavailable):
        client.status()


def shown_by(address: str) -> bytes:
    """The certificate that a new connection is shown."""
    host, _, port = address.partition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))


def test_sessions_and_calls_run_over_tls(authority):
    with running(config(authority)) as service, connect(service.address, tls=Tls(authority.cert)) as client:
        client.register_replica("r", MODEL)
        with client.session("r") as session:
            assert session.apply(PROMPT).parts[0].admit_granted == [40]


async def test_asyncio_sessions_run_over_tls(authority):
    with running(config(authority)) as service:
        async with aio.connect(service.address, tls=Tls(authority.cert)) as client:
            await client.register_replica("r", MODEL)
            async with await client.session("r") as session:
                assert (await session.apply(PROMPT)).parts[0].admit_granted == [40]


def test_plaintext_clients_are_refused(authority):
    with running(config(authority)) as service, connect(service.address, retry=ONCE) as client:
        assert_unanswered(client)


def test_a_certificate_of_another_authority_is_refused_by_the_client(authority, tmp_path):
    other = Authority(tmp_path, "other")
    with running(config(authority)) as service, connect(service.address, tls=Tls(other.cert), retry=ONCE) as client:
        assert_unanswered(client)


def test_clients_without_required_certificate_are_refused(authority, tmp_path):
    asking = config(authority, tls_client_auth="require", tls_client_ca=authority.cert)
    mine, strange = authority.issue("engine"), Authority(tmp_path, "other").issue("thief")
    with running(asking) as service:
        for pair in (("", ""), strange):
            with connect(service.address, tls=Tls(authority.cert, *pair), retry=ONCE) as client:
                assert_unanswered(client)
        with connect(service.address, tls=Tls(authority.cert, *mine)) as client:
            assert client.status().version


def test_a_renewed_certificate_is_used_without_a_restart(authority):
    with running(config(authority)) as service:
        first = shown_by(service.address)
        with connect(service.address, tls=Tls(authority.cert)) as client:
            client.register_replica("r", MODEL)
            with client.session("r") as session:
                authority.issue("server", days=2)
                assert shown_by(service.address) != first
                assert session.apply(PROMPT).parts[0].admit_granted == [40], "open sessions continue"


def test_an_invalid_renewal_is_ignored(authority, caplog):
    with running(config(authority)) as service:
        first = shown_by(service.address)
        authority.issue("server", days=-1)
        assert shown_by(service.address) == first
        Path(authority.folder / "server.key").unlink()
        assert shown_by(service.address) == first
    assert "expired on" in caplog.text
    assert "server.key cannot be read: No such file" in caplog.text


def test_health_port_serves_only_health(authority):
    with running(config(authority, health_listen="127.0.0.1:0")) as service:
        address = service.app.health_address
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "readiness", "liveness", "kvplane.v1.Allocation"):
                request = health_pb2.HealthCheckRequest(service=name)
                assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        with connect(address, retry=ONCE) as client, pytest.raises(Exception, match="Method not found"):
            client.status()


def test_tls_files_are_ignored_without_tls():
    with running() as service:
        assert service.app.health_address == ""


def text_file(folder: Path) -> str:
    path = folder / "text"
    path.write_text("no PEM")
    return str(path)


# What is said -> the pair that it is said of.
BROKEN: dict[str, Callable[[Authority], tuple[str, str]]] = {
    "expired on": lambda authority: authority.issue("server", days=-1),
    "is valid from": lambda authority: authority.issue("server", days=3, starts=2),
    "does not belong to the first certificate": lambda authority: (authority.issue("a").cert, authority.issue("b").key),
    "contains no PEM certificate": lambda authority: (text_file(authority.folder), authority.issue("a").key),
    "contains no PEM private key": lambda authority: (authority.issue("a").cert, text_file(authority.folder)),
    "No such file": lambda authority: (authority.issue("a").cert, "nothing.pem"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_invalid_certificate_pairs_are_refused_at_start(authority, what):
    cert, key = BROKEN[what](authority)
    with pytest.raises((InvalidArgument, NotFound), match=what) as caught:
        server_credentials(Config(tls_cert=cert, tls_key=key))
    assert caught.value.field in ("tls_cert", "tls_key")
    assert caught.value.remedy


def test_a_file_that_is_too_large_is_refused(tmp_path):
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 30)
    with pytest.raises(InvalidArgument, match="bytes"):
        read_certificates(str(large), str(large), "")


def test_authorities_of_clients_must_be_certificates(authority):
    pair = authority.issue("server")
    with pytest.raises(InvalidArgument, match="contains no PEM certificate") as caught:
        read_certificates(pair.cert, pair.key, pair.key)
    assert caught.value.field == "tls_client_ca"
