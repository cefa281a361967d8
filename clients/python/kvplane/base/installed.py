"""How this kvplane was installed, and the command that installs more of it from the same place."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def command_for(extras: str) -> str:
    """Return the pip command that adds these extras, such as "cli,service", to this installation.

    An installation records its origin (direct_url.json of PEP 610): a clone, an archive or a git URL. Without a record
    it came from an index, which has the extras too.
    """
    try:
        recorded = distribution("kvplane").read_text("direct_url.json")
    except PackageNotFoundError:  # imported from a path
        return from_a_clone(extras)
    if recorded is None:
        return f"pip install {shlex.quote(f'kvplane[{extras}]')}"
    return _again(json.loads(recorded), extras)


def from_a_clone(extras: str) -> str:
    """Return the pip command for a reader whose working directory is a clone of the repository."""
    return f"pip install '.[{extras}]' in a clone of kvplane"


def _again(origin: dict[str, object], extras: str) -> str:
    url, vcs, folder = str(origin["url"]), origin.get("vcs_info"), origin.get("dir_info")
    if isinstance(vcs, dict):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
        if not path.exists():  # as in an image
            return from_a_clone(extras)
        editable = "--editable " if isinstance(folder, dict) and folder.get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{path}[{extras}]')}"
    return f"pip install {shlex.quote(f'kvplane[{extras}] @ {url}')}"
