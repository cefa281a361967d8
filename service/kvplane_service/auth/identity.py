"""Find the owner of a call by its bearer token, or, if it has no token, by its client certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvplane_service.auth.files import Reloaded
from kvplane_service.auth.owners import Owner, Owners, read_owners
from kvplane_service.auth.tokens import StaticTokens, read_tokens
from kvplane_service.auth.web_tokens import WebTokens, read_web_tokens
from kvplane_service.config import Config

_BEARER = "bearer "
_CERT_NAMES = ("x509_subject_alternative_name", "x509_common_name")


@dataclass(frozen=True, slots=True)
class Proof:
    """The credentials of a call: its `authorization` headers, and the names in the client's TLS certificate."""

    authorization: tuple[str, ...]
    certificate_names: tuple[str, ...]

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]], peer: Mapping[str, Iterable[bytes]]) -> Proof:
        """Return the credentials from the metadata and the auth context that gRPC reports for a call."""
        given = tuple(str(value) for key, value in metadata if key == "authorization")
        names = [name.decode(errors="replace") for key in _CERT_NAMES for name in peer.get(key, ())]
        return cls(given, tuple(names))


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated owner.

    Attributes:
        expires_s: seconds since 1970 at which the credentials expire, None = never.
        book: the file contents by which the owner was identified.
    """

    owner: Owner
    expires_s: float | None
    book: Book


@dataclass(frozen=True, slots=True)
class Book:
    """The parsed contents of the files of owners, tokens and keys. Every listed token belongs to a listed owner."""

    owners: Owners
    tokens: StaticTokens
    web_tokens: WebTokens | None

    def identify(self, proof: Proof) -> Identity:
        """Return the owner that the credentials belong to.

        Raises:
            Unauthenticated: the credentials are missing or invalid.
            PermissionDenied: the token or certificate is valid, and its subject belongs to no owner.
        """
        if len(proof.authorization) > 1:
            raise _unknown(f"the call has {len(proof.authorization)} authorization headers, not one")
        if proof.authorization:
            return self._by_token(proof.authorization[0])
        for name in proof.certificate_names:
            owner = self.owners.of_subject(f"cert:{name}")
            if owner is not None:
                return Identity(owner, None, self)
        if proof.certificate_names:
            raise _without_owner(f"cert:{proof.certificate_names[0]}")
        raise _unknown("the call has neither a bearer token nor a client certificate")

    def _by_token(self, header: str) -> Identity:
        if header[: len(_BEARER)].lower() != _BEARER:
            raise _unknown("the authorization header does not begin with `Bearer `")
        token = header[len(_BEARER) :].strip()
        name = self.tokens.find(token)
        if name is not None:
            owner = self.owners.get(name)
            assert owner is not None, "read_book checked it"
            return Identity(owner, None, self)
        if self.web_tokens is None or token.count(".") != 2:
            raise _unknown("the token is neither in auth_tokens nor a JSON Web Token that the service accepts")
        claims = self.web_tokens.check(token)
        owner = self.owners.of_subject(f"jwt:{claims.subject}")
        if owner is None:
            raise _without_owner(f"jwt:{claims.subject}")
        return Identity(owner, claims.expires_s, self)


class Identities:
    """Identifies callers by the files of owners, tokens and keys, which are read again when they change."""

    def __init__(self, config: Config, now_s: Callable[[], float] = time.time) -> None:
        """Read the files that the configuration names; `now_s` returns seconds since 1970. Raises NotFound,
        InvalidArgument.
        """
        paths = [path for path in (config.auth_owners, config.auth_tokens, config.auth_jwks) if path]
        self._book = Reloaded(paths, lambda: _read_book(config))
        self._now_s = now_s

    def identify(self, proof: Proof) -> Identity:
        """Return the owner that the credentials belong to. Raises Unauthenticated, PermissionDenied."""
        return self._book.get().identify(proof)

    def still_holds(self, proof: Proof, identity: Identity) -> bool:
        """Return True if the credentials of a running call have not expired, are not revoked, and still belong to the
        same owner.
        """
        book = self._book.get()
        if identity.expires_s is not None and self._now_s() > identity.expires_s:
            return False
        if book is identity.book:
            return True
        try:
            return book.identify(proof).owner == identity.owner
        except (Unauthenticated, PermissionDenied):
            return False


def _read_book(config: Config) -> Book:
    owners = read_owners(config.auth_owners)
    tokens = read_tokens(config.auth_tokens) if config.auth_tokens else StaticTokens()
    for _, name in tokens.digests:
        if owners.get(name) is None:
            raise InvalidArgument(
                f"a token in {config.auth_tokens} belongs to owner {name!r}, which is not in {config.auth_owners}",
                field="auth_tokens",
                remedy="add the owner to auth_owners, or remove the token",
            )
    keys = None
    if config.auth_jwks:
        keys = read_web_tokens(config.auth_jwks, config.auth_jwt_issuer, config.auth_jwt_audience)
    return Book(owners, tokens, keys)


def _unknown(what: str) -> Unauthenticated:
    return Unauthenticated(what, field="authorization", remedy="send `authorization: Bearer TOKEN`")


def _without_owner(subject: str) -> PermissionDenied:
    return PermissionDenied(
        f"the subject {subject[:140]!r} belongs to no owner",
        field="authorization",
        remedy="ask an operator to add it to the `subjects` of an owner in auth_owners",
    )
