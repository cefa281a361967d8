"""JSON Web Tokens (RFC 7519), verified with the public keys of a JWKS file (RFC 7517).

The key determines the algorithm, never the token: this excludes `none`, and a public key used as the secret of an HMAC.
Symmetric keys are refused when the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import jwt

from kvplane.base.errors import InvalidArgument, Unauthenticated
from kvplane_service.auth.files import read_bytes

KEY = "auth_jwks"
ALGORITHMS = frozenset(
    ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
)
LEEWAY_S = 10
MAX_TOKEN_CHARS = 8192
MAX_KEYS = 256
_CLAIMS = ["exp", "iss", "aud", "sub"]


@dataclass(frozen=True, slots=True)
class Claims:
    """The subject of a valid token, and its expiry in seconds since 1970."""

    subject: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class WebTokens:
    """Keys by id, with the required issuer and audience of their tokens."""

    keys: Mapping[str, jwt.PyJWK]
    issuer: str
    audience: str

    def check(self, token: str) -> Claims:
        """The claims of a token. Raises Unauthenticated; the message never contains the token."""
        if len(token) > MAX_TOKEN_CHARS:
            raise _refused(f"the token has more than {MAX_TOKEN_CHARS} characters")
        try:
            key = self._key_of(token)
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self.issuer,
                audience=self.audience,
                leeway=LEEWAY_S,
                options={"require": _CLAIMS},
            )
        except jwt.PyJWTError as error:
            raise _refused(f"the token is invalid: {_cause(error)}") from None
        return Claims(claims["sub"], float(claims["exp"]) + LEEWAY_S)

    def _key_of(self, token: str) -> jwt.PyJWK:
        kid = jwt.get_unverified_header(token).get("kid")
        key = self.keys.get(kid) if isinstance(kid, str) else None
        if key is None:
            raise _refused("no key of auth_jwks has the token's kid")
        return key


def read_web_tokens(path: str, issuer: str, audience: str) -> WebTokens:
    """Read the file. Raises NotFound, InvalidArgument naming the key at fault."""
    try:
        listed = json.loads(read_bytes(path, KEY))["keys"]
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KEYS:
            raise ValueError("no list of keys")
    except (ValueError, KeyError, TypeError):
        raise _bad_file(f"{path} is not a JWKS", f"write {{'keys': [...]}} with 1 to {MAX_KEYS} keys") from None
    keys: dict[str, jwt.PyJWK] = {}
    for at, one in enumerate(listed):
        kid, key = _read_key(one, f"keys[{at}] of {path}")
        if kid in keys:
            raise _bad_file(f"keys[{at}] of {path} repeats a kid", "give each key a unique id")
        keys[kid] = key
    return WebTokens(keys, issuer, audience)


def _read_key(one: object, where: str) -> tuple[str, jwt.PyJWK]:
    if not isinstance(one, dict) or not isinstance(one.get("kid"), str):
        raise _bad_file(f"{where} has no kid", "give each key an id")
    if one.get("kty") == "oct" or "d" in one:
        raise _bad_file(f"{where} is secret", "list only public keys")
    try:
        key = jwt.PyJWK.from_dict(one)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise _bad_file(f"{where} is not a public key", "write it as defined by RFC 7517") from None
    if key.algorithm_name not in ALGORITHMS:
        raise _bad_file(f"{where} is for {key.algorithm_name}", f"use one of {', '.join(sorted(ALGORITHMS))}")
    return one["kid"], key


def _cause(error: jwt.PyJWTError) -> str:
    """Our own messages, because those of the library may contain parts of the token."""
    causes = {
        jwt.ExpiredSignatureError: "it has expired",
        jwt.ImmatureSignatureError: "it is not valid yet",
        jwt.InvalidAudienceError: "it is for another audience",
        jwt.InvalidIssuerError: "it is of another issuer",
        jwt.InvalidAlgorithmError: "its algorithm is not that of its key",
        jwt.InvalidSignatureError: "its signature is not that of its key",
        jwt.MissingRequiredClaimError: f"one of {', '.join(_CLAIMS)} is missing",
    }
    return next((cause for kind, cause in causes.items() if isinstance(error, kind)), "it cannot be read")


def _refused(what: str) -> Unauthenticated:
    return Unauthenticated(what, field="authorization", remedy="get a new token from its issuer")


def _bad_file(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
