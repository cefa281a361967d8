"""Options that describe a prompt, for the commands that look it up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvplane.base.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from kvplane import Content

Tokens: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="File with token IDs separated by spaces, commas or newlines; - reads standard input."),
]
Domain: TypeAlias = Annotated[str, typer.Option(help="Domain of the prompt.")]
Salt: TypeAlias = Annotated[str, typer.Option(help="Cache salt of the prompt.")]
Lora: TypeAlias = Annotated[str, typer.Option(help="LoRA adapter of the prompt: NAME or NAME=PATH.")]


def content_of(file: Path, domain: str, salt: str, lora: str) -> Content:
    """Return the prompt whose token ids are in the file. Raises NotFound, InvalidArgument."""
    from kvplane.base.requests import Content
    from kvplane.base.step import ExtraKeys

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        ids = [int(piece) for piece in text.replace(",", " ").replace("[", " ").replace("]", " ").split()]
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror}"
        raise NotFound(what, field="--tokens", remedy="name a readable file, or - for standard input") from None
    except ValueError as error:
        what = f"{file} contains a value that is not a token id: {error}"
        raise InvalidArgument(what, field="--tokens", remedy="write integers separated by spaces or commas") from None
    name, _, path = lora.partition("=")
    keys = ExtraKeys(lora=(name, path) if lora else None, salt=salt)
    return Content(token_ids=ids, domain=domain, extra_keys=keys)
