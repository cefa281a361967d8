"""Options that describe a prompt, for the commands that look it up."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvplane.base.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from kvplane import Content

Tokens: TypeAlias = Annotated[
    str | None,
    typer.Option("--tokens", help="Token ids of a prompt: 1,2,3, or a file with them; - reads standard input."),
]
Domain: TypeAlias = Annotated[str, typer.Option(help="Domain of the prompt.")]
Salt: TypeAlias = Annotated[str, typer.Option(help="Cache salt of the prompt.")]
Lora: TypeAlias = Annotated[str, typer.Option(help="LoRA adapter of the prompt: NAME or NAME=PATH.")]


_LIST = re.compile(r"[\s,\[\]]*(\d[\s,\[\]]*)+")
_LIKE_A_LIST = re.compile(r"[^,/.]+,[^/.]*")


def token_ids(given: str | None) -> list[int]:
    """Return the token ids that --tokens states or names a file of. Raises NotFound, InvalidArgument."""
    if given is None:
        raise InvalidArgument("the prompt is not given", field="--tokens", remedy="give its token ids, or a file")
    try:
        is_text = _LIST.fullmatch(given) or (_LIKE_A_LIST.fullmatch(given) and not Path(given).exists())
        text = given if is_text else sys.stdin.read() if given == "-" else Path(given).read_text()
        return [int(piece) for piece in re.sub(r"[,\[\]]", " ", text).split()]
    except OSError as error:
        what = f"{given} cannot be read: {error.strerror}"
        raise NotFound(what, field="--tokens", remedy="name a readable file, or - for standard input") from None
    except ValueError as error:
        what = f"{given[:80]} contains a value that is not a token id: {error}"
        raise InvalidArgument(what, field="--tokens", remedy="write integers separated by spaces or commas") from None


def content_of(tokens: str | None, domain: str, salt: str, lora: str) -> Content:
    """Return the prompt that the options state. Raises NotFound, InvalidArgument."""
    from kvplane.base.requests import Content
    from kvplane.base.step import ExtraKeys

    name, _, path = lora.partition("=")
    keys = ExtraKeys(lora=(name, path) if lora else None, salt=salt)
    return Content(token_ids=token_ids(tokens), domain=domain, extra_keys=keys)
