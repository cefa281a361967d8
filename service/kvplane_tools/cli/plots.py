"""Plots of commands: check the path, make a figure, save it. matplotlib is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.base.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")
_INCHES = (7.0, 4.2)


def check_path(path: Path) -> None:
    """Raise InvalidArgument if no plot can be written to the path, before anything is computed for the plot."""
    if path.suffix.lower() not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        what = f"{path.name!r} does not end in the suffix of an image format"
        raise InvalidArgument(what, field="--plot", remedy=f"use one of {known}")
    if not path.resolve().parent.is_dir():
        what = f"the directory {str(path.parent)!r} does not exist"
        raise InvalidArgument(what, field="--plot", remedy="create the directory first")
    if path.is_dir():
        raise InvalidArgument(f"{path} is a directory", field="--plot", remedy="name a file")


def new_figure() -> Figure:
    """Return an empty figure. Raises FailedPrecondition if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # needs no display
    except ModuleNotFoundError:
        raise FailedPrecondition(
            "plots need matplotlib, which is not installed", field="--plot", remedy="pip install matplotlib"
        ) from None
    return Figure(figsize=_INCHES, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the figure to the file. Raises InvalidArgument if it cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise InvalidArgument(problem, field="--plot", remedy="name a writable path") from None
