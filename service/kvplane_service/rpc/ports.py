"""Listen addresses, errors that name the cause, and TLS credentials that follow changed certificate files."""

from __future__ import annotations

import errno
import os
import socket

import grpc
import grpc.aio

from kvplane.base.errors import Unavailable
from kvplane_service.auth.certificates import Certificates, read_certificates
from kvplane_service.auth.files import Reloaded
from kvplane_service.config import Config


def add_port(
    server: grpc.aio.Server, address: str, key: str = "listen", credentials: grpc.ServerCredentials | None = None
) -> str:
    """Add a listen address to a server. Returns the address, with the selected port for port 0.

    Args:
        server: not started yet.
        address: host:port or unix:PATH.
        key: configuration key that errors name.
        credentials: for TLS; None = plain text.

    Raises:
        Unavailable: the address is in use, or not of this machine.
    """
    check_free(address, key)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _not_free(address, str(error), key) from None
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def check_free(address: str, key: str) -> None:
    """Raise Unavailable, with the cause, when the address cannot be listened on.

    The error of gRPC has no cause, and gRPC removes the socket file of a process that still listens on it.
    """
    path = address.removeprefix("unix:")
    try:
        if path != address:
            _check_socket_file(path)
        else:
            host, _, port = address.rpartition(":")
            _check_port(host.strip("[]"), int(port))
    except OSError as error:
        raise _not_free(address, error.strerror or str(error), key) from None


def _check_socket_file(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _check_port(host: str, port: int) -> None:
    """A name may resolve to addresses that this machine lacks (localhost without IPv6): one usable address suffices."""
    unusable: list[OSError] = []
    places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            unusable.append(error)
    if len(unusable) == len(places):
        raise unusable[0]


def _not_free(address: str, cause: str, key: str) -> Unavailable:
    flag = "--listen" if key == "listen" else key
    return Unavailable(
        f"cannot listen on {address}: {cause}",
        field=key,
        remedy=f"choose another address with {flag}; port 0 selects a free port",
    )


def server_credentials(config: Config) -> grpc.ServerCredentials:
    """Credentials of `tls_cert`, `tls_key` and `tls_client_ca`. Raises KvplaneError when they cannot be used."""
    paths = (config.tls_cert, config.tls_key, config.tls_client_ca)
    files = Reloaded([path for path in paths if path], lambda: read_certificates(*paths))

    def newest() -> grpc.ServerCertificateConfiguration:
        """Called by a thread of gRPC."""
        return _configuration(files.get())

    required = config.tls_client_auth == "require"
    return grpc.dynamic_ssl_server_credentials(newest(), newest, required)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca or None)
