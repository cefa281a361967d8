"""Open listen addresses, with errors that name the cause, and create TLS credentials that follow changed certificate
files.
"""

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
    """Add a listen address to a server, and return the address, with the selected port instead of port 0.

    Args:
        server: a server that is not started yet.
        address: host:port or unix:PATH.
        key: configuration key that errors name.
        credentials: TLS credentials; None = plain text.

    Raises:
        Unavailable: the address is in use, or does not belong to this machine.
    """
    check_free(address, key)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise not_free(address, str(error), key) from None
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def check_free(address: str, key: str) -> None:
    """Raise Unavailable, with the cause, if a server cannot listen on the address.

    gRPC's own error names no cause, and gRPC removes the socket file of another process that still listens on it.
    """
    path = address.removeprefix("unix:")
    try:
        if path != address:
            _check_socket_file(path)
        else:
            host, _, port = address.rpartition(":")
            _check_port(host.strip("[]"), int(port))
    except OSError as error:
        raise not_free(address, error.strerror or str(error), key) from None


def _check_socket_file(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            pass  # a process listens that accepts none of the connections that wait
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _check_port(host: str, port: int) -> None:
    """Raise OSError if no server can listen on the port. A name may also resolve to addresses that this machine lacks
    (localhost without IPv6), so one usable address suffices.
    """
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


def not_free(address: str, cause: str, key: str) -> Unavailable:
    """Return the error for an address on which no server can listen."""
    flag = "--listen" if key == "listen" else key
    return Unavailable(
        f"cannot listen on {address}: {cause}",
        field=key,
        remedy=f"choose another address with {flag}; port 0 selects a free port",
    )


def server_credentials(config: Config) -> grpc.ServerCredentials:
    """Return the TLS credentials of `tls_cert`, `tls_key` and `tls_client_ca`, which follow later changes of these
    files.

    Raises:
        NotFound: a file cannot be read.
        InvalidArgument: a file is invalid.
    """
    paths = (config.tls_cert, config.tls_key, config.tls_client_ca)
    files = Reloaded([path for path in paths if path], lambda: read_certificates(*paths))

    def newest() -> grpc.ServerCertificateConfiguration:
        """Return the newest valid certificates; a thread of gRPC calls it for each connection."""
        return _configuration(files.get())

    required = config.tls_client_auth == "require"
    return grpc.dynamic_ssl_server_credentials(newest(), newest, required)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca or None)
