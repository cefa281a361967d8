"""The picture of `kvplane plan --plot`: how many requests of a length fit at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from kvplane_service.models.sizing import Figures

SUFFIXES = (".png", ".svg", ".pdf")
_SIZE_INCHES = (7.0, 4.2)


def check_path(path: Path) -> None:
    """Whether a picture can be written there, before anything is planned. Raises InvalidArgument."""
    if path.suffix.lower() not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise InvalidArgument(f"{path.name!r} is no picture's name", field="plot", remedy=f"end it in one of {known}")
    if not path.resolve().parent.is_dir():
        raise InvalidArgument(f"there is no folder {str(path.parent)!r}", field="plot", remedy="make it first")
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder", field="plot", remedy="name a file")


def draw(title: str, by_length: Sequence[tuple[int, Figures]], path: Path) -> None:
    """Write requests at once over context length, hybrid beside uniform, both axes logarithmic.

    Raises:
        FailedPrecondition: matplotlib is not installed.
        InvalidArgument: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # draws without a display
    except ModuleNotFoundError:
        raise FailedPrecondition(
            "matplotlib is not installed", field="plot", remedy="pip install 'kvplane[plot]'"
        ) from None
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*((length, told.concurrency) for length, told in by_length), strict=True), "o-", label="hybrid")
    uniform = [(length, told.uniform_concurrency) for length, told in by_length if told.uniform_concurrency is not None]
    if uniform:
        axes.plot(*zip(*uniform, strict=True), "s--", label="uniform: every layer keeps every token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([length for length, _ in by_length], [f"{length // 1024}k" for length, _ in by_length])
    axes.set(title=title, xlabel="context length, tokens", ylabel="requests at once")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        raise InvalidArgument(problem, field="plot", remedy="name a place that can be written") from None
