"""Certificates for tests: an authority, and what it signs, as PEM files."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        basics = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._key.public_key(), 1).issuer_name(self._name)
        self.cert = str(folder / f"{name}.pem")
        _write(self.cert, builder.add_extension(basics, critical=True).sign(self._key, hashes.SHA256()))

    def issue(
        self, name: str, days: float = 1, uri: str = "", file: str = "", starts: float = -1, host: str = "127.0.0.1"
    ) -> Pair:
        """A certificate for an address and localhost; `days` from now it expires, `starts` days from now it begins."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)] if uri else []
        names += [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, key.public_key(), days, starts).issuer_name(self._name)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pair = Pair(str(self.folder / f"{file or name}.crt"), str(self.folder / f"{file or name}.key"))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        Path(pair.key).write_bytes(private)
        _write(pair.cert, builder.sign(self._key, hashes.SHA256()))
        return pair


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float, starts: float = -1
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=min(starts, days - 1)))
        .not_valid_after(now + timedelta(days=days))
    )


def _write(path: str, certificate: x509.Certificate) -> None:
    Path(path).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
