"""Read the service's certificate and private key, and validate them before they are used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvplane.base.errors import InvalidArgument
from kvplane_service.auth.files import read_bytes


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the PEM files: the certificate chain, its key, and the authorities that client certificates are
    verified against (empty if clients need no certificate).
    """

    chain: bytes
    key: bytes
    client_ca: bytes = b""


def read_certificates(cert: str, key: str, client_ca: str) -> Certificates:
    """Read the files named by `tls_cert`, `tls_key` and `tls_client_ca`; the last path may be empty.

    Raises:
        NotFound: a file cannot be read.
        InvalidArgument: a file is not PEM, the certificate is expired or not valid yet, or the key does not match
            the certificate.
    """
    chain, private = read_bytes(cert, "tls_cert"), read_bytes(key, "tls_key")
    leaf = _parse_chain(chain, cert, "tls_cert")[0]
    _check_time(leaf, cert)
    _check_pair(leaf, _parse_key(private, key), key)
    if not client_ca:
        return Certificates(chain, private)
    authorities = read_bytes(client_ca, "tls_client_ca")
    _parse_chain(authorities, client_ca, "tls_client_ca")
    return Certificates(chain, private, authorities)


def _parse_chain(pem: bytes, path: str, key: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        what, remedy = f"{path} contains no PEM certificate", "name a PEM file of certificates"
        raise InvalidArgument(what, field=key, remedy=remedy) from None


def _parse_key(pem: bytes, path: str) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(pem, None)
    except (ValueError, UnsupportedAlgorithm):
        what = f"{path} contains no PEM private key of a supported type"
    except TypeError:
        what = f"the private key in {path} has a passphrase"
    raise InvalidArgument(what, field="tls_key", remedy="name a PEM file of a private key without a passphrase")


def _check_time(leaf: x509.Certificate, path: str) -> None:
    now, first, last = datetime.now(UTC), leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if first <= now <= last:
        return
    what = f"expired on {last:%Y-%m-%d %H:%M} UTC" if now > last else f"is valid from {first:%Y-%m-%d %H:%M} UTC on"
    remedy = "renew the certificate" if now > last else "wait until then, or correct the clock of this machine"
    raise InvalidArgument(f"the certificate in {path} {what}", field="tls_cert", remedy=remedy)


def _check_pair(leaf: x509.Certificate, key: PrivateKeyTypes, path: str) -> None:
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise InvalidArgument(
            f"the private key in {path} does not belong to the first certificate of tls_cert",
            field="tls_key",
            remedy="name the key that this certificate was issued for",
        )
