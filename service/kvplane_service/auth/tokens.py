"""Static bearer tokens. The file `auth_tokens` contains only digests of tokens, so reading it gives no access.

A line is `sha256:HEX OWNER`; `#` begins a comment. An owner may have several tokens, so that they can be rotated. A
token has 256 random bits, so an unsalted digest is safe.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvplane.base.errors import InvalidArgument
from kvplane_service.auth.files import Reloaded, read_bytes

KEY = "auth_tokens"
METRICS_KEY = "metrics_token_file"
PREFIX = "kvp_"
MAX_TOKENS = 4096
_METRICS_TOKEN = re.compile(rb"[!-~]{16,512}")
_LINE = re.compile(r"sha256:([0-9a-f]{64})\s+(\S+)")


@dataclass(frozen=True, slots=True)
class StaticTokens:
    """Pairs of a token's SHA-256 digest and the name of the token's owner."""

    digests: tuple[tuple[bytes, str], ...] = ()

    def find(self, token: str) -> str | None:
        """Return the name of the token's owner, None for an unknown token. Compares with all digests in constant time,
        so that the time reveals nothing about known tokens.
        """
        digest, found = _digest(token), None
        for known, owner in self.digests:
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def line_of(token: str, owner: str) -> str:
    """Return the line to add to the file `auth_tokens` for this token and owner."""
    return f"sha256:{_digest(token).hex()} {owner}"


def read_tokens(path: str) -> StaticTokens:
    """Read the file `auth_tokens`. Raises NotFound, or InvalidArgument that names the line number but not the content
    of the line, which may be a token.
    """
    text = read_bytes(path, KEY).decode(errors="replace")
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            what = f"line {number} of {path} has not the form `sha256:HEX OWNER`"
            raise _refused(what, "replace it by the second line that `kvplane token` prints")
        digest = bytes.fromhex(match[1])
        if digest in found:
            what = f"line {number} of {path} has the same token as an earlier line"
            raise _refused(what, "use a different token on each line")
        found[digest] = match[2]
    if len(found) > MAX_TOKENS:
        what = f"{path} has {len(found)} tokens, at most {MAX_TOKENS} are allowed"
        raise _refused(what, "remove tokens, or use auth_jwks")
    return StaticTokens(tuple(found.items()))


def read_metrics_token(path: str) -> bytes:
    """Read the file `metrics_token_file`, which has one token. Raises NotFound, or InvalidArgument."""
    token = read_bytes(path, METRICS_KEY).strip()
    if not _METRICS_TOKEN.fullmatch(token):
        raise InvalidArgument(
            f"{path} has not one token of 16 to 512 printable characters without spaces",
            field=METRICS_KEY,
            remedy=f"write one with: openssl rand -hex 32 > {path}",
        )
    return token


def metrics_token(path: str) -> Callable[[], bytes] | None:
    """Return a function that returns the newest valid token of the file; None without a file. Raises as
    `read_metrics_token`.
    """
    return Reloaded([path], partial(read_metrics_token, path)).get if path else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _refused(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
