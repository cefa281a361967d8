"""Verify JSON Web Tokens (RFC 7519) with the public keys of a JWKS file (RFC 7517).

The key determines the algorithm; the algorithm that the token states is not trusted. This excludes tokens with the
algorithm `none`, and tokens signed by an HMAC whose secret is a public key. The file may not contain symmetric keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from kvplane.base.errors import InvalidArgument, Unauthenticated
from kvplane_service.auth.files import read_bytes

KEY = "auth_jwks"
ALGORITHMS = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"))
LEEWAY_S = 10
MAX_TOKEN_CHARS = 8192
MAX_KEYS = 256
MIN_RSA_BITS = 2048  # RFC 7518, section 3.3
_CLAIMS = ["exp", "iss", "aud", "sub"]


@dataclass(frozen=True, slots=True)
class Claims:
    """The subject of a valid token, and the time in seconds since 1970 at which the token expires."""

    subject: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class WebTokens:
    """Public keys by key id, and the issuer and audience that tokens must state."""

    keys: Mapping[str, jwt.PyJWK]
    issuer: str
    audience: str

    def check(self, token: str) -> Claims:
        """Verify a token and return its claims. Raises Unauthenticated; the message never contains the token."""
        if len(token) > MAX_TOKEN_CHARS:
            raise _refused(f"the token has {len(token)} characters, more than {MAX_TOKEN_CHARS}")
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
            return Claims(claims["sub"], float(claims["exp"]) + LEEWAY_S)
        except jwt.PyJWTError as error:
            raise _refused(f"the token is invalid: {_cause(error)}") from None
        except OverflowError:
            raise _refused("the token's time of expiry (`exp`) is not a time") from None

    def _key_of(self, token: str) -> jwt.PyJWK:
        kid = jwt.get_unverified_header(token).get("kid")
        key = self.keys.get(kid) if isinstance(kid, str) else None
        if key is None:
            raise _refused("no key in auth_jwks has the key id (`kid`) that the token states")
        return key


def read_web_tokens(path: str, issuer: str, audience: str) -> WebTokens:
    """Read the JWKS file at `path`. Raises NotFound, or InvalidArgument that names the key at fault."""
    try:
        listed = json.loads(read_bytes(path, KEY))["keys"]
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KEYS:
            raise ValueError("no list of keys")
    except (ValueError, KeyError, TypeError, RecursionError):
        remedy = f"write {{'keys': [...]}} with 1 to {MAX_KEYS} keys"
        raise _bad_file(f"{path} is not a JSON Web Key Set", remedy) from None
    keys: dict[str, jwt.PyJWK] = {}
    for at, one in enumerate(listed):
        kid, key = _read_key(one, f"keys[{at}] of {path}")
        if kid in keys:
            what = f"keys[{at}] of {path} has the same `kid` as an earlier key"
            raise _bad_file(what, "give each key a unique `kid`")
        keys[kid] = key
    return WebTokens(keys, issuer, audience)


def _read_key(one: object, where: str) -> tuple[str, jwt.PyJWK]:
    if not isinstance(one, dict) or not isinstance(one.get("kid"), str):
        raise _bad_file(f"{where} has no text `kid`", "give each key a `kid`, its key id")
    if one.get("kty") == "oct" or "d" in one:
        raise _bad_file(f"{where} is a symmetric or private key", "list only public keys")
    try:
        key = jwt.PyJWK.from_dict(one)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise _bad_file(f"{where} is not a valid public key", "write it as defined by RFC 7517") from None
    if key.algorithm_name not in ALGORITHMS:
        what = f"{where} is for the algorithm {key.algorithm_name}"
        raise _bad_file(what, f"use one of {', '.join(sorted(ALGORITHMS))}")
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        raise _bad_file(f"{where} is an RSA key of {key.key.key_size} bits", f"use one of {MIN_RSA_BITS} bits or more")
    return one["kid"], key


def _cause(error: jwt.PyJWTError) -> str:
    """Return a text that describes an error of the JWT library. The library's own text is not used, because it may
    contain parts of the token.
    """
    causes = {
        jwt.ExpiredSignatureError: "it has expired",
        jwt.ImmatureSignatureError: "it is not valid yet",
        jwt.InvalidAudienceError: "its audience (`aud`) is not auth_jwt_audience",
        jwt.InvalidIssuerError: "its issuer (`iss`) is not auth_jwt_issuer",
        jwt.InvalidAlgorithmError: "its algorithm is not the algorithm of its key",
        jwt.InvalidSignatureError: "its signature does not match its key",
        jwt.MissingRequiredClaimError: f"one of the claims {', '.join(_CLAIMS)} is missing",
    }
    return next((cause for kind, cause in causes.items() if isinstance(error, kind)), "it is not a JSON Web Token")


def _refused(what: str) -> Unauthenticated:
    return Unauthenticated(what, field="authorization", remedy="get a new token from its issuer")


def _bad_file(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
