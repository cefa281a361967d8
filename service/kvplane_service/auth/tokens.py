"""Static bearer tokens. The file `auth_tokens` has only their digests: reading it does not give access.

A line is `sha256:HEX OWNER`; `#` begins a comment. An owner may have several tokens, so that they can be rotated. A
token has 256 random bits, so that an unsalted digest is safe.
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
    """Digests of tokens, with the owners of the tokens."""

    digests: tuple[tuple[bytes, str], ...] = ()

    def find(self, token: str) -> str | None:
        """Name of the owner, None for an unknown token. Takes constant time for all tokens."""
        digest, found = _digest(token), None
        for known, owner in self.digests:
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def new_token() -> str:
    """A new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def line_of(token: str, owner: str) -> str:
    """The line of the file for this token and owner."""
    return f"sha256:{_digest(token).hex()} {owner}"


def read_tokens(path: str) -> StaticTokens:
    """Read the file. Raises NotFound, InvalidArgument naming a line but not its content, which may be a token."""
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
            raise _refused(f"line {number} of {path} repeats a token", "use a different token per line")
        found[digest] = match[2]
    if len(found) > MAX_TOKENS:
        raise _refused(f"{path} has {len(found)} tokens", f"keep at most {MAX_TOKENS}, or use auth_jwks")
    return StaticTokens(tuple(found.items()))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _refused(what: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(what, field=KEY, remedy=remedy)
