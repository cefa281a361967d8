"""From what the channel proves to an owner: a bearer token decides when there is one, else the client's certificate."""

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
    """What a call brings: metadata, and what TLS says of its peer."""

    authorization: tuple[str, ...]
    certificate_names: tuple[str, ...]

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]], peer: Mapping[str, Iterable[bytes]]) -> Proof:
        """From what gRPC tells of a call."""
        given = tuple(str(value) for key, value in metadata if key == "authorization")
        names = [name.decode(errors="replace") for key in _CERT_NAMES for name in peer.get(key, ())]
        return cls(given, tuple(names))


@dataclass(frozen=True, slots=True)
class Identity:
    """Who it is, until when (seconds since 1970, None = no end), by which state of the files."""

    owner: Owner
    expires_s: float | None
    book: Book


@dataclass(frozen=True, slots=True)
class Book:
    """What the files say, which agree with each other."""

    owners: Owners
    tokens: StaticTokens
    web_tokens: WebTokens | None

    def identify(self, proof: Proof) -> Identity:
        """Raises Unauthenticated, PermissionDenied when the subject is proven and belongs to no owner."""
        if len(proof.authorization) > 1:
            raise _unknown("there are several tokens")
        if proof.authorization:
            return self._by_token(proof.authorization[0])
        for name in proof.certificate_names:
            owner = self.owners.of_subject(f"cert:{name}")
            if owner is not None:
                return Identity(owner, None, self)
        if proof.certificate_names:
            raise _nobody(f"cert:{proof.certificate_names[0]}")
        raise _unknown("there is no token")

    def _by_token(self, header: str) -> Identity:
        if header[: len(_BEARER)].lower() != _BEARER:
            raise _unknown("the authorization is not `Bearer TOKEN`")
        token = header[len(_BEARER) :].strip()
        name = self.tokens.find(token)
        if name is not None:
            owner = self.owners.get(name)
            assert owner is not None, "read_book checked it"
            return Identity(owner, None, self)
        if self.web_tokens is None or token.count(".") != 2:
            raise _unknown("the token is not known")
        claims = self.web_tokens.check(token)
        owner = self.owners.of_subject(f"jwt:{claims.subject}")
        if owner is None:
            raise _nobody(f"jwt:{claims.subject}")
        return Identity(owner, claims.expires_s, self)


class Identities:
    """Tells who calls, by the newest state of the files."""

    def __init__(self, config: Config, now_s: Callable[[], float] = time.time) -> None:
        """Read the files; raises NotFound, InvalidArgument. `now_s`: seconds since 1970."""
        paths = [path for path in (config.auth_owners, config.auth_tokens, config.auth_jwks) if path]
        self._book = Reloaded(paths, lambda: _read_book(config))
        self._now_s = now_s

    def identify(self, proof: Proof) -> Identity:
        """Raises Unauthenticated, PermissionDenied."""
        return self._book.get().identify(proof)

    def still_holds(self, proof: Proof, identity: Identity) -> bool:
        """Whether a call that goes on may do so: nothing has expired, been taken away, or become another owner's."""
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
                f"{name!r} is not in {config.auth_owners}", field="auth_tokens", remedy="add the owner there"
            )
    keys = None
    if config.auth_jwks:
        keys = read_web_tokens(config.auth_jwks, config.auth_jwt_issuer, config.auth_jwt_audience)
    return Book(owners, tokens, keys)


def _unknown(what: str) -> Unauthenticated:
    return Unauthenticated(what, field="authorization", remedy="send `authorization: Bearer TOKEN`")


def _nobody(subject: str) -> PermissionDenied:
    return PermissionDenied(
        f"{subject[:140]!r} is no owner here",
        field="authorization",
        remedy="let an operator add it to the subjects of an owner",
    )
