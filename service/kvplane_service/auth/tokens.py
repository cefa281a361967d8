"""Static bearer tokens. The file `auth_tokens` holds their digests alone: who reads it can call nobody.

A line is `sha256:HEX OWNER`; `#` begins a comment. An owner may have several, so that one can be replaced by the next.
A token is 256 random bits, so a plain digest cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument
from kvplane_service.auth.files import read_bytes

KEY = "auth_tokens"
PREFIX = "kvp_"
MAX_TOKENS = 4096
_LINE = re.compile(r"sha256:([0-9a-f]{64})\s+(\S+)")


@dataclass(frozen=True, slots=True)
class StaticTokens:
    """Digests of tokens and whose they are."""

    digests: tuple[tuple[bytes, str], ...] = ()

    def find(self, token: str) -> str | None:
        """Name of the owner. Takes as long whichever token it is, known or not."""
        digest, found = _digest(token), None
        for known, owner in self.digests:
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def new_token() -> str:
    """A token that nobody has."""
    return PREFIX + secrets.token_urlsafe(32)


def line_of(token: str, owner: str) -> str:
    """The line of the file for a token."""
    return f"sha256:{_digest(token).hex()} {owner}"


def read_tokens(path: str) -> StaticTokens:
    """Read the file. Raises NotFound, InvalidArgument naming a line, never what it holds: it may be a token."""
    text = read_bytes(path, KEY).decode(errors="replace")
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise _refused(f"line {number} of {path} is not `sha256:HEX OWNER`", "write what `kvplane token` prints")
        digest = bytes.fromhex(match[1])
        if digest in found:
            raise _refused(f"line {number} of {path} repeats a token", "give each line a token of its own")
        found[digest] = match[2]
    if len(found) > MAX_TOKENS:
        raise _refused(f"{path} has {len(found)} tokens", f"keep at most {MAX_TOKENS}; auth_jwks is for more")
    return StaticTokens(tuple(found.items()))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _refused(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
