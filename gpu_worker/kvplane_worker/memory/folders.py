"""Folders that no other user can write to or replace."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvplane.base.errors import InvalidArgument, PermissionDenied

OF_OTHERS = 0o077
WRITE_OF_OTHERS = 0o022


def make_private(path: Path, field: str, refused: int = OF_OTHERS) -> None:
    """Create a folder, with mode 0700, if it does not exist. Raises PermissionDenied if other users could replace it,
    or have one of the permissions `refused` in it; InvalidArgument if it cannot be made.

    The parent must belong to this user or to root: any other owner could replace the folder.
    """
    _make(path.parent, field, parents=True)
    if path.parent.stat().st_uid not in (0, os.geteuid()):
        raise PermissionDenied(
            f"{path.parent} belongs to another user, who could replace the directory {path.name} in it",
            field=field,
            remedy="choose a directory whose parent belongs to this user or to root",
        )
    _make(path, field, parents=False)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & refused:
        kind, remedy = ("private directory", "chmod 700") if refused == OF_OTHERS else ("directory", "chmod go-w")
        raise PermissionDenied(
            f"{path} is not a {kind} of user {os.geteuid()} that others cannot write to",
            field=field,
            remedy=f"choose another directory, or remove the access of other users ({remedy})",
        )


def _make(path: Path, field: str, parents: bool) -> None:
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        what = f"the directory {path} cannot be made: {error.strerror}"
        raise InvalidArgument(what, field=field, remedy="choose a directory that this user can make") from None
