"""Certificates for names in a cluster, by the authority of the other tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.service import certificates


class Texts(NamedTuple):
    """A certificate and its key, as PEM."""

    certificate: str
    key: str


class Authority(certificates.Authority):
    """Also signs for names of DNS."""

    @property
    def certificate(self) -> str:
        return Path(self.cert).read_text()

    def issue_for(self, names: Sequence[str]) -> Texts:
        """A certificate of a day for these names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        builder = certificates._builder(subject, key.public_key(), 1).issuer_name(self._name)
        wanted = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        signed = builder.add_extension(wanted, critical=False).sign(self._key, hashes.SHA256())
        pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
        return Texts(signed.public_bytes(pem).decode(), private.decode())
