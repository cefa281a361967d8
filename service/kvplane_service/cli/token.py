"""`kvplane token`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def command(owner: Annotated[str, typer.Argument(help="Whom the token is for, as auth_owners names it.")]) -> None:
    """Make a bearer token: the first line is its owner's to keep, the second one belongs into auth_tokens."""
    from kvplane_service.auth.tokens import line_of, new_token

    token = new_token()
    sys.stdout.write(f"{token}\n{line_of(token, owner)}\n")
