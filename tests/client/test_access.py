"""TLS and tokens of a client, and what it refuses to send."""

from __future__ import annotations

import pytest

from kvplane import Access, InvalidArgument, NotFound, Tls, connect
from kvplane.rpc.channel import open_channel


@pytest.mark.parametrize(("tls", "field"), [(Tls(cert="x"), "tls.key"), (Tls(key="x"), "tls.cert")])
def test_cert_without_key_is_refused(tls, field):
    with pytest.raises(InvalidArgument, match="is given without") as caught:
        connect("127.0.0.1:1", tls=tls)
    assert caught.value.field == field


def test_unusable_tls_files_are_named(tmp_path):
    text = tmp_path / "text"
    text.write_text("no PEM")
    with pytest.raises(NotFound, match="No such file"):
        connect("127.0.0.1:1", tls=Tls(str(tmp_path / "nothing")))
    with pytest.raises(InvalidArgument, match="is not a PEM file"):
        connect("127.0.0.1:1", tls=Tls(str(text)))


@pytest.mark.parametrize("address", ["10.0.0.1:7070", "dns:///kvplane:7070", "localhost.example.org:7070"])
def test_a_token_does_not_cross_the_network_in_plain_text(address):
    with pytest.raises(InvalidArgument, match="in plain text"):
        connect(address, token="secret")
    open_channel(address, Access(Tls(), "secret")).close()


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "unix:/run/kvplane.sock", "localhost:7070", "[::1]:7070"])
def test_a_token_may_be_sent_in_plain_text_to_this_machine(address):
    connect(address, token="secret").close()


def test_a_token_is_not_in_the_repr():
    assert "secret" not in repr(Access(None, "secret"))


def test_a_token_file_is_read_for_each_call(tmp_path):
    path = tmp_path / "token"
    access = Access(None, path)
    for token in ("one", "two"):
        path.write_text(f"{token}\n")
        assert access.metadata() == (("authorization", f"Bearer {token}"),)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", b"\xff", b"t\x00"])
def test_a_malformed_token_is_refused_before_it_is_sent(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        Access(None, path).metadata()
    assert caught.value.field == "token"
    with pytest.raises(NotFound):
        Access(None, tmp_path / "nothing").metadata()
