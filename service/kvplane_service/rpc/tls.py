"""TLS of the service's port. Certificates change without a restart: each handshake asks for the newest."""

from __future__ import annotations

import grpc

from kvplane_service.auth.certificates import Certificates, read_certificates
from kvplane_service.auth.files import Reloaded
from kvplane_service.config import Config


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
